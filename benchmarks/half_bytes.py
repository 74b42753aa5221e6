"""Gradients summed in shared memory, in bfloat16 and in float32, against torch's all-reduce.

    python -m benchmarks.half_bytes     # 2 processes; a minute, nothing else may run

In bfloat16 the same numbers have half the bytes. The sum is `SharedMemory.sum` of
manual_allreduce_sgd: the tensors lie in the shared memory, nothing is copied. What it consists of
is measured beside it: each rank adds its half of the numbers, in pieces that stay in the cache, and
two barriers. The time is that of the slowest rank.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.allreduce import MIB, RESNET18, joined
from benchmarks.harness import RanksMeasurement, facts, medians, save, speedups
from benchmarks.ranks import Step, on_ranks, time_steps
from common.launch.args import start
from common.launch.flags import at_least
from common.launch.place import Place
from examples.manual_allreduce_sgd.shared_memory import CHUNK, SharedMemory

SIZES = [MIB, 4 * MIB, 16 * MIB, RESNET18, 64 * MIB]
TORCH = "dist.all_reduce"
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    rounds: int = 9
    starts: int = 3
    """Times that the processes are started anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, starts=self.starts)


def add(one: Tensor, two: Tensor, total: Tensor) -> None:
    """Add one rank's part, as `SharedMemory.sum` does."""
    parts = (each.split(CHUNK // each.itemsize) for each in (total, one, two))
    for result, first, second in zip(*parts, strict=True):
        torch.add(first, second, out=result)


def measure(args: Args, _: torch.device) -> dict[str, Any]:
    """Seconds of every way and size."""
    memory, found = SharedMemory(64 * MIB, args.launch.patience), {}
    for size in SIZES:
        length = size // 4
        ways: dict[str, Step] = {}
        for kind, dtype in KINDS.items():
            tensor, own = torch.zeros(length, dtype=dtype), length // dist.get_world_size()
            parts = [torch.zeros(own, dtype=dtype) for _ in range(3)]
            memory.local_tensor(length, dtype).zero_()  # so that no sum overflows
            ways[f"{TORCH}, {kind}"] = partial(dist.all_reduce, tensor)
            ways[f"shared memory, {kind}"] = partial(memory.sum, length, dtype)
            ways[f"only the addition, {kind}"] = partial(add, *parts)
        ways["only two barriers"] = lambda: (memory.barrier(), memory.barrier())
        repeats = max(1, min(20, 8 * MIB // size))
        what = f"{size / 1e6:.3f} MB"
        found[str(size)] = time_steps(what, ways, args.rounds, repeats, memory.barrier)
    return {"seconds": found, "threads": torch.get_num_threads()}


def main(place: Place, args: Args) -> None:
    """Measure, write the results, show them."""
    result = joined([on_ranks(2, place, measure, args) for _ in range(args.starts)])
    result["times_as_fast_as_torch"] = {
        size: medians(speedups(samples, f"{TORCH}, float32"))
        for size, samples in result["seconds"].items()
    }
    save("half_bytes", facts("torch") | {"ranks": 2} | result, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.half_bytes:main", ["benchmarks.harness"])
