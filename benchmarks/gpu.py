"""Proves the examples on a machine with GPUs: a line per check, and all of it in one JSON.

    python -m benchmarks.gpu --part correctness     # one GPU is enough
    python -m benchmarks.gpu --part ranks           # 2 and 3 ranks, nccl or gloo; lost ranks
    python -m benchmarks.gpu --device cpu           # does this program work? minutes on two cores

`make prove-gpu PART=ranks OUT=DIR DEVICE=cpu` does the same. It needs no network, and no
.venv where the packages of pyproject.toml are installed.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.cuda import nccl

from benchmarks.gpu_checks import (
    TRAININGS,
    Check,
    Failed,
    Machine,
    as_on_the_cpu,
    lost,
    repeated,
    resumed,
    same_losses,
    several,
)
from benchmarks.harness import facts, program, query_gpu
from common.launch.errors import UserError

ALGORITHMS = ("per-parameter", "bucketed", "ring", "recursive-doubling", "ddp")


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    part: Literal["all", "correctness", "ranks"] = "all"
    """Checks to run."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu shows that this program works."""
    examples: tuple[str, ...] = tuple(TRAININGS)
    """Examples to check."""
    out: Path = Path("runs/prove-gpu")
    """Folder for prove-gpu.json and for what the programs write; a new one, or an empty one."""
    at_once: int = max(1, (os.cpu_count() or 1) // 2)
    """Examples that are checked at the same time."""

    def __post_init__(self) -> None:
        if unknown := set(self.examples) - set(TRAININGS):
            raise UserError(f"--examples {' '.join(unknown)}: choose of {' '.join(TRAININGS)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no CUDA device; try --device cpu")
        if self.out.exists() and any(self.out.iterdir()):
            raise UserError(f"--out {self.out}: there is something in it; name a new folder")


def correctness(machine: Machine, examples: tuple[str, ...]) -> Iterator[tuple[str, str, Check]]:
    """The checks that one device and one rank are enough for: group, name, check."""
    device = "cpu" if machine.device == "cpu" else "cuda:0"
    for name in examples:
        yield name, f"{name}: twice, the same bits", partial(repeated, machine, name)
        yield name, f"{name}: killed and resumed, the same bits", partial(resumed, machine, name)
        if machine.device == "cuda":
            yield name, f"{name}: as on the CPU", partial(as_on_the_cpu, machine, name)
    if "resnet_pipeline" in examples:
        module = "examples.resnet_pipeline"
        for words in ("toy", "micro_batches -a resnet18 --image-size 32 -b 12 --split-size 3"):
            first, *flags = words.split()
            flags += ["--devices", device, device]
            run = partial(machine.run, first, f"{module}.{first}", *flags)
            yield "resnet_pipeline", f"{first}: both halves on one device", partial(ended, run)
    if "mnist_dataparallel" in examples:
        twice = "cpu,cpu" if machine.device == "cpu" else "0,0"
        flags = ("--engine", "eight-steps", "--devices", twice)
        yield (
            "mnist_dataparallel",
            "eight steps with two replicas on one device",
            partial(two_replicas, machine, flags),
        )


def ranks(machine: Machine, examples: tuple[str, ...]) -> Iterator[tuple[str, str, Check]]:
    """The checks of several ranks, which may share devices: group, name, check."""
    for name in examples:
        if name == "imagenet_ddp" and machine.device == "cpu":
            continue  # BatchNorm over all ranks needs CUDA, so that one rank is another training
        for count in (2, 3):
            check = partial(several, machine, name, count)
            yield name, f"{name}: {count} ranks as one", check
        if machine.device == "cuda":
            check = partial(several, machine, name, 2, "--dist-backend", "gloo")
            yield name, f"{name}: 2 ranks by gloo as one", check
    if "manual_allreduce_sgd" in examples:
        for way in ALGORITHMS:
            check = partial(several, machine, "manual_allreduce_sgd", 2, "--algorithm", way)
            yield "manual_allreduce_sgd", f"--algorithm {way}: 2 ranks as one", check
        tour = partial(machine.run, "tour", "examples.manual_allreduce_sgd.tour", "--nproc", "3")
        flags = ("--device", machine.device)
        yield "tour", "the tour of all collectives, 3 ranks", partial(ended, partial(tour, *flags))
    if "resnet_pipeline" in examples:
        for schedule in ("gpipe", "interleaved"):
            check = partial(several, machine, "resnet_pipeline", 3, "--schedule", schedule)
            yield "resnet_pipeline", f"--schedule {schedule}: 3 stages as one", check
        check = partial(several, machine, "resnet_pipeline", 3, "--engine", "torch")
        yield "resnet_pipeline", "--engine torch: 3 stages as one", check
    if "mnist_ddp_spawn" in examples:
        yield "faults", "a rank is killed", partial(lost, machine, stopped=False)
        yield "faults", "a rank hangs", partial(lost, machine, stopped=True)


def ended(run: Check) -> str:
    """The last line of a program that checks itself."""
    return run().strip().splitlines()[-1]


def two_replicas(machine: Machine, flags: tuple[str, ...]) -> str:
    """`nn.DataParallel` written out, with two replicas: the losses of the default run?"""
    return same_losses(
        machine.training("mnist_dataparallel"), machine.training("mnist_dataparallel", *flags)
    )


def tried(name: str, check: Check) -> dict[str, Any]:
    """Run a check and print its line."""
    started = time.monotonic()
    try:
        state, saw = "ok", check()
    except Failed as failure:
        state, saw = "FAILED", str(failure)
    seconds = time.monotonic() - started
    print(f"{state:6} {seconds:5.0f} s  {name}: {saw}", flush=True)
    return {"check": name, "state": state, "saw": saw, "seconds": round(seconds, 1)}


def main(args: Args) -> int:
    """Run the checks; those of one example one after the other, several examples at once."""
    machine = Machine(args.device, args.out)
    parts = {"correctness": correctness, "ranks": ranks}
    found: dict[str, list[dict[str, Any]]] = {}
    for part in parts if args.part == "all" else (args.part,):
        groups: dict[str, list[tuple[str, Check]]] = {}
        for group, name, check in parts[part](machine, args.examples):
            groups.setdefault(group, []).append((name, check))
        with ThreadPoolExecutor(args.at_once) as pool:
            done = pool.map(lambda group: [tried(*check) for check in group], groups.values())
            found[part] = [row for rows in done for row in rows]
    rows = [row for part in found.values() for row in part]
    failed = [row for row in rows if row["state"] != "ok"]
    about = facts("torch", "torchvision", "transformers") | {
        "device": args.device,
        "driver": query_gpu("driver_version"),
        "devices": torch.cuda.device_count() if args.device == "cuda" else 0,
        "nccl": nccl.version() if args.device == "cuda" else None,
    }
    file = args.out / "prove-gpu.json"
    file.write_text(json.dumps(about | {"checks": found}, indent=1) + "\n")
    print(f"{len(rows) - len(failed)} of {len(rows)} checks passed; result: {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(program(Args, main, __doc__))
