"""Seconds that a training loses with each rank that is killed, by hand and with torchft.

    python -m benchmarks.lost_ranks                             # six minutes; nothing else may run
    python -m benchmarks.lost_ranks --torchft /opt/torchft/bin/python --kills 10
    python -m benchmarks.lost_ranks --kills 2 --epochs 40

`examples.manual_allreduce_sgd.survive --replace` trains, and at random moments one of its members
gets SIGKILL; a newcomer replaces it. When a training ends before all kills are done, the next one
begins. Two pauses belong to a kill, each from the last step before to the first step after: that in
which the others go on without the rank, and that in which the newcomer joins. At the end, each
training is repeated in one process by the history of its members, and must have the same bits.

torchft (--torchft: a Python that has it) trains the same model in as many replicas, which are
killed and started again in the same way; its lighthouse once has its defaults, and once looks for
lost replicas after one second.
"""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness, torchft_kills
from benchmarks.survive_replay import replayed
from common.data.idx import digits
from common.launch.errors import UserError
from common.launch.flags import at_least

SURVIVE = ("-m", "examples.manual_allreduce_sgd.survive", "--replace", "--threads", 1)
BATCH, LR = 120, 0.01


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    kills: int = 50
    """Members of `survive` to kill."""
    pause: float = 1.5
    """Seconds between kills, on average."""
    ranks: int = 3
    """Processes of each training."""
    epochs: int = 100
    """Epochs of 12 steps of each training of `survive`."""
    timeout: float = 5.0
    """Its longest wait for a member that is silent, in seconds."""
    torchft: Path | None = None
    """A Python that has torchft."""
    torchft_kills: int = 6
    """Replicas of torchft to kill, with each setting."""
    seed: int = 0
    """What the kills follow from."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json)."""

    def __post_init__(self) -> None:
        at_least(1, kills=self.kills, epochs=self.epochs, torchft_kills=self.torchft_kills)
        at_least(2, ranks=self.ranks)
        at_least(0, pause=self.pause)
        if self.torchft and not self.torchft.is_file():
            raise UserError(f"--torchft {self.torchft}: give the path of a Python that has torchft")


class Members:
    """The processes of a training, by what `survive` prints of them.

    Attributes:
        killed: by number, in the order of the kills.
    """

    def __init__(self, lines: Any) -> None:
        self.processes: dict[int, int] = {}
        self.current: list[int] = []  # of the last generation
        self.killed: list[int] = []
        self._thread = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._thread.start()

    def _read(self, lines: Any) -> None:
        for line in lines:
            if found := re.match(r"member (\d+) is process (\d+)", line):
                self.processes[int(found[1])] = int(found[2])
            elif found := re.match(r"after step \d+: members (.*)", line):
                self.current = [int(member) for member in found[1].split(", ")]

    def kill(self, chance: random.Random) -> None:
        """Kill one of them, if another is left that has a state."""
        living = [member for member in self.current if member not in self.killed]
        if len(living) > 1:
            member = chance.choice(living)
            with suppress(ProcessLookupError):
                os.kill(self.processes[member], signal.SIGKILL)
                self.killed.append(member)


def training(args: Args, chance: random.Random, most: int, out: Path) -> dict[str, Any]:
    """Train once with kills; returns what result.json says, and who was killed."""
    flags = ("--nproc", args.ranks, "--epochs", args.epochs, "--timeout", args.timeout)
    words = [sys.executable, *map(str, (*SURVIVE, *flags, "--out", out))]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(words, **streams, cwd=harness.ROOT) as process:
        try:
            members, due = Members(process.stdout), 0.0
            while process.poll() is None:
                time.sleep(0.005)
                if not due and len(members.current) == args.ranks:
                    due = time.monotonic() + chance.uniform(0, 2 * args.pause)
                if due and time.monotonic() > due and len(members.killed) < most:
                    before = len(members.killed)
                    members.kill(chance)
                    if len(members.killed) > before:
                        due = time.monotonic() + chance.uniform(0, 2 * args.pause)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"survive ended with exit code {process.returncode}")
    return json.loads((out / "result.json").read_text()) | {"killed": members.killed}


def pauses(found: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds that the others lost with each member that was killed, and with each that joined."""
    generations = found["generations"]
    lost, joined = [], []
    for member in found["killed"]:
        last = max(n for n, each in enumerate(generations) if member in each["members"])
        after = [each["seconds"] for each in generations[last + 1 :] if "seconds" in each]
        lost += after[:1]  # none if it was killed after the last step
    for before, each in itertools.pairwise(generations):
        if set(before["members"]) < set(each["members"]) and "seconds" in each:
            joined.append(each["seconds"])
    return lost, joined


def figures(lost: list[float], joined: list[float]) -> dict[str, Any]:
    """The samples, with their medians and the longest of each."""
    found: dict[str, Any] = {"kills": len(lost)}
    for name, seconds in (("without the lost rank", lost), ("newcomer joins", joined)):
        if seconds:
            found[name] = [round(one, 4) for one in seconds]
            found[f"{name}, median"] = round(median(seconds), 3)
            found[f"{name}, longest"] = round(max(seconds), 3)
    return found


def by_hand(args: Args, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Kill members of `survive`, in as many trainings as it takes."""
    chance, trainings = random.Random(args.seed), list[dict[str, Any]]()  # noqa: S311 - no secret
    lost, joined = list[float](), list[float]()
    while len(lost) < args.kills:
        most, out = args.kills - len(lost), folder / f"survive-{len(trainings)}"
        trainings.append(training(args, chance, most, out))
        for all_of_them, these in zip((lost, joined), pauses(trainings[-1]), strict=True):
            all_of_them += these
        print(f"survive: {len(lost)} kills, longest {max(lost, default=0):.2f} s", flush=True)
    return figures(lost, joined), trainings


def tried(measure: Callable[[], tuple[list[float], list[float], list[str]]]) -> dict[str, Any]:
    """What was measured of torchft, or the error with which it failed."""
    try:
        lost, joined, errors = measure()
    except (OSError, RuntimeError) as error:
        return {"failed": str(error)}
    return figures(lost, joined) | {"errors": errors}


def main(args: Args) -> None:
    """Kill, compare, and write what was measured."""
    about = harness.facts("torch")
    flags = {"ranks": args.ranks, "seed": args.seed, "pause": args.pause, "timeout": args.timeout}
    folder = Path(tempfile.mkdtemp())
    try:
        ours, trainings = by_hand(args, folder)
        ways = {"survive": ours}
        if args.torchft:
            about["versions"]["torchft"] = torchft_kills.version(args.torchft)
            for name, settings in torchft_kills.SETTINGS.items():
                job = torchft_kills.Job(args.torchft, args.ranks, BATCH, settings, folder)
                ways[name] = tried(lambda job=job: job.killed(args.torchft_kills, args.pause))
                print(f"{name}: {ways[name]}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("trainings again, in one process each", flush=True)
    other = [replayed(digits(), one, BATCH, LR) != one["parameter_hash"] for one in trainings]
    found = {"trainings": len(trainings), "steps_each": trainings[0]["steps"]}
    found |= {"other_parameters": sum(other), "ways": ways}
    found["skipped"] = [] if args.torchft else ["torchft: --torchft was not given"]
    harness.save("lost_ranks", about | flags | found, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
