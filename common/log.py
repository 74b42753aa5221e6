"""Console output, progress bar and files of a run. Rank 0 writes; logging never communicates."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.launch import UserError

RUN_FILES = {"checkpoints", "metrics.jsonl", "tensorboard", "curves.png", "result.json", "profile"}
RUN_FILES |= {"best.safetensors", "predictions.csv", "model", "samples"}


class Log:
    """Console output and files of a run. Ranks that are not `active` print and write nothing."""

    def __init__(self, out: Path, active: bool) -> None:
        self.out, self.active = out, active
        self._metrics = out / "metrics.jsonl"
        self._unwritten: list[dict[str, Any]] = []
        tqdm.set_lock(threading.RLock())  # tqdm's default semaphore would outlive a killed process
        self._bar = tqdm(unit="step", leave=False, disable=None if active else True)

    def print0(self, line: str) -> None:
        """Print a line above the progress bar."""
        if self.active:
            tqdm.write(line)
            sys.stdout.flush()

    def warn(self, line: str) -> None:
        """Print a warning on standard error, in yellow on a terminal."""
        if self.active:
            line = f"warning: {line}"
            tqdm.write(f"\033[33m{line}\033[0m" if sys.stderr.isatty() else line, sys.stderr)

    def open(self, step: int) -> None:
        """Create the files at step 0, or continue existing files, without values after `step`."""
        if not self.active:
            return
        if step == 0:
            self._move_earlier_run()
        points = [p for p in read_points(self._metrics) if p["step"] <= step]
        self._metrics.write_text("".join(json.dumps(point) + "\n" for point in points))
        from torch.utils.tensorboard import SummaryWriter  # takes a second; only rank 0 needs it

        self._events = SummaryWriter(str(self.out / "tensorboard"), purge_step=step + 1)

    def _move_earlier_run(self) -> None:
        """Move an earlier run's files aside, so that this run cannot resume from them."""
        if found := [path for path in self.out.glob("*") if path.name in RUN_FILES]:
            numbers = [int(p.suffix[1:]) for p in self.out.glob("earlier.*[0-9]")]
            earlier = self.out / f"earlier.{max(numbers, default=-1) + 1}"
            earlier.mkdir()
            for path in found:
                path.rename(earlier / path.name)
            self.print0(f"moved the files of an earlier run to {earlier}")

    def show_step(self, step: int, total: int, label: str) -> None:
        """Update the progress bar."""
        self._bar.total, self._bar.n = total, step
        self._bar.set_description_str(label, refresh=False)
        self._bar.update(0)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Record values for a step, under the names that TensorBoard shows."""
        if self.active:
            self._unwritten.append({"step": step, **values})
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def write(self) -> None:
        """Append the recorded values to metrics.jsonl."""
        if not self._unwritten:
            return
        try:
            with self._metrics.open("a") as file:
                file.writelines(json.dumps(point) + "\n" for point in self._unwritten)
        except OSError as error:
            text = f"cannot write {self._metrics}: {error.strerror}"
            raise UserError(f"{text}; check space and permissions") from None
        self._unwritten.clear()

    def close(self, result: Mapping[str, Any]) -> None:
        """Write the remaining values, curves.png and result.json."""
        self._bar.close()
        if self.active:
            self.write()
            self._events.close()
            if points := read_points(self._metrics):
                draw_curves(points, self.out / "curves.png")
            where = {"host": platform.node(), "commit": _commit()}
            text = json.dumps({**result, **where}, indent=2, default=str)
            (self.out / "result.json").write_text(text + "\n")


def read_points(path: Path) -> list[dict[str, Any]]:
    """Parse the complete lines of metrics.jsonl; after a kill, the last line may be incomplete."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def draw_curves(points: list[dict[str, Any]], path: Path) -> None:
    """Plot the losses against the steps, and the other metrics below them."""
    import matplotlib as mpl  # importing it and pandas takes 1.5 s

    mpl.use("Agg")
    mpl.rcParams["text.parse_math"] = False  # names may contain dollar signs
    import pandas as pd

    table = pd.DataFrame(points).groupby("step").mean()
    losses = list(table.filter(regex="^loss/"))
    groups = [group for group in (losses, list(table.drop(columns=losses))) if group]
    axes = table.interpolate(limit_area="inside").plot(
        subplots=groups, grid=True, figsize=(7.5, 3 * len(groups))
    )
    axes[0].figure.savefig(path, dpi=110, bbox_inches="tight")


def _commit() -> str:
    if revision := os.environ.get("SOURCE_REVISION"):  # set in container images
        return revision
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with contextlib.suppress(FileNotFoundError):  # git is not installed
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"
