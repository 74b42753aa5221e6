"""Compare programs by running each once per round, in an order that changes every round.

A change in the machine's load therefore affects all programs alike. A result contains every sample,
a description of the machine, and claims with their bounds.
"""

import importlib.metadata
import json
import os
import pickle
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import tyro

from examples.manual_allreduce_sgd.run import launch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


@dataclass(frozen=True)
class Measurement:
    """The flags of a benchmark."""

    rounds: int = 3
    """Number of samples of each program."""
    quick: bool = False
    """Run one round with small sizes, to check that the benchmark works; save nothing."""
    data: Path = Path(os.environ.get("DDP_TEST_DATA", "../shared/data"))
    """Folder that contains mnist, imagenet_superclass, imagenette224_subset, chnsenticorp, ..."""
    peer: Path | None = None
    """Checkout of https://github.com/pytorch/examples; needed to measure its MNIST example."""

    @property
    def suffix(self) -> str:
        """Suffix of the result's file name."""
        return ""


@dataclass(frozen=True)
class Claim:
    """A statement about a measured value, and the bound that the value must satisfy."""

    text: str
    value: float
    bound: float
    unit: str = "times"
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """True if the value satisfies the bound."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound


@dataclass(frozen=True)
class Table:
    """Samples of the compared programs, by program name."""

    unit: str
    samples: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Result:
    """The measurements of a benchmark.

    Attributes:
        inputs: data and sizes by name.
        tables: tables by title.
        claims: statements about the tables.
        curves: losses per step by name, for a chart.
    """

    inputs: Mapping[str, Any]
    tables: Mapping[str, Table]
    claims: Sequence[Claim] = ()
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)


def main(
    name: str, measure: Callable[[Any], Result], flags: type[Measurement] | None = None
) -> None:
    """Run a benchmark from the command line, and save its result as results/NAME.json.

    Args:
        name: name of the benchmark.
        measure: function that runs the benchmark with the given flags.
        flags: dataclass with additional flags of this benchmark.
    """
    args = tyro.cli(flags or Measurement, prog=f"python -m benchmarks.{name}")
    about = facts()
    result = measure(args)
    tables: dict[str, Any] = {
        title: {"unit": table.unit, "medians": medians(table.samples), "samples": table.samples}
        for title, table in result.tables.items()
    }
    for title, table in tables.items():
        shown = ", ".join(f"{key} {value:.4g}" for key, value in table["medians"].items())
        print(f"{title}, {table['unit']}: {shown}")
    for claim in result.claims:
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        verdict = "not judged" if args.quick else verdict  # the sizes are too small
        limit = "at most" if claim.at_most else "at least"
        print(f"{claim.text}: {claim.value:.3g} {claim.unit} ({limit} {claim.bound:g}): {verdict}")
    if not args.quick:
        claims = [{**asdict(claim), "holds": claim.holds} for claim in result.claims]
        saved = {**about, "inputs": result.inputs, "tables": tables, "claims": claims}
        saved |= {"curves": result.curves} if result.curves else {}
        (RESULTS / f"{name}{args.suffix}.json").write_text(
            json.dumps(saved, indent=1, default=str) + "\n"
        )


def facts() -> dict[str, Any]:
    """Return the date, the git revision, a description of the machine, and package versions."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    revision = "unknown"  # if git is not available
    with suppress(OSError, subprocess.CalledProcessError):
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        revision = subprocess.check_output(words, text=True).strip()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("torch", "torchvision", "transformers")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision,
        "machine": {
            "cpu": model,
            "gpu": gpu,
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory, 1),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"python": platform.python_version()},
    }


def compare(
    programs: Mapping[str, Callable[[], float]], rounds: int, unit: str = "s"
) -> dict[str, list[float]]:
    """Run all programs in turn, and return the samples of each. Every rank calls this.

    Args:
        programs: functions by name; each runs a program once and returns a sample.
        rounds: number of samples of each program.
        unit: unit of the samples, for printing.
    """
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds):
        order = sorted(programs)
        random.Random(number).shuffle(order)  # noqa: S311 - not for cryptography
        for name in order:
            samples[name].append(programs[name]())
            if not dist.is_initialized() or dist.get_rank() == 0:
                shown = f"{name}: {samples[name][-1]:.4g} {unit}"
                print(f"round {number + 1}/{rounds}: {shown}", flush=True)
    return samples


def timed(step: Callable[[], object], repeats: int = 1, warm_up: int = 1) -> float:
    """Return the mean time per step on the slowest rank, in seconds. Every rank calls this."""
    for _ in range(warm_up):
        step()
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    seconds = torch.tensor((time.perf_counter() - began) / repeats, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in forked ranks with one thread each, and return rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result")
        launch(_on_rank, ranks, file, function, *args)
        return pickle.loads(file.read_bytes())  # noqa: S301 - written by rank 0


def _on_rank(file: Path, function: Callable[..., Any], *args: Any) -> None:
    result = function(*args)
    if dist.get_rank() == 0:
        file.write_bytes(pickle.dumps(result))


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each program."""
    return {name: median(values) for name, values in samples.items()}


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> float:
    """Return the median, over the rounds, of the ratio of two programs' samples."""
    return median(a / b for a, b in zip(samples[over], samples[under], strict=True))


def lines(command: Sequence[object], cwd: Path = ROOT, **env: str) -> Generator[tuple[float, str]]:
    """Yield the output lines of a program and the seconds since its start; kill it on close."""
    words = [sys.executable if word == "python" else str(word) for word in command]
    began = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=cwd, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield time.perf_counter() - began, line.rstrip()
        if process.wait():
            raise SystemExit(f"error: {' '.join(words)} exited with {process.returncode}")
    finally:
        process.kill()
        process.stdout.read()  # until its other processes have exited, too
        process.wait()


def run(command: Sequence[object], cwd: Path = ROOT, **env: str) -> str:
    """Run a program to its end and return its output."""
    with closing(lines(command, cwd, **env)) as output:
        return "\n".join(line for _, line in output)
