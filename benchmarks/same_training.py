"""One rank, two ranks, and two ranks killed and resumed: one training? The README's first picture.

    python -m benchmarks.same_training

Each run is `python -m examples.mnist_ddp_spawn`. The third is killed by SIGKILL, all processes at
once, and started again with --resume auto. No time is measured: a busy machine does no harm.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from common.launch.errors import UserError

FLAGS = ("--precision", "fp32", "--device", "cpu", "--threads", "1", "--checkpoint-every", "10")


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    epochs: int = 20
    """Passes over the digits."""
    lr: float = 0.2
    """Highest learning rate."""
    kill: int = 130
    """Kill the third run when this step has been saved."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json) and the chart (.png)."""


def start(args: Args, folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Start the example in a process group of its own."""
    flags = (*FLAGS, "--epochs", str(args.epochs), "--lr", str(args.lr), "--nproc", str(ranks))
    words = ["-m", "examples.mnist_ddp_spawn", *flags, "--out", str(folder), "--resume", "auto"]
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, start_new_session=True
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a run.

    Raises:
        UserError: it failed; its own lines say why.
    """
    if process.wait():
        raise UserError(f"a training ended with exit code {process.returncode}")


def saved(folder: Path) -> int:
    """The step of the newest checkpoint."""
    names = (path.name for path in folder.glob("checkpoints/*"))
    return max((int(step[1]) for name in names if (step := re.search(r"(\d+)", name))), default=0)


def interrupt(args: Args, folder: Path) -> dict[str, list[float]]:
    """Start a run with two ranks, and kill all its processes; returns what it had recorded."""
    process = start(args, folder, 2)
    while saved(folder) < args.kill and process.poll() is None:
        time.sleep(0.005)
    if process.poll() is not None:
        raise UserError(f"--kill {args.kill}: the run had ended before; give an earlier step")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return recorded(folder)


def recorded(folder: Path) -> dict[str, list[float]]:
    """Training losses by step, and test accuracies by epoch."""
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {"loss": "loss/train", "accuracy": "test/accuracy"}
    return {key: [one[of] for one in points if of in one] for key, of in names.items()}


def result(folder: Path) -> dict[str, Any]:
    """What a run recorded, with its result."""
    told = json.loads((folder / "result.json").read_text())
    return recorded(folder) | {"parameter_hash": told["parameter_hash"]}


def difference(one: list[float], other: list[float]) -> float:
    """The largest difference of two curves."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def main(args: Args) -> None:
    """Train four times, and compare."""
    about, folder = harness.facts("torch"), Path(tempfile.mkdtemp())
    try:
        for ranks in (1, 2):
            finish(start(args, folder / str(ranks), ranks))
        killed = interrupt(args, folder / "killed")
        step = saved(folder / "killed")
        finish(start(args, folder / "killed", 2))
        runs = {
            "1 rank": result(folder / "1"),
            "2 ranks": result(folder / "2"),
            "2 ranks, killed": killed,
            "2 ranks, resumed": result(folder / "killed"),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    losses = {name: run["loss"] for name, run in runs.items()}
    undisturbed, resumed = runs["2 ranks"], runs["2 ranks, resumed"]
    keys = ("loss", "accuracy", "parameter_hash")
    compared = {
        "resumed_from_step": step,
        "loss_2_ranks_minus_1": difference(losses["1 rank"], losses["2 ranks"]),
        "accuracy_2_ranks_minus_1": difference(runs["1 rank"]["accuracy"], undisturbed["accuracy"]),
        "resumed_differs_in": sum(resumed[key] != undisturbed[key] for key in keys),
        "accuracy": undisturbed["accuracy"][-1],
    }
    flags = {"flags": " ".join(FLAGS), "epochs": args.epochs, "lr": args.lr, "dataset": "digits"}
    harness.save("same_training", about | flags | compared | {"runs": runs}, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
