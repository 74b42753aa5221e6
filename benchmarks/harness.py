"""Compares programs: each runs once per round, and ratios are taken within a round.

The order is drawn anew for each round. So a change of the machine's load meets all programs, and
no program always runs after the same other one, whose data it would find in the caches. Results
keep every sample, and say on what machine. A sample is a number, or a record of figures.
"""

import importlib.metadata
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from tyro.conf import OmitArgPrefixes

from benchmarks import charts
from benchmarks.registry import BENCHMARKS
from benchmarks.tables import machines
from common.launch.args import fail, parse
from common.launch.cgroup import cores
from common.launch.errors import UserError
from common.launch.flags import Launch, at_least

ROOT = Path(__file__).parents[1]
BF16 = ("avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16", "svebf16")  # the last two: arm64
DISTURBED = 0.1  # share of the cores
Sample = TypeVar("Sample")
Flags = TypeVar("Flags")
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The flags of every benchmark that compares programs."""

    rounds: int = 5
    """Samples of each program."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json) and the charts (.png)."""

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds)


@dataclass(frozen=True, kw_only=True)
class RanksMeasurement(Measurement):
    """The same for those that start ranks by themselves."""

    launch: OmitArgPrefixes[Launch] = Launch(nproc=2, device="cpu")


def compare(
    programs: Mapping[str, Callable[[], Sample]],
    rounds: int,
    warm_up: int = 0,
    show: Callable[[str, Sample], str] | None = None,
) -> dict[str, list[Sample]]:
    """Measure all programs in turn.

    The order follows from the names alone: ranks that compare the same names agree on it.

    Args:
        programs: by name, what measures the program once.
        rounds: samples of each program.
        warm_up: rounds before the first, which do not count.
        show: turns a program's name and sample into a line to print.

    Returns:
        The samples of each program, in the order of the rounds.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in programs}
    for number in range(-warm_up, rounds):
        order = random.Random(number + warm_up)  # noqa: S311 - no secret
        for name in order.sample(sorted(programs), len(programs)):
            sample = programs[name]()
            if number >= 0:
                samples[name].append(sample)
            if show:
                which = f"round {number + 1}/{rounds}" if number >= 0 else "warm-up"
                print(f"{which}: {show(name, sample)}", flush=True)
    return samples


class Quiet:
    """Takes a sample again if other programs disturbed it, for so many seconds in all.

    A sample is disturbed if they took more than a tenth of the cores, by /proc/stat. When the
    seconds are over, samples count as they come.

    Args:
        patience: seconds to spend on waiting and on samples that do not count.

    Attributes:
        others: what share of the cores other programs took in each sample that was given out.
    """

    def __init__(self, patience: float) -> None:
        self.until, self.others = time.monotonic() + patience, list[float]()

    def sample(self, measure: Callable[[], Sample]) -> Sample:
        """Measure, again and again until nobody disturbs."""
        while True:
            began, before = time.monotonic(), busy_seconds()
            found = measure()
            share = (busy_seconds() - before) / ((time.monotonic() - began) * cores())
            if share <= DISTURBED or time.monotonic() > self.until:
                self.others.append(round(share, 3))
                return found
            while busy_share(0.5) > DISTURBED and time.monotonic() < self.until:
                pass


def busy_seconds() -> float:
    """What other programs have used of all cores since the machine began; 0 where nobody says."""
    file = Path("/proc/stat")
    if not file.exists():
        return 0.0
    user, nice, system, _, _, *more = map(int, file.read_text().split("\n")[0].split()[1:9])
    return sum((user, nice, system, *more)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def busy_share(seconds: float) -> float:
    """The share of the cores that other programs take now."""
    before = busy_seconds()
    time.sleep(seconds)
    return (busy_seconds() - before) / (seconds * cores())


def ratios(samples: Mapping[str, Sequence[float]], base: str) -> dict[str, list[float]]:
    """In each round, every program's value over that of `base`."""
    return {
        name: [one / other for one, other in zip(values, samples[base], strict=True)]
        for name, values in samples.items()
    }


def speedups(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, list[float]]:
    """In each round, how many times as fast as `base` every program is."""
    return ratios({name: [1 / one for one in values] for name, values in seconds.items()}, base)


def medians(samples: Mapping[str, Sequence[float]], digits: int = 3) -> dict[str, float]:
    """The median of each program's values."""
    return {name: round(median(values), digits) for name, values in samples.items()}


def against_peer(
    samples: Mapping[str, Sequence[Record]], peer: str, speed: Callable[[Record], float | None]
) -> dict[str, dict[str, Any]]:
    """The medians of every program's figures, and its speed as a multiple of the peer's.

    Args:
        samples: records of each program, with the same figures in all of them.
        peer: the program that the others are compared with; it may be missing.
        speed: of a record; None where the program did not get to its goal.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, mine in samples.items():
        columns = {key: [one[key] for one in mine] for key in mine[0]}
        found[name] = {
            key: None if None in values else median(values)
            for key, values in columns.items()
            if all(value is None or type(value) in (int, float) for value in values)
        }
        if name != peer:
            pairs = zip(map(speed, mine), map(speed, samples.get(peer, ())), strict=False)
            each = [round(one / other, 3) if one and other else None for one, other in pairs]
            ratio = median(filter(None, each)) if each and None not in each else None
            found[name] |= {"peer_ratio_per_round": each, "peer_ratio": ratio}
    return found


def facts(*packages: str) -> dict[str, Any]:
    """Date, machine, load of other programs, versions of Python and of these packages."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    file = Path("/proc/cpuinfo")  # only Linux has it; it lists the CPU's flags, too
    info = file.read_text() if file.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", info, re.MULTILINE)
    known = flags[1].split() if flags else []
    machine = {
        "cpu": model[1].strip() if model else platform.processor(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "bf16_flags": [flag for flag in BF16 if flag in known],
        "gpus": query_gpu("name"),
        "platform": platform.platform(),
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "load_before": os.getloadavg()[0],  # on a busy machine the figures say little
        "versions": {"python": platform.python_version()} | versions,
    }


def query_gpu(field: str, *flags: str) -> list[str]:
    """What nvidia-smi answers, a line per GPU; nothing on a machine without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, *flags, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()


def earlier(name: str, out: Path) -> dict[str, Any]:
    """The result that is in the folder already: its other parts are to stay."""
    file = out / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def save(name: str, result: Record, out: Path, chart: Path | None = None) -> None:
    """Write NAME.json (a name of registry.toml) and its charts, and print its tables.

    The charts are PNGs in the same folder, unless `chart` is another file for them.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    (benchmark,) = (one for one in BENCHMARKS if one.result == name)
    found = json.loads(file.read_text())  # as the report finds it: all keys are strings
    for table in benchmark.tables_of(found):
        print(f"\n{table}")
    for stem, drawn in benchmark.pictures(found).items():
        picture = chart or out / f"{stem}.png"
        charts.save(picture, drawn, f"{benchmark.title}\n{machines(found)}")
        print(f"chart: {picture}")
    print(f"result: {file}", flush=True)


def program(cls: type[Flags], main: Callable[[Flags], object], about: str | None) -> None:
    """Run a benchmark that starts its programs by command; what `main` returns is the exit code.

    Raises:
        SystemExit: always; code 2 after a user's mistake.
    """
    try:
        sys.exit(main(parse(cls, description=about)))  # ty: ignore[invalid-argument-type]
    except UserError as error:
        fail(error)
