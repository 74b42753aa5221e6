"""Adding up without messages: the processes of a node write into one piece of memory, and each adds a part of it.

Memory of a node with L processes, for tensors of up to S bytes:

    | L counters | tensor of process 0 | ... | tensor of process L - 1 | sum |       64 L + (L + 1) S bytes

Process l adds up part l of all tensors (a reduce-scatter), and all read the whole sum where it lies (an all-gather that
moves nothing). Tensors that live there from the start (`mine`) are never copied. Across nodes, the first process of
each node sends its node's sum around a ring, as in Jia et al., 2018, section 3.2 (https://arxiv.org/abs/1807.11205).
"""

import mmap
import os
import sys
import threading
import time

import torch
from torch import Tensor

from common.distributed import World
from common.errors import UserError
from examples.manual_allreduce_sgd.allreduce import Circle, ring

LINE = 64  # bytes: counters in one cache line would make the cores fight over it
CHUNK = 1 << 18  # bytes that stay in the cache while the tensors of more than two processes are added to them
BUSY = 0.002  # seconds of asking all the time before asking every 0.1 ms


class SharedMemory:
    """A piece of memory that the processes of a node share, and the sums over all processes of the job.

    The memory has no name in any file system (`memfd_create`): it is gone with the last process that uses it, whatever
    ends them, and a container's small /dev/shm does not limit it. The others open it through /proc.

    Args:
        world: this process's world; every process makes its objects in the same order.
        capacity: bytes of the largest tensor.

    Raises:
        UserError: the system has no such memory, or not as much; or the node's processes cannot see each other.
    """

    _made = 0

    def __init__(self, world: World, capacity: int) -> None:
        self._world = world
        self._size, self._me = world.place.local_size, world.local_rank
        self._capacity = -(-capacity // LINE) * LINE
        total = LINE * self._size + (self._size + 1) * self._capacity
        SharedMemory._made += 1
        key = f"shared memory {SharedMemory._made} of node {world.node}"
        if not sys.platform.startswith("linux"):
            raise UserError("shared memory without a name needs Linux: use --algorithm ring here")
        descriptor = self._create(total, key) if self._me == 0 else -1
        process, number = map(int, world.store.get(key).split())  # waits for it, at most --timeout
        try:
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise UserError(
                f"the memory of this node's first process cannot be opened ({error.strerror}): its processes must run "
                f"as one user and see each other, in one container; use --algorithm ring otherwise"
            ) from None
        memory = mmap.mmap(file, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)  # no page faults in the first step
        os.close(file)
        self._counters = memoryview(memory)[: LINE * self._size].cast("q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)[LINE * self._size :].view(self._size + 1, -1)
        self._round = 0
        self.leaders = Circle.of(world, range(0, world.size, self._size))
        self.meet()
        if descriptor >= 0:
            os.close(descriptor)

    def _create(self, total: int, key: str) -> int:
        descriptor = os.memfd_create("gradients")
        try:
            os.posix_fallocate(descriptor, 0, total)  # now, and not by a bus error in the middle of training
        except OSError as error:
            raise UserError(f"{total:,} bytes of shared memory cannot be had ({error.strerror})") from None
        self._world.store.set(key, f"{os.getpid()} {descriptor}")
        return descriptor

    def mine(self, length: int, dtype: torch.dtype) -> Tensor:
        """This process's tensor in the shared memory, [length]: what `sum` adds up."""
        return self._at(self._me, length, dtype)

    def _at(self, row: int, length: int, dtype: torch.dtype) -> Tensor:
        return self._bytes[row, : length * dtype.itemsize].view(dtype)

    def sum(self, length: int, dtype: torch.dtype) -> Tensor:
        """Add up the tensors that all processes of the job have written to `mine`.

        Returns:
            The sum, [length], in shared memory: to be read only, until this process calls `sum` again.

        Raises:
            RuntimeError: a process died, or was silent for longer than --timeout.
        """
        self.meet()  # all tensors are written, and the last sum has been read
        tensors = [self._at(row, length, dtype) for row in range(self._size)]
        total = self._at(self._size, length, dtype)
        per_chunk = CHUNK // dtype.itemsize
        for pieces in zip(*(self._part(tensor).split(per_chunk) for tensor in (total, *tensors)), strict=True):
            here, first, *others = pieces
            if not others:
                here.copy_(first)
            for number, other in enumerate(others):
                torch.add(first if number == 0 else here, other, out=here)
        self.meet()  # all parts are added
        if len(self.leaders.ranks) > 1:
            if self._me == 0:
                ring(total, self.leaders)
            self.meet()
        return total

    def _part(self, tensor: Tensor) -> Tensor:
        return tensor.tensor_split(self._size)[self._me]

    def all_reduce(self, tensor: Tensor, _: Circle | None = None) -> None:
        """Sum a contiguous tensor [n] of any length in place: with a copy into the shared memory, and one out of it."""
        for piece in tensor.split(self._capacity // tensor.itemsize):
            self.mine(len(piece), piece.dtype).copy_(piece)
            piece.copy_(self.sum(len(piece), piece.dtype))

    def meet(self) -> None:
        """Wait until all processes of the node have got here (a barrier of about a microsecond).

        Each counts its calls in a word that only it writes, so no atomic addition is needed; a process is here
        when its count is.

        Raises:
            RuntimeError: a process was not here within --timeout.
        """
        self._round += 1
        _fence()
        self._counters[self._me * LINE // 8] = self._round
        started = time.monotonic()
        for process in range(self._size):
            while self._counters[process * LINE // 8] < self._round:
                waited = time.monotonic() - started
                if waited > self._world.timeout.total_seconds():
                    raise RuntimeError(
                        f"Timed out waiting {waited:.0f} s at the shared memory for local rank {process} of node "
                        f"{self._world.node}"
                    )
                # More processes than cores: the one that is waited for needs this core.
                os.sched_yield() if waited < BUSY else time.sleep(1e-4)
        _fence()


def _fence(lock: threading.Lock = threading.Lock()) -> None:  # noqa: B008 - one for all calls
    """Let no write from before be seen after one that follows: arm64 reorders them, x86 does not.

    Releasing a lock keeps earlier writes before it, and taking it keeps later ones after it.
    """
    for _ in range(2):
        lock.acquire()
        lock.release()
