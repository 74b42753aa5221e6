"""Measure the time to 99% accuracy on MNIST, and compare it with pytorch/examples.

    python -m benchmarks.mnist --peer ../pytorch-examples

Timing stops at the output line that reports this accuracy. pytorch/examples runs with its defaults.
"""

import re
import shutil
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Claim, Measurement, Result, Table, compare, lines, ratio

PEER = "pytorch/examples mnist/main.py"
RECIPE = ("--dataset", "mnist", "--epochs", 1, "--lr", 0.3)
FLOORS = {"1 process": 30.0, "2 processes": 24.0}


def ours(nproc: int, data: Path, target: float, device: str = "cpu") -> float:
    """Return the seconds that mnist_ddp_spawn needs to reach the target accuracy."""
    with tempfile.TemporaryDirectory() as out:
        words = ("python", "-m", "examples.mnist_ddp_spawn", *RECIPE, "--nproc", nproc)
        words += ("--device", device, "--data-dir", data, "--out", out)
        with closing(lines(words)) as output:
            for seconds, line in output:
                accuracy = re.search(r"^epoch.* accuracy ([\d.]+)", line)
                if accuracy and float(accuracy[1]) >= target:
                    return seconds
    raise SystemExit("error: mnist_ddp_spawn did not reach the target")


def peer(folder: Path, target: float) -> float:
    """Return the seconds that pytorch/examples needs to reach the target accuracy."""
    with closing(lines(("python", "-u", "main.py"), folder)) as output:
        for seconds, line in output:
            accuracy = re.search(r"Test set: .*Accuracy: (\d+)/(\d+)", line)
            if accuracy and int(accuracy[1]) / int(accuracy[2]) >= target:
                return seconds
    raise SystemExit("error: pytorch/examples did not reach the target")


def measure(args: Measurement) -> Result:
    """Time one process and two processes, and pytorch/examples if --peer is set."""
    target = 0.9 if args.quick else 0.99
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary, "data")
        shutil.copytree(args.data / "mnist", data)  # a copy: torchvision unpacks files in it
        programs = {
            "1 process": partial(ours, 1, data, target),
            "2 processes": partial(ours, 2, data, target),
        }
        if not args.quick:
            programs["1 process"]()  # warm-up: data unpacked, bytecode compiled, files cached
        if args.peer:
            folder = Path(temporary, "mnist")
            shutil.copytree(args.peer / "mnist", folder)
            programs[PEER] = partial(peer, folder, target)
        samples = compare(programs, 1 if args.quick else args.rounds)
    claims = [
        Claim(f"MNIST to 99%, {name}, faster than {PEER}", ratio(samples, PEER, name), floor)
        for name, floor in FLOORS.items()
        if PEER in samples
    ]
    inputs = {"data": "MNIST", "test accuracy": target, "recipe": " ".join(map(str, RECIPE))}
    return Result(inputs, {"Seconds from the command": Table("s", samples)}, claims)


if __name__ == "__main__":
    harness.main("mnist", measure)
