"""How the ranks of a job meet, and end: seconds, and questions to the store, by their number.

    python -m benchmarks.meeting              # 8, 64, 256 and 512 processes on this machine
    python -m benchmarks.meeting --ranks 2 4 --rounds 1
    python -m benchmarks.meeting --part memory

The processes are real, forked from one that has imported torch, and connect to one store by TCP.
Measured is what comes after the last of them has started. They meet by `job://`, as the examples do
(`common/launch/muster.py`), until all know that all are there, and who they are; with

* the variables that a program sets for the processes that it starts: its parent hosts the store;
* those of torchrun, whose agent hosts it;
* those of torchrun after a restart: the store still holds what processes said that have ended;
* those of srun: rank 0 hosts the store itself.

Beside them a roll call in which each rank asks for the keys of all others: the way that comes to
mind first. None of this makes a process group: gloo's connections, one for each pair of ranks, come
afterwards.

Then all ranks meet the same mistake, and end (`common/launch/last_words.py`): until one has been
chosen to say it, and all know that all have come to their end. After the roll call, by another one.

The store's thread answers all questions, one after the other, so its processor time is what rank
0's host spends, and less than which no meeting takes, however fast the ranks are. From the time of
an answer, and the growth of the questions, follows what more ranks would take: calculated, for a
rank count that this machine cannot start.

The memory of the host is that of all processes together when they have met, shared pages once.
"""

import json
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import log2
from pathlib import Path
from statistics import linear_regression
from typing import Any, Literal

import torch.distributed as dist

from benchmarks.harness import RanksMeasurement, compare, earlier, facts, medians, save
from common.launch import last_words
from common.launch.args import start
from common.launch.errors import UserError
from common.launch.flags import Launch, at_least
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB, RESTARTS
from common.launch.resolve import resolve
from common.launch.spawn import hosted, launch

OURS, NAIVE = "job://", "roll call by each rank"
TORCHRUN, AGAIN, SRUN = "job://, torchrun", "job://, torchrun again", "job://, srun"
QUESTIONS = ("check", "get", "set", "add", "multi_get", "compare_set")


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    rounds: int = 3
    """Samples of each number of ranks."""
    ranks: tuple[int, ...] = (8, 64, 256, 512)
    """Numbers of processes."""
    part: Literal["all", "memory"] = "all"
    """What to measure; with memory, all else in the file stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, **{f"ranks {number}": ranks for number, ranks in enumerate(self.ranks)})
        if min(self.ranks, default=0) < 2:
            raise UserError("--ranks: give numbers of at least 2")


@dataclass(frozen=True)
class Meeting:
    """How to meet, a free port, and the folder in which every rank leaves what it saw."""

    way: str
    port: int
    folder: Path
    attempt: int = 0
    weigh: bool = False


@record
def main_worker(local_rank: int, place: Place, meeting: Meeting) -> None:
    """One rank: meet, and end, and write when that was."""
    os.environ[RESTARTS] = str(meeting.attempt)
    here = launched(local_rank, place, meeting)
    here.export(local_rank)
    asked = Counter[str]()
    began = time.monotonic()
    if meeting.way == NAIVE:
        rank, size = here.worker(local_rank).rank, here.world_size
        store = dist.TCPStore("127.0.0.1", here.port, wait_for_workers=False)
        count_questions(asked)
        call_roll(store, rank, size, "hello")
    else:
        count_questions(asked)
        store, rank, size = next(dist.rendezvous(JOB, timeout=here.flags.patience))
    met, questions, received = time.monotonic(), asked["questions"], asked["bytes"]
    if store.add("over", 1) == size:
        store.set("all over", "")
    store.wait(["all over"])
    ends, asked_before, spoke = time.monotonic(), asked["questions"], False
    weighed = own_mb() if meeting.weigh else 0.0
    if meeting.way == NAIVE:
        call_roll(store, rank, size, "at its end")
    else:
        spoke = last_words.answer(last_words.speaks_first, False)
        last_words.answer(last_words.end_together, None, 30.0)
    ended, asked_at_end = time.monotonic(), asked["questions"] - asked_before
    seen = {"began": began, "met": met, "asked": questions, "bytes": received, "spoke": spoke}
    seen |= {"ends": ends, "ended": ended, "asked at the end": asked_at_end}
    seen["mb"] = weighed
    seen["store"] = store_seconds() if meeting.way == SRUN and rank == 0 else 0.0
    (meeting.folder / f"{rank}.json").write_text(json.dumps(seen))


def launched(local_rank: int, place: Place, meeting: Meeting) -> Place:
    """The place of a process that a launcher has started: from its variables."""
    flags = Launch(timeout=place.flags.timeout)
    if meeting.way in (TORCHRUN, AGAIN):
        place.export(local_rank)  # the same variables as torchrun's
        return resolve(flags, os.environ, lambda: 0)
    size = str(place.local_world_size)
    srun = {
        "SLURM_PROCID": str(local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_TASKS_PER_NODE": size,
        "MASTER_PORT": str(meeting.port),
    }
    return resolve(flags, srun, lambda: 0) if meeting.way == SRUN else place


def own_mb() -> float:
    """Megabytes of this process, of pages that are shared its part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:"))


def count_questions(asked: Counter[str]) -> None:
    """Count questions to the store from now on, a key each, and the bytes of the answers."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def count(store: dist.Store, keys: Any, *more: Any) -> Any:
            asked["questions"] += len(keys) if isinstance(keys, list) else 1
            answer = function(store, keys, *more)
            given = answer if isinstance(answer, list) else [answer]
            asked["bytes"] += sum(len(one) for one in given if isinstance(one, bytes))
            return answer

        return count

    for kind, name in product((dist.TCPStore, dist.PrefixStore), QUESTIONS):
        setattr(kind, name, counted(getattr(kind, name)))


def call_roll(store: dist.Store, rank: int, size: int, sign: str) -> None:
    """Ask for the keys of all ranks until all are there, and read them."""
    keys = [f"{sign}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps({"name": os.urandom(8).hex(), "pid": os.getpid()}))
    pause = 0.002
    while not store.check(keys):
        time.sleep(pause)
        pause = min(0.5, 2 * pause)
    for key in keys:
        json.loads(store.get(key))


def sample(way: str, ranks: int, place: Place, weigh: bool = False) -> dict[str, float]:
    """Meet and end once, with new processes."""
    group = replace(place, local_world_size=ranks, world_size=ranks, port=0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, hosted(group) as here:
        meeting = Meeting(way, port, Path(folder), weigh=weigh)
        if way == AGAIN:
            launch(main_worker, here, meeting)
            meeting = replace(meeting, attempt=1)
        started, busy = time.monotonic(), store_seconds()
        launch(main_worker, here, meeting)
        seen = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
        answering = store_seconds() - busy + sum(one["store"] for one in seen)
    speakers = sum(one["spoke"] for one in seen)
    assert speakers == (way != NAIVE), f"{speakers} ranks speak"
    last = max(one["began"] for one in seen)
    held = {"host_mb": sum(one["mb"] for one in seen)} if weigh else {}
    return held | {
        "start": last - started,
        "meet": max(one["met"] for one in seen) - last,
        "questions": sum(one["asked"] for one in seen) / ranks,
        "bytes": sum(one["bytes"] for one in seen) / ranks,
        "store": answering,
        "end": max(one["ended"] for one in seen) - max(one["ends"] for one in seen),
        "questions_at_end": sum(one["asked at the end"] for one in seen) / ranks,
    }


def store_seconds() -> float:
    """The processor time of the youngest thread that answers questions: as old as the store."""
    stores = dict[int, Path]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            if "tcpstore" in (task / "comm").read_text():
                started = int((task / "stat").read_text().rpartition(")")[2].split()[19])
                stores[started] = task
    return int((stores[max(stores)] / "schedstat").read_text().split()[0]) / 1e9


def calculated(sizes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What the store would take with more ranks than were measured, by their number.

    Questions per rank grow with the logarithm of the ranks: by least squares over all sizes. An
    answer takes what it took of the store's time with the most ranks. The bytes that a rank reads
    are mostly the roll, which has a line for each rank.
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
        found[str(ranks)]["bytes"] = middle[most]["bytes"][OURS] * ranks / most
    return found


def main(place: Place, args: Args) -> None:
    """Compare, and write the result."""
    if args.part == "memory":
        kept = {
            str(ranks): sample(OURS, ranks, place, weigh=True)["host_mb"] for ranks in args.ranks
        }
        save("meeting", earlier("meeting", args.out) | {"host_mb": kept}, args.out)
        return
    result: dict[str, Any] = facts("torch") | {"rounds": args.rounds, "sizes": {}}
    for ranks in args.ranks:
        ways = (OURS, TORCHRUN, AGAIN, SRUN, NAIVE)
        programs = {way: partial(sample, way, ranks, place) for way in ways}
        found = compare(
            programs,
            args.rounds,
            show=lambda way, of, ranks=ranks: (
                f"{ranks} ranks, {way}: {of['meet']:.2f} s, "
                f"{of['questions']:.0f} questions per rank; end: {of['end']:.2f} s, "
                f"{of['questions_at_end']:.0f}; after {of['start']:.1f} s of starting"
            ),
        )
        figures = {
            figure: {way: [one[figure] for one in each] for way, each in found.items()}
            for figure in next(iter(found.values()))[0]
        }
        result["sizes"][str(ranks)] = figures | {
            "medians": {figure: medians(of) for figure, of in figures.items()}
        }
    result["calculated"] = calculated(result["sizes"])
    save("meeting", result, args.out)


if __name__ == "__main__":
    # Workers run this file again: what it imports must be there already.
    start(Args, "benchmarks.meeting:main", ["benchmarks.harness"])
