"""Seconds that a training loses with each rank that is killed, by hand and with torchft.

    python -m benchmarks.lost_ranks                             # six minutes; nothing else may run
    python -m benchmarks.lost_ranks --torchft /opt/torchft/bin/python --kills 10
    python -m benchmarks.lost_ranks --kills 2 --epochs 40
    python -m benchmarks.lost_ranks --imagenet                  # two minutes

`examples.manual_allreduce_sgd.survive --replace` trains, and at random moments one of its members
gets SIGKILL; a newcomer replaces it. When a training ends before all kills are done, the next one
begins. Two pauses belong to a kill, each from the last step before to the first step after: that in
which the others go on without the rank, and that in which the newcomer joins. At the end, each
training is repeated in one process by the history of its members, and must have the same bits.

With --imagenet, the same is done to `examples.imagenet_ddp --survive --replace`, which trains a
ResNet-18; its replay takes as many processes as there are ranks. Of it, the time from each kill
until the others begin the next step is kept, too: the pause has a step in it, which takes longer.

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

from benchmarks import harness, imagenet_replay, torchft_kills
from benchmarks.survive_replay import replayed
from common.data.idx import digits
from common.launch.errors import UserError
from common.launch.flags import at_least

SURVIVE = ("-m", "examples.manual_allreduce_sgd.survive", "--replace", "--threads", 1)
IMAGENET = (
    *("-m", "examples.imagenet_ddp", "--survive", "--replace", "--threads", 1, "--device", "cpu"),
    *("--image-size", 32, "-b", 24),
)
BATCH, LR = 120, 0.01
Words = tuple[object, ...]


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
    imagenet_kills: int = 12
    """Members of `imagenet_ddp --survive` to kill."""
    imagenet: bool = False
    """Measure `imagenet_ddp --survive`, and not the others."""
    imagenet_epochs: int = 6
    """Epochs of 20 steps of each of its trainings."""
    timeout: float = 5.0
    """The longest wait for a member that is silent, in seconds."""
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
        at_least(1, imagenet_kills=self.imagenet_kills, imagenet_epochs=self.imagenet_epochs)
        at_least(0, pause=self.pause)
        if self.torchft and not self.torchft.is_file():
            raise UserError(f"--torchft {self.torchft}: give the path of a Python that has torchft")


class Members:
    """The processes of a training, by what `survive` prints of them.

    Attributes:
        killed: by number, in the order of the kills.
        until: the seconds from each kill until others have said that they go on.
    """

    def __init__(self, lines: Any) -> None:
        self.processes: dict[int, int] = {}
        self.current: list[int] = []  # of the last generation
        self.killed: list[int] = []
        self.until: list[float] = []
        self._waiting: dict[int, float] = {}  # since when, by who is killed
        self._thread = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._thread.start()

    def _read(self, lines: Any) -> None:
        for line in lines:
            if found := re.match(r"member (\d+) is process (\d+)", line):
                self.processes[int(found[1])] = int(found[2])
            elif found := re.match(r"after step \d+: members (.*)", line):
                self.current = [int(member) for member in found[1].split(", ")]
                for member in self._waiting.keys() - self.current:
                    self.until.append(time.monotonic() - self._waiting.pop(member))

    def kill(self, chance: random.Random) -> None:
        """Kill one of them, if another is left that has a state."""
        living = [member for member in self.current if member not in self.killed]
        if len(living) > 1:
            member = chance.choice(living)
            with suppress(ProcessLookupError):
                self._waiting[member] = time.monotonic()
                os.kill(self.processes[member], signal.SIGKILL)
                self.killed.append(member)


def training(
    args: Args, program: Words, chance: random.Random, most: int, out: Path
) -> dict[str, Any]:
    """Train once with kills; returns what result.json says, who was killed, and `until`."""
    flags = ("--nproc", args.ranks, "--timeout", args.timeout, "--out", out)
    words = [sys.executable, *map(str, (*program, *flags))]
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
        raise RuntimeError(f"{program} ended with exit code {process.returncode}")
    found = json.loads((out / "result.json").read_text())
    return found | {"killed": members.killed, "until": members.until}


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


def killed(
    args: Args, program: Words, kills: int, folder: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Kill members of a program, in as many trainings as it takes."""
    chance, trainings = random.Random(args.seed), list[dict[str, Any]]()  # noqa: S311 - no secret
    lost, joined, name = list[float](), list[float](), str(program[1])
    while len(lost) < kills:
        most, out = kills - len(lost), folder / f"{name}-{len(trainings)}"
        trainings.append(training(args, program, chance, most, out))
        for all_of_them, these in zip((lost, joined), pauses(trainings[-1]), strict=True):
            all_of_them += these
        print(f"{name}: {len(lost)} kills, longest {max(lost, default=0):.2f} s", flush=True)
    return figures(lost, joined), trainings


def imagenet(args: Args, folder: Path) -> dict[str, Any]:
    """Kill members of `imagenet_ddp`, and train again without kills."""
    program = (*IMAGENET, "--epochs", args.imagenet_epochs)
    found, trainings = killed(args, program, args.imagenet_kills, folder)
    until = [seconds for one in trainings for seconds in one["until"]]
    found |= {"from the kill": [round(one, 4) for one in until]}
    found["from the kill, median"] = round(median(until), 3)
    found["from the kill, longest"] = round(max(until), 3)
    other = [imagenet_replay.replayed(one) != one["parameter_hash"] for one in trainings]
    return found | {"trainings": len(trainings), "other_parameters": sum(other)}


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
    if args.imagenet:
        try:
            found = {"model": "resnet18"} | imagenet(args, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        harness.save("lost_ranks_imagenet", about | flags | found, args.out)
        return
    try:
        by_hand = (*SURVIVE, "--epochs", args.epochs)
        ours, trainings = killed(args, by_hand, args.kills, folder)
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
