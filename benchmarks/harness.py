"""Compare programs: each runs once per round, in an order that changes with the round.

A change of the machine's load then affects all programs. Results keep every sample, the facts of
the machine, and the claims that follow, each with its floor.
"""

import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import tyro

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


@dataclass(frozen=True)
class Measurement:
    """The flags of a benchmark."""

    rounds: int = 3
    """Samples of each program."""
    quick: bool = False
    """One round with small sizes, to see that the benchmark works; nothing is saved."""
    data: Path = Path(os.environ.get("DDP_TEST_DATA", "../shared/data"))
    """Folder with mnist, imagenet_superclass, imagenette224_subset, chnsenticorp, ..."""
    peer: Path | None = None
    """Checkout of https://github.com/pytorch/examples; without it, no peer is measured."""


@dataclass(frozen=True)
class Claim:
    """A statement with a number, and the floor below which it does not hold."""

    text: str
    value: float
    floor: float
    unit: str = "times"

    @property
    def holds(self) -> bool:
        """True if the value reaches the floor."""
        return self.value >= self.floor


def main(name: str, measure: Callable[[Measurement], dict[str, Any]]) -> None:
    """Run a benchmark from the command line, and save its result as results/NAME.json.

    Args:
        name: of the benchmark.
        measure: returns the result; its `claims` are a list of `Claim`.
    """
    args = tyro.cli(Measurement, prog=f"python -m benchmarks.{name}")
    result: dict[str, Any] = {**facts(), "rounds": args.rounds, **measure(args)}
    claims: list[Claim] = result.get("claims", [])
    for claim in claims:
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        print(f"{claim.text}: {claim.value:.3g} {claim.unit} (floor {claim.floor:g}): {verdict}")
    if not args.quick:
        result["claims"] = [{**asdict(claim), "holds": claim.holds} for claim in claims]
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


def facts() -> dict[str, Any]:
    """Return date, revision, machine and versions."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    revision = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("torch", "torchvision", "transformers")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": subprocess.run(revision, capture_output=True, text=True).stdout.strip(),
        "machine": {
            "cpu": model,
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
    """Measure all programs in turn; return the samples of each.

    Args:
        programs: by name; each measures its program once.
        rounds: samples of each program.
        unit: of a sample.
    """
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds):
        order = sorted(programs)
        random.Random(number).shuffle(order)  # noqa: S311 - no secret
        for name in order:
            samples[name].append(programs[name]())
            print(
                f"round {number + 1}/{rounds}: {name}: {samples[name][-1]:.4g} {unit}", flush=True
            )
    return samples


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each program."""
    return {name: median(values) for name, values in samples.items()}


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> float:
    """Return the median over the rounds of one program's sample divided by another's."""
    return median(a / b for a, b in zip(samples[over], samples[under], strict=True))


def lines(command: Sequence[object], cwd: Path = ROOT, **env: str) -> Generator[tuple[float, str]]:
    """Yield the output of a program, with the seconds since its start; kill it when closed."""
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
        process.wait()


def run(command: Sequence[object], cwd: Path = ROOT, **env: str) -> str:
    """Run a program to its end and return its output."""
    with closing(lines(command, cwd, **env)) as output:
        return "\n".join(line for _, line in output)
