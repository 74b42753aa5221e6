"""How the ranks of a job meet: seconds, and questions to the store, by the number of ranks.

    python -m benchmarks.meeting              # 8, 64, 256 and 512 processes on this machine
    python -m benchmarks.meeting --ranks 2 4 --rounds 1

The processes are real, forked from one that has imported torch, and connect to one store by TCP.
Measured is what comes after the last of them has started, in two ways that take turns:

* `job://`, by which the examples meet (`common/launch/rendezvous.py`): until all know that all are
  there, and who they are;
* a roll call in which each rank asks for the keys of all others: the way that comes to mind first.

Neither makes a process group: gloo's connections, one for each pair of ranks, come afterwards.

The store's thread answers all questions, one after the other, so its processor time is what rank
0's host spends, and less than which no meeting takes, however fast the ranks are. From the time of
an answer, and the growth of the questions, follows what more ranks would take: calculated, for a
rank count that this machine cannot start.
"""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch.distributed as dist

from benchmarks.harness import RanksMeasurement, compare, facts, medians, save
from common.launch.args import start
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import hosted, launch

OURS, NAIVE = "job://", "roll call by each rank"
QUESTIONS = ("check", "get", "set", "add", "multi_get")


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    rounds: int = 3
    """Samples of each number of ranks."""
    ranks: tuple[int, ...] = (8, 64, 256, 512)
    """Numbers of processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, **{f"ranks {number}": ranks for number, ranks in enumerate(self.ranks)})
        if min(self.ranks, default=0) < 2:
            raise UserError("--ranks: give numbers of at least 2")


@dataclass(frozen=True)
class Meeting:
    """How to meet, and the folder in which every rank leaves what it saw."""

    way: str
    folder: Path


@record
def main_worker(local_rank: int, place: Place, meeting: Meeting) -> None:
    """One rank: wait until all processes are there, meet, and write the seconds."""
    place.export(local_rank)
    asked = Counter[str]()
    began = time.monotonic()
    if meeting.way == OURS:
        count_questions(asked)
        store, rank, size = next(dist.rendezvous(JOB, timeout=place.flags.patience))
    else:
        rank, size = place.worker(local_rank).rank, place.world_size
        store = dist.TCPStore("127.0.0.1", place.port, wait_for_workers=False)
        count_questions(asked)
        call_roll(store, rank, size)
    seen = {"began": began, "met": time.monotonic(), "asked": asked.total()}
    (meeting.folder / f"{rank}.json").write_text(json.dumps(seen))
    if store.add("over", 1) == size:  # rank 0 must not take the store away before
        store.set("all over", "")
    store.wait(["all over"])


def count_questions(asked: Counter[str]) -> None:
    """Count what this process asks its store from now on; of several keys each counts."""

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(store: dist.Store, keys: Any, *more: Any) -> Any:
            asked[name] += len(keys) if isinstance(keys, list) else 1
            return function(store, keys, *more)

        return count

    for name in QUESTIONS:
        setattr(dist.TCPStore, name, counted(name, getattr(dist.TCPStore, name)))


def call_roll(store: dist.Store, rank: int, size: int) -> None:
    """Ask for the keys of all ranks until all are there, and read them."""
    keys = [f"hello/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps({"name": os.urandom(8).hex(), "pid": os.getpid()}))
    pause = 0.002
    while not store.check(keys):
        time.sleep(pause)
        pause = min(0.5, 2 * pause)
    for key in keys:
        json.loads(store.get(key))


def sample(way: str, ranks: int, place: Place) -> dict[str, float]:
    """Meet once, with new processes."""
    group = replace(place, local_world_size=ranks, world_size=ranks, port=0)
    with tempfile.TemporaryDirectory() as folder, hosted(group) as here:
        started = time.monotonic()
        launch(main_worker, here, Meeting(way, Path(folder)))
        seen = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
        answering = store_seconds()
    last = max(one["began"] for one in seen)
    return {
        "start": last - started,
        "meet": max(one["met"] for one in seen) - last,
        "questions": sum(one["asked"] for one in seen) / ranks,
        "store": answering,
    }


def store_seconds() -> float:
    """The processor time of the youngest thread that answers questions: as old as the store."""
    tasks = Path("/proc/self/task").iterdir()
    stores = [int(task.name) for task in tasks if "tcpstore" in (task / "comm").read_text()]
    schedule = Path(f"/proc/self/task/{max(stores)}/schedstat").read_text()
    return int(schedule.split()[0]) / 1e9


def calculated(sizes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What the store would take with more ranks than were measured, by their number.

    Questions per rank grow with the logarithm of the ranks: by least squares over all sizes. An
    answer takes what it took of the store's time with the most ranks.
    """
    middle = {int(ranks): of["medians"] for ranks, of in sizes.items()}
    most, questions = max(middle), {ranks: of["questions"][OURS] for ranks, of in middle.items()}
    if len(middle) < 2:
        return {}
    slope, first = linear_regression([log2(ranks) for ranks in questions], [*questions.values()])
    answer = middle[most]["store"][OURS] / (most * questions[most])
    found = {}
    for ranks in (2 * most, 4 * most, 8 * most):
        asked = first + slope * log2(ranks)
        found[str(ranks)] = {"questions": asked, "store": ranks * asked * answer}
    return found


def main(place: Place, args: Args) -> None:
    """Compare, and write the result."""
    result: dict[str, Any] = facts("torch") | {"rounds": args.rounds, "sizes": {}}
    for ranks in args.ranks:
        programs = {way: partial(sample, way, ranks, place) for way in (OURS, NAIVE)}
        found = compare(
            programs,
            args.rounds,
            show=lambda way, of, ranks=ranks: (
                f"{ranks} ranks, {way}: {of['meet']:.2f} s, "
                f"{of['questions']:.0f} questions per rank, after {of['start']:.1f} s of starting"
            ),
        )
        figures = {
            figure: {way: [one[figure] for one in each] for way, each in found.items()}
            for figure in ("start", "meet", "questions", "store")
        }
        result["sizes"][str(ranks)] = figures | {
            "medians": {figure: medians(of) for figure, of in figures.items()}
        }
    result["calculated"] = calculated(result["sizes"])
    save("meeting", result, args.out)


if __name__ == "__main__":
    # Workers run this file again: what it imports must be there already.
    start(Args, "benchmarks.meeting:main", ["benchmarks.harness"])
