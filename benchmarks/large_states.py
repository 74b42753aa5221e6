"""Checkpoints of large models: how long training waits, and how much memory they take.

    python -m benchmarks.large_states            # up to 8 GB: minutes, 20 GiB of memory and disk

Of each size, a model of that many bytes is saved as every run saves (`common.train.checkpoint`), by
one rank and by four; then new processes resume from the file, which the file cache no longer holds.
In the same processes, for comparison: a copy of the model in memory, its bytes written to the same
disk, and the file read from it.

Memory is that of a rank's own pages (RssAnon, sampled), without the model and what the process had
before, as a multiple of the model's bytes. Pages of the mapped file are shared, and not counted.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import RanksMeasurement, facts, save
from benchmarks.ranks import on_ranks
from common.launch.args import start
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.launch.place import Place
from common.train.checkpoint import Checkpoints

PIECE = 64_000_000  # bytes of a parameter
ALL, FEW = (1, 4), 2.0  # four ranks up to so many gigabytes: each has the whole model


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    gigabytes: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    """Sizes of the models, in units of 1e9 bytes."""
    ranks: tuple[int, ...] = ALL
    """Numbers of processes; more than one up to 2 gigabytes only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, **{f"ranks {number}": ranks for number, ranks in enumerate(self.ranks)})
        if min(self.gigabytes, default=0) * 1e9 < PIECE:
            raise UserError(f"--gigabytes: give at least {PIECE / 1e9}")


@dataclass
class Memory:
    """The most that this process has of its own at any time, in bytes, while it is watched."""

    most: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Sample until it is over."""
        while not self.over.wait(0.005):
            self.most = max(self.most, own_memory())


def own_memory() -> int:
    """Bytes of this process's own pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
    return 1024 * int(kib)


@contextmanager
def watched() -> Generator[Memory]:
    """Watch the memory of this process."""
    memory = Memory(own_memory())
    thread = threading.Thread(target=memory.watch)
    thread.start()
    try:
        yield memory
    finally:
        memory.over.set()
        thread.join()


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def model_of(size: int) -> nn.ParameterList:
    """Parameters of that many bytes in all, rounded to pieces, with pages of their own."""
    pieces = round(size / PIECE)
    return nn.ParameterList(torch.full((PIECE // 4,), 1.0 + piece) for piece in range(pieces))


def write_plainly(file: Path, model: nn.ParameterList) -> None:
    """The bytes of a model to the disk, and nothing else."""
    with file.open("wb") as stream:
        for parameter in model:
            stream.write(memoryview(parameter.detach().numpy()))
        os.fsync(stream.fileno())


def forget(file: Path) -> None:
    """Let the file cache forget a file."""
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_plainly(file: Path) -> None:
    """Read a file from the disk, in pieces."""
    with file.open("rb", buffering=0) as stream:
        buffer = bytearray(PIECE)
        while stream.readinto(buffer):
            pass


def measure_save(known: tuple[Path, int], device: torch.device) -> dict[str, float]:
    """Save once. Every rank calls this."""
    del device
    folder, size = known
    model = model_of(size)
    copy = seconds(lambda: [parameter.detach().clone() for parameter in model])
    plain = 0.0
    if dist.get_rank() == 0:
        plain = seconds(partial(write_plainly, folder / "plain", model))
    dist.barrier()
    before = own_memory()
    with watched() as memory, Checkpoints(folder / "checkpoints", {"model": model}, {}) as saved:
        waits = seconds(lambda: saved.save({"step": 1}))
        disk = seconds(saved.wait)
    dist.barrier()
    on_disk = sum(file.stat().st_size for file in (folder / "checkpoints").iterdir())
    found = {"training_waits": waits, "until_on_disk": waits + disk, "copy": copy}
    more = {"plain_write": plain, "memory": (memory.most - before) / size}
    return found | more | {"bytes_on_disk": on_disk / size}


def measure_resume(known: tuple[Path, int], device: torch.device) -> dict[str, float]:
    """Resume once. Every rank calls this."""
    del device
    folder, size = known
    (file,) = (folder / "checkpoints").iterdir()
    model = model_of(size)
    for parameter in model:
        parameter.data.zero_()
    plain = 0.0
    if dist.get_rank() == 0:
        forget(file)
        plain = seconds(partial(read_plainly, file))
        forget(file)
    dist.barrier()
    before = own_memory()
    with watched() as memory:
        checkpoints = Checkpoints(folder / "checkpoints", {"model": model}, {})
        resume = seconds(lambda: checkpoints.load("auto"))
    assert [int(parameter[-1]) for parameter in model] == list(range(1, 1 + len(model)))
    extra = (memory.most - before) / size
    return {"resume": resume, "plain_read": plain, "resume_memory": extra}


def main(place: Place, args: Args) -> None:
    """Measure, and write the result."""
    result: dict[str, Any] = facts("torch") | {"ranks": {}}
    for ranks in args.ranks:
        sizes = result["ranks"][str(ranks)] = {}
        for gigabytes in args.gigabytes:
            if ranks > 1 and gigabytes > FEW:
                continue
            with tempfile.TemporaryDirectory() as folder:
                known = (Path(folder), round(gigabytes * 1e9 / PIECE) * PIECE)
                found = on_ranks(ranks, place, measure_save, known)
                found |= on_ranks(ranks, place, measure_resume, known)
            sizes[f"{gigabytes:g} GB"] = found
            print(f"{ranks} rank(s), {gigabytes:g} GB: {found}", flush=True)
    save("large_states", result, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.large_states:main", ["benchmarks.harness"])
