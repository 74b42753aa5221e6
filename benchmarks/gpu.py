"""Checks the examples on a machine with GPUs: a line per check, and all of it in one JSON.

    python -m benchmarks.gpu --part correctness     # one GPU is enough
    python -m benchmarks.gpu --part speed           # rates, and what makes the host wait
    python -m benchmarks.gpu --part nccl            # 2 and 3 ranks on the GPUs; lost ranks
    python -m benchmarks.gpu --device cpu           # does this program work? minutes on two cores

`make prove-gpu PART=nccl OUT=DIR DEVICE=cpu` does the same. It needs no network, and no .venv
where the packages of pyproject.toml are installed. On a CPU, a check of each kind is run, at toy
size and with gloo.
"""

import importlib.util
import json
import math
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
    decoded,
    repeated,
    resumed,
    same_losses,
    several,
)
from benchmarks.gpu_faults import lost
from benchmarks.gpu_speed import Places, speed
from benchmarks.harness import facts, program, query_gpu
from common.launch.errors import UserError

SHARES_A_DEVICE = (2, 30)  # version of nccl; gloo cannot send CUDA tensors from rank to rank
ALGORITHMS = ("per-parameter", "bucketed", "ring", "recursive-doubling", "ddp")


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    part: Literal["all", "correctness", "speed", "nccl"] = "all"
    """Checks to run."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu shows that this program works."""
    examples: tuple[str, ...] = tuple(TRAININGS)
    """Examples to check."""
    out: Path = Path("runs/prove-gpu")
    """Folder for prove-gpu.json and for what the programs write; a new one, or an empty one."""
    images: Path | None = None
    """Folder of images, train/CLASS/*.jpg, for the speed of real ones."""
    mnist: Path | None = None
    """Folder with the four idx files of MNIST (.gz), for the time to 99 %."""
    peer: Path | None = None
    """Checkout of https://github.com/pytorch/examples, to be measured beside ours."""
    minutes: float = 9
    """Longest time of a part on GPUs; checks that do not get their turn fail."""
    at_once: int = max(2, (os.cpu_count() or 1) // 2)
    """Examples that are checked at the same time; one in the part speed."""

    def __post_init__(self) -> None:
        if unknown := set(self.examples) - set(TRAININGS):
            raise UserError(f"--examples {' '.join(unknown)}: choose of {' '.join(TRAININGS)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no CUDA device; try --device cpu")
        if self.out.exists() and any(self.out.iterdir()):
            raise UserError(f"--out {self.out}: there is something in it; name a new folder")


def correctness(machine: Machine, examples: tuple[str, ...]) -> Iterator[tuple[str, str, Check]]:
    """The checks that one device and one rank are enough for: group, name, check."""
    device = "cpu" if machine.dry else "cuda:0"
    if "imagenet_ddp" in examples:  # first: what it looks for would end most of the others
        yield "images", "JPEGs decoded in loader workers", partial(decoded, machine)
    for name in examples:
        if not machine.dry or name == examples[0]:
            yield name, f"{name}: twice, the same bits", partial(repeated, machine, name)
        yield name, f"{name}: killed and resumed, the same bits", partial(resumed, machine, name)
        if not machine.dry:
            yield name, f"{name}: as on the CPU", partial(as_on_the_cpu, machine, name)
    if "resnet_pipeline" in examples:
        module = "examples.resnet_pipeline"
        drawn = str(machine.out / "micro_batches")
        wide = f"micro_batches -a resnet18 --image-size 32 -b 12 --split-size 3 --out {drawn}"
        for words in ("toy",) if machine.dry else ("toy", wide):
            first, *flags = words.split()
            flags += ["--devices", device, device]
            run = partial(machine.run, first, f"{module}.{first}", *flags)
            yield "resnet_pipeline", f"{first}: both halves on one device", partial(ended, run)
    if "mnist_dataparallel" in examples:
        for engine in ("eight-steps",) if machine.dry else ("eight-steps", "torch"):
            flags = ("--engine", engine, "--devices", ",".join(["cpu" if machine.dry else "0"] * 3))
            check = partial(replicas, machine, flags)
            yield "mnist_dataparallel", f"{engine}: three replicas on one device", check
    if not machine.dry and importlib.util.find_spec("pytest"):
        several_at_once = ("-n", "4") if importlib.util.find_spec("xdist") else ()
        words = ("pytest", "-q", "-m", "gpu", "-p", "no:benchmark", *several_at_once)
        words = (*words, "tests/contract", "tests/examples")
        # Programs cannot be forked from a server if a library has started threads in it.
        run = partial(machine.run, "tests", *words, DDP_TEST_COLD="1")
        yield "tests", "the tests marked gpu", partial(ended, run)


def ranks(machine: Machine, examples: tuple[str, ...]) -> Iterator[tuple[str, str, Check]]:
    """The checks of several ranks, which may share devices: group, name, check."""
    if "mnist_ddp_spawn" in examples:  # first: they wait most of their time, and others compute
        yield "faults", "a rank hangs", partial(lost, machine, stopped=True)
        yield "faults", "a rank is killed", partial(lost, machine, stopped=False)
    for name in examples:
        if name == "imagenet_ddp" and machine.dry:
            continue  # BatchNorm over all ranks needs CUDA, so that one rank is another training
        for count in (2,) if machine.dry else (2, 3):
            check = partial(several, machine, name, count)
            yield name, f"{name}: {count} ranks as one", check
        if not machine.dry:
            check = partial(several, machine, name, 2, "--dist-backend", "gloo")
            yield name, f"{name}: 2 ranks by gloo as one", check
    if "manual_allreduce_sgd" in examples:
        for way in () if machine.dry else ALGORITHMS:
            check = partial(several, machine, "manual_allreduce_sgd", 2, "--algorithm", way)
            yield "manual_allreduce_sgd", f"--algorithm {way}: 2 ranks as one", check
        tour = partial(machine.run, "tour", "examples.manual_allreduce_sgd.tour", "--nproc", "3")
        flags = ("--device", machine.device)
        yield "tour", "the tour of all collectives, 3 ranks", partial(ended, partial(tour, *flags))
    if "resnet_pipeline" in examples:
        for schedule in () if machine.dry else ("gpipe", "interleaved"):
            check = partial(several, machine, "resnet_pipeline", 3, "--schedule", schedule)
            yield "resnet_pipeline", f"--schedule {schedule}: 3 stages as one", check
        if machine.dry or torch.cuda.device_count() >= 3 or nccl.version() >= SHARES_A_DEVICE:
            check = partial(several, machine, "resnet_pipeline", 3, "--engine", "torch")
            yield "resnet_pipeline", "--engine torch: 3 stages as one", check


def ended(run: Check) -> str:
    """The last line of a program that checks itself."""
    return run().strip().splitlines()[-1]


def replicas(machine: Machine, flags: tuple[str, ...]) -> str:
    """`nn.DataParallel`, or its steps by hand, on these devices: the losses of the default run?"""
    return same_losses(
        machine.training("mnist_dataparallel", "--deterministic"),
        machine.training("mnist_dataparallel", "--deterministic", *flags),
    )


def tried(name: str, check: Check, deadline: float) -> dict[str, Any]:
    """Run a check and print its line."""
    started = time.monotonic()
    try:
        if started > deadline:
            raise Failed("not tried: the minutes of this part are over")
        state, saw = "ok", check()
    except Failed as failure:
        state, saw = "FAILED", str(failure)
    except Exception as error:  # of the check itself: the others go on
        state, saw = "FAILED", repr(error)
    seconds = time.monotonic() - started
    print(f"{state:6} {seconds:5.0f} s  {name}: {saw}", flush=True)
    return {"check": name, "state": state, "saw": saw, "seconds": round(seconds, 1)}


def one_by_one(deadline: float, checks: list[tuple[str, Check]]) -> list[dict[str, Any]]:
    """Run the checks of a group."""
    return [tried(name, check, deadline) for name, check in checks]


def main(args: Args) -> int:
    """Run the checks; those of one example one after the other, several examples at once."""
    places = Places(args.images, args.mnist, args.peer)
    parts = {"correctness": correctness, "speed": partial(speed, places), "nccl": ranks}
    found: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, int] = {}
    for part in parts if args.part == "all" else (args.part,):
        started, groups = time.monotonic(), dict[str, list[tuple[str, Check]]]()
        deadline = math.inf if args.device == "cpu" else started + 60 * args.minutes
        for group, name, check in parts[part](
            Machine(args.device, args.out, deadline), args.examples
        ):
            groups.setdefault(group, []).append((name, check))
        alone = part == "speed" and args.device == "cuda"
        with ThreadPoolExecutor(1 if alone else args.at_once) as pool:
            done = pool.map(partial(one_by_one, deadline), groups.values())
            found[part] = [row for rows in done for row in rows]
        seconds[part] = round(time.monotonic() - started)
    rows = [row for part in found.values() for row in part]
    failed = [row for row in rows if row["state"] != "ok"]
    about = facts("torch", "torchvision", "transformers") | {
        "device": args.device,
        "driver": query_gpu("driver_version"),
        "devices": torch.cuda.device_count() if args.device == "cuda" else 0,
        "nccl": nccl.version() if args.device == "cuda" else None,
    }
    file = args.out / "prove-gpu.json"
    file.write_text(json.dumps(about | {"seconds": seconds, "checks": found}, indent=1) + "\n")
    print(f"{len(rows) - len(failed)} of {len(rows)} checks passed; result: {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(program(Args, main, __doc__))
