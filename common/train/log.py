"""What a run shows and records while it goes on. Rank 0 does; nothing here communicates."""

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.launch.errors import UserError
from common.train.files import unwritable, write_atomically, writing

Point = tuple[int, dict[str, float]]
ROOM = 1 << 16  # bytes; with less, the thread of TensorBoard that writes would print a traceback


class Log:
    """Console, progress bar, metrics.jsonl and TensorBoard events.

    Args:
        out: the run's folder.
        active: whether this is rank 0; other ranks show and write nothing.
    """

    def __init__(self, out: Path, active: bool) -> None:
        tqdm.set_lock(threading.RLock())  # its own is a semaphore that outlives a killed process
        self.out = out
        self.active = active
        self.points: list[Point] = []  # all of the run, for the curves
        self._unwritten: list[Point] = []  # not yet in metrics.jsonl
        self._for_tensorboard: list[Point] = []  # not yet in the events
        self._writer: Any = None

    def print0(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.active:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def warn(self, line: str) -> None:
        """Print a warning on standard error, yellow on a terminal (not with NO_COLOR)."""
        if self.active:
            colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
            line = f"warning: {line}"
            tqdm.write(f"\033[1;33m{line}\033[0m" if colour else line, file=sys.stderr)

    def bar(self, label: str, total: int, done: int) -> tqdm:
        """A progress bar on rank 0's terminal; hidden where the output is not a terminal.

        Args:
            label: what it says.
            total: steps in the epoch.
            done: those of the run that this one resumes.
        """
        hidden = None if self.active else True  # None: tqdm asks whether there is a terminal
        return tqdm(None, label, total, initial=done, disable=hidden, leave=False, unit="step")

    def start(self, step: int, resumed: bool) -> None:
        """Start the curves, or go on with those of the run that is resumed, up to its step."""
        if not self.active:
            return
        file = self.out / "metrics.jsonl"
        self.points = [point for point in _points(file) if point[0] <= step] if resumed else []
        write_atomically(file, "".join(_line(*point) for point in self.points).encode())
        (self.out / "result.json").unlink(missing_ok=True)  # an earlier run's: this one may fail
        if not resumed:
            (self.out / "predictions.csv").unlink(missing_ok=True)
        for events in self.out.glob("tensorboard/events.*"):
            events.unlink()  # written anew from metrics.jsonl: nothing is missing or twice
        self._for_tensorboard = list(self.points)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of a step, by the names that TensorBoard and curves.png show."""
        if self.active:
            self.points.append((step, dict(values)))
            self._unwritten.append((step, dict(values)))

    def write_lines(self) -> None:
        """Write what has been recorded to metrics.jsonl.

        Raises:
            UserError: the disk is full, for example.
        """
        if self._unwritten:
            path = self.out / "metrics.jsonl"
            text = "".join(_line(*point) for point in self._unwritten)
            with writing(path, len(text)), path.open("a") as lines:
                lines.write(text)
            self._for_tensorboard += self._unwritten
            self._unwritten = []

    def write_events(self) -> None:
        """Write what is in metrics.jsonl to TensorBoard's events.

        Raises:
            UserError: the disk is full, for example.
        """
        if not self._for_tensorboard:
            return
        folder, disk = self.out / "tensorboard", os.statvfs(self.out)
        if disk.f_bavail * disk.f_frsize < ROOM:
            raise unwritable(folder, "No space left on device", ROOM)
        with writing(folder):
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter  # 0.5 s, after the first epoch

                self._writer = SummaryWriter(str(folder))
            for step, values in self._for_tensorboard:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        self._for_tensorboard = []

    def close(self, error: BaseException | None) -> None:
        """Write what is left. After an error, the error is what counts, not a full disk."""
        with suppress(*(UserError,) * (error is not None)):
            self.write_lines()
            if not isinstance(error, UserError):  # on a full disk TensorBoard's thread would fail
                self.write_events()
            if self._writer is not None:
                with writing(self.out / "tensorboard"):
                    self._writer.close()


def _points(file: Path) -> list[Point]:
    """The records of metrics.jsonl; the last line may have been cut when the run was killed."""
    points: list[Point] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            points.append((record.pop("step"), record))
    return points


def _line(step: int, values: Mapping[str, float]) -> str:
    return json.dumps({"step": step, **values}) + "\n"
