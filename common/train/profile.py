"""`--profile`: some steps of every rank, recorded by torch's profiler.

Each rank writes its trace into `OUT/trace`; rank 0 puts them together (`common/train/trace.py`). To
the profiler's own events are added: a range for each step and each wait for data, one for each
`send`, `recv` and Python `wait`, and, from torch's flight recorder, which collective is which.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from common.launch.collectives import gather_objects
from common.launch.errors import UserError
from common.train import trace
from common.train.files import writing
from common.train.log import Log
from common.train.parts import DATA, FACTS, STEP, WAIT, Part, file_of, read, recorded
from common.train.state import TrainState

WARM_UP = 2  # steps before those that are recorded
ROUNDS = 20  # barriers at which the clocks are read
MOST = 100_000_000  # bytes of traces that a run puts together itself: some 10 s
Item = TypeVar("Item")


class Profile:
    """Records some steps after two others; a context manager. Every rank makes one.

    Args:
        steps: how many; with 0 it does nothing, and costs nothing.
        log: of the run.
        device: of this rank.
    """

    def __init__(self, steps: int, log: Log, device: torch.device) -> None:
        self.steps, self.log = steps, log
        self.found: dict[str, Any] = {}
        """For result.json: `profile`, on rank 0."""
        self._kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profiler: profile | None = None  # while it records
        self._marks = ExitStack()
        self._step: record_function | None = None  # in which this rank is
        self._calls: dict[tuple[str, int], list[Any]] = {}
        self._facts: dict[str, Any] = {}
        self._done = 0
        if steps:  # else the profiler prints lines of its own: when it starts, where no GPU is
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._profiler is not None and kind is None and self._done > WARM_UP:
            self._report()
        elif self._profiler is not None:  # no exchange: another rank may have failed
            with suppress(UserError):
                self._write()
        if self.steps and self._done <= WARM_UP and kind is None:
            self.log.warn(f"--profile {self.steps}: no step was left after {WARM_UP} to warm up")

    def input(self, batches: Iterator[Item], state: TrainState) -> Iterator[Item]:
        """The batches; while steps are recorded, with a range for each wait and each step."""
        return self._input(batches, state) if self.steps else batches

    def _input(self, batches: Iterator[Item], state: TrainState) -> Iterator[Item]:
        while True:
            with self.waiting():
                batch = next(batches, None)
            if batch is None:
                return
            self.begin_step(state.step + 1)
            yield batch

    def waiting(self) -> record_function:
        """A range for a wait for data: a context manager."""
        return record_function(DATA)

    def begin_step(self, number: int) -> None:
        """A step of the run begins, after the wait for its data."""
        if self._profiler is not None:
            self._step = record_function(f"{STEP} {number}")
            self._step.__enter__()

    def end_step(self) -> None:
        """A step has ended. Every rank calls this."""
        if not self.steps or self.found:
            return
        self._done += 1
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
            self._calls |= recorded()
        if self._done == WARM_UP:
            self._begin()
        elif self._done == WARM_UP + self.steps:
            self._report()

    def _begin(self) -> None:
        self._profiler = profile(activities=self._kinds)
        self._profiler.start()
        self._marks.enter_context(marked())
        began = torch.tensor([time.time_ns()])
        dist.broadcast(began, 0)
        self._facts = {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "host": socket.gethostname(),
            "began": began.item(),
            "clock": meet(),
        }

    def _write(self) -> Part:
        """End the recording, and write this rank's file."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        self._facts["calls"] = list(self._calls.values())
        profiler.add_metadata_json(FACTS, json.dumps(self._facts))
        profiler.stop()
        self._marks.close()
        file = file_of(self.log.out, dist.get_rank())
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        return read(file)

    def _report(self) -> None:
        """Write this rank's file; on rank 0, put all together."""
        parts = gather_objects(self._write())
        self.found = {"profile": {}}
        if not parts:
            return
        seen = trace.complete(self.log.out, parts)
        small = sum(part.size for part in parts) <= MOST
        report = trace.report(self.log.out, parts, with_trace=seen and small)
        self.found["profile"] = report.facts
        self.log.print0(report.text)
        if not seen:
            self.log.warn(
                f"{self.log.out / 'trace'} has not the files of all ranks: bring them together, "
                f"then python -m common.trace {self.log.out}"
            )
        elif not small:
            self.log.print0(f"the traces are large: python -m common.trace {self.log.out}")


def meet(rounds: int = ROUNDS) -> list[tuple[int, int]]:
    """Read the clock before and after each of some barriers. Every rank calls this.

    Returns:
        Nanoseconds. A sum over the ranks ends on none of them before it has begun on all.
    """
    times = []
    for _ in range(rounds):
        before = time.time_ns()
        dist.all_reduce(torch.zeros(1))
        times.append((before, time.time_ns()))
    return times


@contextmanager
def marked() -> Generator[None]:
    """Give messages, and the waits of Python, ranges in the trace.

    A message is named by its ends, group, tag, and number among those since the recording began.
    """
    names: WeakKeyDictionary[dist.Work, str] = WeakKeyDictionary()
    counts: Counter[str] = Counter()
    group, wait = dist.ProcessGroup, dist.Work.wait
    before = {kind: getattr(group, kind) for kind in ("send", "recv")}

    def message(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(group: Any, tensors: Any, peer: int, tag: int) -> Any:
            ends = [dist.get_rank(), dist.get_process_group_ranks(group)[peer]]
            source, target = ends if kind == "send" else reversed(ends)
            name = f"{kind} {source}>{target} group {group.group_name} tag {tag}"
            counts[name] += 1
            name += f" number {counts[name]}"
            with record_function(name):
                work = function(group, tensors, peer, tag)
            if work is not None:
                names[work] = f"{WAIT}: {name}"
            return work

        return called

    def waited(work: dist.Work, *how: Any, **more: Any) -> Any:
        with record_function(names.get(work, WAIT)):
            return wait(work, *how, **more)

    for kind, function in before.items():
        setattr(group, kind, message(kind, function))
    setattr(dist.Work, "wait", waited)  # noqa: B010 - a built-in class
    try:
        yield
    finally:
        setattr(dist.Work, "wait", wait)  # noqa: B010 - as above
        for kind, function in before.items():
            setattr(group, kind, function)
