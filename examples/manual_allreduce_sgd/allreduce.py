"""All-reduce by hand: each algorithm leaves the sum over all processes in a tensor, in place, in every process.

For W processes and a tensor of S bytes:

| algorithm | bytes sent by a process | steps, one after the other | when |
|---|---|---|---|
| `ring` | 2 (W - 1) / W * S, the least possible | 2 (W - 1) | large tensors |
| `recursive_doubling` | log2(W) * S | log2(W), and 2 more unless W is a power of 2 | small ones: latency counts |
| `SharedMemory` in shared_memory.py | 0 on one node | 2 waits for each other | processes of one node |

A rank's number tells it whom to send to and what: nobody conducts. The sums are equal on all ranks to the last bit.
"""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import World

PIECE = 3 << 20  # bytes: while one piece is added, the next are under way; a smaller one costs more than it hides
SEND_BUFFER = 1 << 20  # bytes that a connection between processes of one machine takes ahead of its receiver


def connected(world: World, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A group of the given ranks with connections of its own; all ranks of the job must make it.

    Linux lets the send buffer of a connection grow to several megabytes. A long line needs that to be full; within a
    machine it is only memory that the kernel has to look after. Bounded, messages of megabytes take about a quarter
    less time. torch has no call for it: the connections are the new sockets (with TORCH_GLOO_LAZY_INIT there are none
    yet, and nothing is bounded).

    Returns:
        None, which to torch.distributed is the group of all ranks, if there is nothing to bound: with nccl, for one
        rank, or on a rank that is not given.
    """

    def sockets() -> set[int]:
        return {int(path.name) for path in Path("/dev/fd").iterdir() if path.is_socket()}

    if world.device.type == "cuda" or len(ranks) < 2:
        return None
    before = sockets()
    group = dist.new_group(ranks, world.timeout)
    for descriptor in sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            # One that listens has no peer: an OSError. This machine's address at both ends: the peer is here.
            near = connection.getpeername()[:1] == connection.getsockname()[:1]
            if near and connection.family != socket.AF_UNIX:
                # Linux sets twice what it is asked for, and no more than twice net.core.wmem_max.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER // 2)
    return group if isinstance(group, dist.ProcessGroup) else None


@dataclass
class Circle:
    """The processes that add their tensors up, and what this one has sent so far.

    Args:
        ranks: their global ranks, in the order of the ring.
        position: the place of this process in `ranks`; -1: it has none.
        up: with gloo, what carries messages to higher positions.
        down: and those to lower ones (`of`).
        in_order: the backend runs the calls of a process one after the other, as nccl does.
    """

    ranks: Sequence[int]
    position: int
    up: dist.ProcessGroup | None = None
    down: dist.ProcessGroup | None = None
    in_order: bool = False
    bytes: int = 0
    messages: int = 0
    _memory: Tensor | None = None

    @classmethod
    def of(cls, world: World, ranks: Sequence[int] | None = None) -> "Circle":
        """All processes of the job, or those of the given ranks; all of the job must make it.

        With gloo, a thread that writes locks its connection. What arrives there meanwhile wakes the thread that reads,
        and that asks for the lock over and over: on the writer's own core until its turn there ends, 3 ms later. Two
        processes that send each other something over one connection often lose more time this way than the messages
        take. So they have two: one for messages to the higher position, and one for those to the lower.
        """
        ranks = range(world.size) if ranks is None else ranks
        position = ranks.index(world.rank) if world.rank in ranks else -1
        up, down = connected(world, ranks), connected(world, ranks)
        return cls(ranks, position, up, down, in_order=world.device.type == "cuda")

    def scratch(self, length: int, like: Tensor) -> Tensor:
        """Memory for what comes, [length], of the dtype of `like`: kept, because fresh memory costs page faults."""
        kept = self._memory
        if kept is None or len(kept) < length or (kept.dtype, kept.device) != (like.dtype, like.device):
            self._memory = kept = like.new_empty(length)
        return kept[:length]

    def post(
        self, send: tuple[Tensor, int] | None = None, receive: tuple[Tensor, int] | None = None
    ) -> list[dist.Work]:
        """Start to send and to receive a contiguous tensor each; the other end is a position in `ranks`.

        Returns:
            What to wait for before the sent tensor is changed and the received one is read.
        """
        # An empty message is not sent: both ends know its length.
        if send and not len(send[0]):
            send = None
        if receive and not len(receive[0]):
            receive = None
        if send:
            self.bytes += send[0].nbytes
            self.messages += 1
        if self.in_order:
            # Both handed over together: two processes which both send first, each larger than the buffers between
            # them, would wait for each other for ever.
            pairs = [(dist.isend, send), (dist.irecv, receive)]
            calls = [dist.P2POp(call, pair[0], self.ranks[pair[1]]) for call, pair in pairs if pair]
            return dist.batch_isend_irecv(calls) if calls else []
        # gloo has no such order, and a batch would cost 0.1 ms more per message. It sends what the other end is ready
        # for: receiving first saves both ends a message that asks for it.
        works: list[dist.Work | None] = []
        if receive:
            tensor, left = receive
            works.append(dist.irecv(tensor, self.ranks[left], self.up if left < self.position else self.down))
        if send:
            tensor, right = send
            works.append(dist.isend(tensor, self.ranks[right], self.up if right > self.position else self.down))
        return [work for work in works if work]


def wait(works: list[dist.Work]) -> None:
    """Wait until messages have come, or may be overwritten; once only: gloo would wait for another one."""
    for work in works:
        work.wait()


def ring(tensor: Tensor, circle: Circle) -> None:
    """Sum a tensor over the processes by a ring; each talks to its two neighbours only.

    The tensor is cut into W chunks. Reduce-scatter, W - 1 steps: each process sends a chunk to its right, and adds
    the one that comes from its left to its own; then process r holds the whole sum of chunk r + 1. All-gather, W - 1
    steps: the sums go round. Chunks travel in pieces of up to 3 MiB, so that one is added while others are under way:
    a piece that has come is added and sent on at once, and no step waits for the end of the one before.

    Source: Patarasuk and Yuan, 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations
    (https://doi.org/10.1016/j.jpdc.2008.09.002).

    Args:
        tensor: contiguous, [n], any n; on the CPU with gloo, on a CUDA device with nccl. As much memory again is used.
        circle: who takes part.

    Raises:
        RuntimeError: a neighbour died, or was silent for longer than the timeout of the process group.
    """
    size, me = len(circle.ranks), circle.position
    right, left = (me + 1) % size, (me - 1) % size
    chunks = tensor.tensor_split(size)  # views whose lengths differ by at most 1; the first is the longest
    pieces = max(1, ceil(chunks[0].nbytes / PIECE))
    grid = [chunk.tensor_split(pieces) for chunk in chunks]
    order = [(me - 1 - step) % size for step in range(2 * (size - 1))]  # of the chunks that come
    comes = [piece for chunk in order for piece in grid[chunk]]
    adding = (size - 1) * pieces  # the first half, reduce-scatter: these come beside the tensor, and are added to it
    lengths = [len(piece) for piece in comes[:adding]]
    into = [*circle.scratch(sum(lengths), tensor).split(lengths), *comes[adding:]]
    sent = circle.bytes

    # Receiving everything from the start saves gloo's senders every wait for a receiver.
    early = not circle.in_order
    coming = [circle.post(receive=(room, left)) if early else [] for room in into]
    leaving: list[dist.Work] = []

    def send(number: int, piece: Tensor) -> None:
        works = circle.post((piece, right), None if early else (into[number], left))
        (leaving if early else coming[number]).extend(works)

    for number, piece in enumerate(grid[me] if size > 1 else ()):
        send(number, piece)
    for number, piece in enumerate(comes):
        wait(coming[number])
        if number < adding:
            # Only the last addition makes the whole sum, and belongs into the tensor. The others stay where they came,
            # which is in the cache: the tensor's memory would be written for nothing.
            last = number >= adding - pieces
            piece = torch.add(piece, into[number], out=piece if last else into[number])
        if number + pieces < len(comes):
            send(number + pieces, piece)
    wait(leaving)
    skipped = chunks[(me + 1) % size].nbytes + chunks[(me + 2) % size].nbytes  # one in each half
    assert circle.bytes - sent == (2 * tensor.nbytes - skipped if size > 1 else 0)


def recursive_doubling(tensor: Tensor, circle: Circle) -> None:
    """Sum a tensor over the processes by exchanging it with partners at distance 1, 2, 4, ...

    After each exchange twice as many processes hold the same partial sum. The processes beyond the largest power of two
    hand theirs to a partner first, and get the result from it at the end.

    Source: Thakur, Rabenseifner and Gropp, 2005, Optimization of collective communication operations in MPICH
    (https://doi.org/10.1177/1094342005051521), section 4.5.

    Args:
        tensor: contiguous, [n], any n.
        circle: who takes part.

    Raises:
        RuntimeError: as `ring`.
    """
    size, me = len(circle.ranks), circle.position
    power = 1 << (size.bit_length() - 1)
    received = circle.scratch(len(tensor), tensor)

    def exchange(partner: int, send: bool = True, into: Tensor | None = None) -> None:
        wait(circle.post((tensor, partner) if send else None, None if into is None else (into, partner)))
        if into is received:
            tensor.add_(received)

    if me >= power:
        exchange(me - power)
        exchange(me - power, send=False, into=tensor)
        return
    if me + power < size:
        exchange(me + power, send=False, into=received)
    distance = 1
    while distance < power:
        exchange(me ^ distance, into=received)  # a + b here, b + a there: the same bits
        distance *= 2
    if me + power < size:
        exchange(me + power)


def backend(tensor: Tensor, circle: Circle) -> None:
    """The process group's own all-reduce: what the others are compared with."""
    assert len(circle.ranks) == dist.get_world_size(), "not for some of the ranks"
    dist.all_reduce(tensor, group=circle.up)


ALGORITHMS: dict[str, Callable[[Tensor, Circle], None]] = {
    "backend": backend,
    "ring": ring,
    "recursive-doubling": recursive_doubling,
}


@torch.no_grad()
def all_reduce(tensor: Tensor, circle: Circle, algorithm: Callable[[Tensor, Circle], None] = ring) -> Tensor:
    """Sum a tensor of any shape and layout over the processes, in place.

    Messages are ranges of memory: a tensor that is not contiguous is copied, and copied back.

    Returns:
        The tensor.
    """
    flat = tensor.contiguous().view(-1)
    algorithm(flat, circle)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
    return tensor
