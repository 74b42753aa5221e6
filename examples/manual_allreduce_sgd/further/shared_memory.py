"""Sum without messages: the ranks of one machine use memory that all of them can access.

    python -m examples.manual_allreduce_sgd.further.shared_memory --nproc 2

Each rank writes its numbers to a row in shared memory. Rank r then adds up chunk r of all rows and
writes the sum to an extra row: a reduce-scatter. Every rank can read all sums there, so no
all-gather is needed. Jia et al. (2018, https://arxiv.org/abs/1807.11205) sum in this way within a
node, and with a ring between nodes. Gradients can be views of a rank's row, to avoid a copy.
"""

import mmap

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch import Tensor

from ..allreduce import milliseconds
from ..run import launch
from ..train import ring_all_reduce

TIMEOUT = 60.0  # seconds: maximum wait for another rank


class SharedMemory:
    """Shared memory for one float tensor [n] per rank, with at least 2 ranks, and for their sum.

    Create the object before the ranks are forked. The memory is anonymous, so it is freed when the
    last process exits, and a container's small /dev/shm does not limit it.
    """

    def __init__(self, world_size: int, n: int) -> None:
        memory = mmap.mmap(-1, (world_size + 1) * n * 4)  # forked processes share it
        self.rows = torch.frombuffer(memory, dtype=torch.float32).view(world_size + 1, n)
        self.barrier = mp.get_context("fork").Barrier(world_size)

    @property
    def own(self) -> Tensor:
        """The tensor [n] that this rank contributes to the sum."""
        return self.rows[dist.get_rank()]

    def sum(self) -> Tensor:
        """Return the sum [n] of all ranks' `own` tensors. Every rank calls this.

        The result is shared memory: do not write to it. The next call overwrites it.

        Raises:
            BrokenBarrierError: a rank has exited or does not respond.
        """
        self.barrier.wait(TIMEOUT)  # all rows are written, and the last sum has been read
        *rows, total = self.rows.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]
        torch.add(rows[0], rows[1], out=total)
        for row in rows[2:]:
            total += row
        self.barrier.wait(TIMEOUT)  # all chunks are added
        return self.rows[-1]


def compare(memory: SharedMemory) -> None:
    """Time sums with and without messages. Every rank calls this."""
    times = {}
    for function in (dist.all_reduce, ring_all_reduce):
        times[function.__name__] = milliseconds(function, torch.zeros_like(memory.own))
    times["shared memory"] = milliseconds(memory.sum)
    if dist.get_rank() == 0:
        print(f"time to sum {memory.own.nbytes:,} bytes, in milliseconds:")
        for name, time in times.items():
            print(f"{name:16} {time:7.2f}")


def main(nproc: int = 2, megabytes: int = 16) -> None:
    """Compare the time to sum tensors in shared memory and with messages."""
    launch(compare, nproc, SharedMemory(nproc, megabytes << 18))


if __name__ == "__main__":
    tyro.cli(main)
