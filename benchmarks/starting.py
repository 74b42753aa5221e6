"""What a short run of mnist_ddp_spawn costs besides its steps: by the ranks, and line by line.

    python -m benchmarks.starting
    python -m benchmarks.starting --ranks 1 2 --rounds 1

`python -m examples.mnist_ddp_spawn --epochs 1 --batch-size 128 --threads 1` trains twelve steps.
With more ranks the steps are shared, so what grows is the start and the end: seconds by the clock,
and seconds of the processors for all processes together. Beside it `import torch` alone.

For a world of one, where the seconds go (`where_time_goes.py`): the places with at least 1 %.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import ROOT, Measurement, compare, facts, medians, program, save
from common.launch.errors import UserError
from common.launch.flags import at_least

EXAMPLE = "examples.mnist_ddp_spawn"
FLAGS = ("--epochs", "1", "--batch-size", "128", "--threads", "1", "--device", "cpu")
SHOWN = 0.01  # of the whole
ALONE = "import torch"
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Args(Measurement):
    """The flags of this program."""

    rounds: int = 3
    """Samples of each number of ranks."""
    ranks: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, ranks=min(self.ranks, default=0))


def run(words: Sequence[str]) -> dict[str, float]:
    """Run a command: its seconds, and those of the processors for it and all its descendants.

    Raises:
        UserError: it failed.
    """
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    with contextlib.suppress(ChildProcessError):  # the server from which ranks are forked is left
        while True:
            os.waitpid(-1, 0)
    after = os.times()
    if done.returncode:
        raise UserError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-300:]}")
    used = after.children_user + after.children_system
    return {"seconds": seconds, "cpu": used - before.children_user - before.children_system}


def sample(ranks: int) -> dict[str, float]:
    """A short run with so many ranks; 0 imports torch, and nothing else."""
    with tempfile.TemporaryDirectory() as out:
        several = ("--nproc", str(ranks)) if ranks > 1 else ()
        example = ("-m", EXAMPLE, *FLAGS, *several, "--out", out)
        return run([sys.executable, *(example if ranks else ("-c", ALONE))])


def places() -> dict[str, float]:
    """Where the seconds of a world of one go."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "places.json"
        program = [str(ROOT / "benchmarks" / "where_time_goes.py"), str(written), EXAMPLE]
        run([sys.executable, *program, *FLAGS, "--out", str(Path(folder) / "out")])
        return json.loads(written.read_text())


def middle(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each place, the largest first; those below 1 % of the whole together."""
    names = {name for one in each for name in one}
    found = {name: median(one.get(name, 0.0) for one in each) for name in names}
    whole = sum(found.values())
    large = {name: round(value, 3) for name, value in found.items() if value >= SHOWN * whole}
    shown = dict(sorted(large.items(), key=lambda item: -item[1]))
    return shown | {"all others": round(whole - sum(large.values()), 3), "whole": round(whole, 3)}


def main(args: Args) -> None:
    """Measure, and write the result."""
    result: dict[str, Any] = facts("torch") | {"rounds": args.rounds, "command": ["-m", EXAMPLE]}
    result["command"] += FLAGS
    # Orphans become children of this process, so that their seconds are counted (Linux).
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    names = {ALONE: 0} | {str(ranks): ranks for ranks in args.ranks}
    found = compare(
        {name: partial(sample, ranks) for name, ranks in names.items()},
        args.rounds,
        warm_up=1,
        show=lambda name, of: f"{name}: {of['seconds']:.2f} s, {of['cpu']:.2f} s of the cores",
    )
    for figure in ("seconds", "cpu"):
        samples = {name: [one[figure] for one in each] for name, each in found.items()}
        result[figure] = {"samples": samples, "medians": medians(samples)}
    result["places"] = middle([places() for _ in range(args.rounds)])
    save("starting", result, args.out)


if __name__ == "__main__":
    program(Args, main, __doc__)
