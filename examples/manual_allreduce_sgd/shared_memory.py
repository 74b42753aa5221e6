"""Addition without messages: the ranks of a node write into one piece of memory and add there.

The memory of a node with L ranks, for tensors of up to S bytes:

    | L counters | tensor of rank 0 | ... | tensor of rank L - 1 | sum |      64 L + (L + 1) S bytes

Rank l adds part l of all tensors (a reduce-scatter), and all read the complete sum where it lies
(an all-gather that moves nothing). Tensors that live there from the start (`local_tensor`) are
never copied. Across nodes, the first rank of each node sends its node's sum around a ring, as in
Jia et al., 2018, section 3.2 (https://arxiv.org/abs/1807.11205).
"""

import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.launch.errors import UserError
from examples.manual_allreduce_sgd.fast_ring import FastRing

LINE = 64  # bytes of a cache line: cores would contend for a line with several counters
CHUNK = 1 << 18  # bytes that stay in the cache while more than two tensors are added to them
SPIN = 0.002  # seconds of polling without a pause, before polling every 0.1 ms


class SharedMemory:
    """Memory that the ranks of a node share, and sums over all ranks of the job.

    Every rank of the job constructs it. The memory has no name in any file system
    (`memfd_create`): it is gone with the last process that uses it, however that ends, and a
    container's small /dev/shm does not limit it. The other ranks open it through /proc.

    Args:
        capacity: bytes of the largest tensor.
        timeout: the longest wait for another rank.
        nodes: the ranks of each node; by default as the launcher says (GROUP_RANK). Ranks of no
            node only take part in the construction.

    Attributes:
        bytes_sent: what this rank has sent to other nodes.

    Raises:
        UserError: the system has no such memory, or not enough; or the ranks of a node cannot see
            each other.
    """

    def __init__(
        self, capacity: int, timeout: timedelta, nodes: Sequence[Sequence[int]] | None = None
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise UserError("shared memory without a name needs Linux: use --algorithm ring here")
        rank, nodes = dist.get_rank(), nodes_of_job() if nodes is None else nodes
        self._timeout, self.bytes_sent = timeout.total_seconds(), 0
        self._node: Sequence[int] = next((node for node in nodes if rank in node), ())
        leads = rank in self._node[:1]
        self._capacity = -(-capacity // LINE) * LINE
        total = LINE * len(self._node) + (len(self._node) + 1) * self._capacity
        descriptor = allocate(total) if leads else -1
        paths: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{descriptor}")
        if self._node:
            self._map(paths[self._node[0]], total)
        self._leaders = [node[0] for node in nodes]
        self._between_nodes = FastRing(self._leaders, timeout)
        if self._node:
            self.barrier()  # all have opened it
        if leads:
            os.close(descriptor)

    def _map(self, path: str, total: int) -> None:
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise UserError(
                f"the memory of this node's first process could not be opened ({error.strerror}): "
                f"its processes must run as one user and see each other, in one container; "
                f"use --algorithm ring otherwise"
            ) from None
        # No page faults in the first step.
        memory = mmap.mmap(file, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(file)
        ranks = len(self._node)
        self._local_rank = self._node.index(dist.get_rank())
        self._counters = memoryview(memory)[: LINE * ranks].cast("q")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._rows = whole[LINE * ranks :].view(ranks + 1, self._capacity)
        self._round = 0

    def local_tensor(self, length: int, dtype: torch.dtype) -> Tensor:
        """This rank's tensor in the shared memory, [length]: what `sum` adds."""
        return self._tensor(self._local_rank, length, dtype)

    def _tensor(self, row: int, length: int, dtype: torch.dtype) -> Tensor:
        return self._rows[row, : length * dtype.itemsize].view(dtype)

    def sum(self, length: int, dtype: torch.dtype) -> Tensor:
        """Add the tensors that all ranks have written to `local_tensor`. Every rank calls this.

        Returns:
            The sum, [length], in shared memory: to be read only, until this rank calls `sum` again.

        Raises:
            RuntimeError: a process died, or was silent for longer than the timeout.
        """
        self.barrier()  # all tensors are written, and the last sum has been read
        ranks, each = len(self._node), CHUNK // dtype.itemsize
        tensors = [self._tensor(row, length, dtype) for row in range(ranks)]
        total = self._tensor(ranks, length, dtype)
        parts = [tensor.tensor_split(ranks)[self._local_rank] for tensor in (total, *tensors)]
        for result, first, *others in zip(*(part.split(each) for part in parts), strict=True):
            if not others:
                result.copy_(first)
            for number, other in enumerate(others):
                torch.add(first if number == 0 else result, other, out=result)
        self.barrier()  # all parts are added
        if len(self._leaders) > 1:
            if self._local_rank == 0:
                self.bytes_sent += self._between_nodes(total)
            self.barrier()
        return total

    def all_reduce(self, tensor: Tensor) -> int:
        """Sum a contiguous tensor [n] of any length in place, with a copy in and a copy out.

        Every rank calls this.

        Returns:
            The bytes this rank sent.
        """
        before = self.bytes_sent
        for piece in tensor.split(self._capacity // tensor.itemsize):
            self.local_tensor(len(piece), piece.dtype).copy_(piece)
            piece.copy_(self.sum(len(piece), piece.dtype))
        return self.bytes_sent - before

    def barrier(self) -> None:
        """Wait until all ranks of the node have come here: about a microsecond.

        Each rank counts its calls in a word that only it writes, so no atomic addition is needed; a
        rank has come when its count has.

        Raises:
            RuntimeError: a rank did not come within the timeout.
        """
        self._round += 1
        memory_fence()
        self._counters[self._local_rank * LINE // 8] = self._round
        started = time.monotonic()
        for local_rank, rank in enumerate(self._node):
            while self._counters[local_rank * LINE // 8] < self._round:
                waited = time.monotonic() - started
                if waited > self._timeout:
                    raise RuntimeError(
                        f"Timed out waiting {waited:.0f} s for rank {rank} at the shared memory"
                    )
                # With more ranks than cores, the rank waited for needs this core.
                os.sched_yield() if waited < SPIN else time.sleep(1e-4)
        memory_fence()


def nodes_of_job() -> list[list[int]]:
    """The ranks of each node. Every rank calls this."""
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, int(os.environ["GROUP_RANK"]))
    return [
        [rank for rank, number in enumerate(numbers) if number == node]
        for node in sorted(set(numbers))
    ]


def allocate(total: int) -> int:
    """Allocate shared memory of `total` bytes; returns its file descriptor."""
    descriptor = os.memfd_create("gradients")
    try:
        # Now, rather than by a bus error in the middle of training.
        os.posix_fallocate(descriptor, 0, total)
    except OSError as error:
        raise UserError(
            f"{total:,} bytes of shared memory could not be allocated ({error.strerror})"
        ) from None
    return descriptor


_lock = threading.Lock()


def memory_fence() -> None:
    """Keep the order of writes, as other processes see it: arm64 reorders them, x86 does not.

    Releasing a lock keeps earlier writes before it, and taking it keeps later ones after it.
    """
    for _ in range(2):
        _lock.acquire()
        _lock.release()
