"""Runs every benchmark that this machine can, one after the other, and makes the report of them.

    python -m benchmarks.all                                                # an hour or two on a quiet machine
    python -m benchmarks.all --peer ../examples --mnist DIR --images DIR
    python -m benchmarks.all --quick --only scaling allreduce --out DIR     # minutes: only to see that they work

`make bench PEER=../examples MNIST=DIR IMAGES=DIR` does the same. What needs a place that was not given, or that is not
there, is skipped, by name in the report. So is a benchmark that ends with exit code 2, which means that it cannot run
here; its own line says why. Any other failure is one, and this program then ends with exit code 1.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.machine import describe_machine, describe_software
from common.errors import UserError
from common.flags import fail, parse

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    peer: Path | None = None
    """Checkout of https://github.com/pytorch/examples."""
    mnist: Path | None = None
    """Folder with the four idx files of MNIST (.gz), in itself or in MNIST/raw."""
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


if __name__ == "__main__":
    args = parse(Args, description=__doc__)

from benchmarks import report
from benchmarks.registry import BENCHMARKS, Benchmark

HELPERS = ("__init__", "all", "report", "registry", "charts", "machine", "latency_bandwidth")
PLACES = ("peer", "mnist", "images", "csv", "vocab")


@dataclass(frozen=True)
class Run:
    """What became of one benchmark, or of a peer."""

    name: str
    state: str
    """done, skipped or failed."""
    why: str
    command: str
    seconds: float


def known() -> list[Benchmark]:
    """The benchmarks of this folder: those of the registry, and any other program, with its defaults."""
    here = [path.stem for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem not in HELPERS]
    listed = {benchmark.module for benchmark in BENCHMARKS}
    return [benchmark for benchmark in BENCHMARKS if benchmark.module in here] + [
        Benchmark(name, name, name) for name in here if name not in listed
    ]


def given(args: Args) -> dict[str, str]:
    """The places that were named and are there, absolute; a warning for those that are not there."""
    found = {}
    for name in PLACES:
        place = getattr(args, name)
        if place is not None and place.exists():
            found[name] = str(place.resolve())
        elif place is not None:
            print(
                f"warning: {name.upper()} {place}: not there; what needs it is skipped",
                file=sys.stderr,
                flush=True,
            )
    return found


def words(benchmark: Benchmark, args: Args, places: dict[str, str]) -> list[str]:
    """The command of a benchmark."""
    flags = f"{benchmark.flags} {benchmark.quick if args.quick else ''}".split()
    if benchmark.peer and "peer" in places:
        flags += ["--peer", "{peer}"]
    out = args.out / f"{benchmark.result}.json" if benchmark.out_is_file else args.out
    return [
        "-m",
        f"benchmarks.{benchmark.module}",
        *(flag.format_map(places) for flag in flags),
        "--out",
        str(out.resolve()),
    ]


def run(benchmark: Benchmark, args: Args, places: dict[str, str]) -> list[Run]:
    """Run one benchmark, and say what became of it, and of its peer."""
    missing = [name for name in benchmark.needs if name not in places]
    if missing:
        why = f"{', '.join(name.upper() for name in missing)} was not given, or is not there"
        return [Run(benchmark.result, "skipped", why, benchmark.command, 0.0)]
    command = words(benchmark, args, places)
    print(f"\n== {benchmark.result}: python {shlex.join(command)}", flush=True)
    started = time.monotonic()
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate()
        except BaseException:
            process.terminate()  # and not kill: it has processes of its own to end
            raise
    seconds = time.monotonic() - started
    print(said, file=sys.stderr, end="", flush=True)
    state = {0: "done", 2: "skipped"}.get(process.returncode, "failed")
    last = (said.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    runs = [Run(benchmark.result, state, "" if state == "done" else last, benchmark.command, seconds)]
    if benchmark.peer and "peer" not in places:
        runs.append(
            Run(f"{benchmark.peer} (peer)", "skipped", "PEER was not given, or is not there", benchmark.command, 0.0)
        )
    return runs


def main(args: Args) -> int:
    """Run them, and write the report; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the benchmark that runs, too
    chosen = [benchmark for benchmark in known() if not args.only or benchmark.result in args.only]
    unknown = set(args.only) - {benchmark.result for benchmark in chosen}
    if unknown:
        raise UserError(f"--only {min(unknown)}: there are {', '.join(sorted(b.result for b in known()))}")
    args.out.mkdir(parents=True, exist_ok=True)
    places = given(args)
    runs: list[Run] = []
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine(),
        "versions": describe_software("torch", "torchvision"), "load_before": os.getloadavg()[0], "quick": args.quick,
    }  # fmt: skip
    for benchmark in chosen:
        runs += run(benchmark, args, places)
        written = record | {"runs": [asdict(one) for one in runs]}
        (args.out / f"{report.RUN}.json").write_text(json.dumps(written, indent=1) + "\n")
    print()
    show(runs)
    print(f"report: {report.write(args.out)}", flush=True)
    return int(any(one.state == "failed" for one in runs))


def show(runs: Sequence[Run]) -> None:
    """A line for each benchmark and peer."""
    for one in runs:
        print(f"{one.name:32} {one.state:8} {one.seconds:6.0f} s  {one.why}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(args))
    except UserError as mistake:
        fail(mistake)
