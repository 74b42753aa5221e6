"""Runs every benchmark that this machine can, one after the other, and makes the report of them.

    python -m benchmarks.all                                  # an hour or two on a quiet machine
    python -m benchmarks.all --peer ../examples --mnist DIR --images DIR
    python -m benchmarks.all --quick --only scaling allreduce --out DIR    # minutes: do they work?

`make bench PEER=../examples MNIST=DIR IMAGES=DIR` does the same. What needs a place that was not
given, or that is not there, is skipped, by name in the report. So is a benchmark that ends with
exit code 2, which means that it cannot run here; its own line says why. Any other failure is one,
and this program then ends with exit code 1.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness, report
from benchmarks.commands import stop_cleanly
from benchmarks.registry import BENCHMARKS, Benchmark
from common.launch.errors import UserError

OTHERS = {"all", "gpu", "host_waits", "readme", "report"}  # programs that measure nothing


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    peer: Path | None = None
    """Checkout of https://github.com/pytorch/examples."""
    mnist: Path | None = None
    """Folder with the four idx files of MNIST (.gz), in itself or in MNIST/raw."""
    clothes: Path | None = None
    """Folder with the four idx files of Fashion-MNIST, likewise."""
    images: Path | None = None
    """Folder of images: train/CLASS/*.jpg."""
    csv: Path | None = None
    """Labelled reviews, for bert_throughput."""
    vocab: Path | None = None
    """vocab.txt of a BERT."""
    only: tuple[str, ...] = ()
    """Names of the results to make, as scaling (default: all)."""
    quick: bool = False
    """The least that shows that the programs work; the figures mean nothing."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements and the report."""


class Run(NamedTuple):
    """What became of one benchmark, or of a peer: done, skipped or failed."""

    name: str
    state: str
    why: str
    command: str
    seconds: float = 0.0


def known() -> list[Benchmark]:
    """The benchmarks of this folder: those of the registry, and any other, with its defaults."""
    files = Path(__file__).parent.glob("*.py")
    programs = {file.stem for file in files if '__name__ == "__main__"' in file.read_text()}
    here = programs - OTHERS
    listed = [benchmark for benchmark in BENCHMARKS if benchmark.module in here]
    return listed + [Benchmark(name) for name in sorted(here - {one.module for one in listed})]


def given(args: Args) -> dict[str, str]:
    """The places that were named and are there, absolute; a warning for those that are not."""
    found = {}
    for name in ("peer", "mnist", "clothes", "images", "csv", "vocab"):
        place: Path | None = getattr(args, name)
        if place is not None and place.exists():
            found[name] = str(place.resolve())
        elif place is not None:
            words = f"{name.upper()} {place}: not there; what needs it is skipped"
            print(f"warning: {words}", file=sys.stderr, flush=True)
    return found


def run(benchmark: Benchmark, args: Args, places: Mapping[str, str]) -> list[Run]:
    """Run one benchmark, and say what became of it, and of its peer."""
    absent = "was not given, or is not there"
    missing = [name.upper() for name in benchmark.needs if name not in places]
    if missing:
        why = f"{', '.join(missing)} {absent}"
        return [Run(benchmark.result, "skipped", why, benchmark.command)]
    command = [*benchmark.words(places, args.quick), "--out", str(args.out.resolve())]
    print(f"\n== {benchmark.result}: python {shlex.join(command)}", flush=True)
    started = time.monotonic()
    python = [sys.executable, *command]
    with subprocess.Popen(python, cwd=harness.ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate()
        except BaseException:
            process.terminate()  # and not kill: it has processes of its own to end
            raise
    seconds = time.monotonic() - started
    print(said, file=sys.stderr, end="", flush=True)
    state = {0: "done", 2: "skipped"}.get(process.returncode, "failed")
    last = (said.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    why = "" if state == "done" else last
    runs = [Run(benchmark.result, state, why, benchmark.command, seconds)]
    if benchmark.peer and "peer" not in places:
        name = f"{benchmark.peer} (peer)"
        runs.append(Run(name, "skipped", f"PEER {absent}", benchmark.command))
    return runs


def main(args: Args) -> int:
    """Run the benchmarks, and make the report; returns the exit code."""
    stop_cleanly()
    names = {benchmark.result for benchmark in known()}
    if unknown := set(args.only) - names:
        raise UserError(f"--only {min(unknown)}: there are {', '.join(sorted(names))}")
    args.out.mkdir(parents=True, exist_ok=True)
    places, runs = given(args), list[Run]()
    record = harness.facts("torch", "torchvision") | {"quick": args.quick}
    for benchmark in known():
        if not args.only or benchmark.result in args.only:
            runs += run(benchmark, args, places)
            written = json.dumps(record | {"runs": [one._asdict() for one in runs]}, indent=1)
            (args.out / f"{report.RUN}.json").write_text(written + "\n")
    print()
    for one in runs:
        print(f"{one.name:32} {one.state:8} {one.seconds:6.0f} s  {one.why}")
    print(f"report: {report.write(args.out)}", flush=True)
    return int(any(one.state == "failed" for one in runs))


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
