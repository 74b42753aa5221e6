"""All-reduce by hand: each algorithm leaves the sum over all processes in a tensor, in place, in every process.

For W processes and a tensor of S bytes:

| algorithm | bytes sent by a process | steps, one after the other | when |
|---|---|---|---|
| `ring` | 2 (W - 1) / W * S, the least possible | 2 (W - 1) | large tensors |
| `recursive_doubling` | log2(W) * S | log2(W), and 2 more unless W is a power of 2 | small ones: latency counts |
| `SharedMemory` in shared_memory.py | 0 on one node | 2 waits for each other | processes of one node |

A rank's number tells it whom to send to and what: nobody conducts. The sums are equal on all ranks to the last bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import World

PIECE = 1 << 21  # bytes: while one piece is added, the next is under way; a smaller one costs more than it hides
AHEAD = 4  # pieces that are sent before the first of them has to be there
EARLY = 3  # receives that wait before the sender comes to it, or gloo would ask for each message first


@dataclass
class Circle:
    """The processes that add their tensors up, and what this one has sent so far.

    Args:
        ranks: their global ranks, in the order of the ring.
        position: the place of this process in `ranks`.
    """

    ranks: Sequence[int]
    position: int
    bytes: int = 0
    messages: int = 0

    @classmethod
    def of(cls, world: World) -> "Circle":
        """All processes of the job."""
        return cls(range(world.size), world.rank)

    def post(
        self, send: tuple[Tensor, int] | None = None, receive: tuple[Tensor, int] | None = None
    ) -> list[dist.Work]:
        """Start to send and to receive a contiguous tensor each; the other end is a position in `ranks`.

        Returns:
            What to wait for before the sent tensor is changed and the received one is read.
        """
        # gloo sends what the other end is ready for: receiving first saves both ends a message that asks for it.
        pairs = [(dist.irecv, receive), (dist.isend, send)]
        calls = [(call, pair[0], self.ranks[pair[1]]) for call, pair in pairs if pair and len(pair[0])]
        if send and len(send[0]):  # an empty message is not sent: both ends know its length
            self.bytes += send[0].nbytes
            self.messages += 1
        if any(tensor.is_cuda for _, tensor, _ in calls):
            # Both handed over together: nccl runs the calls of a process in order, so that two processes which
            # both send first, each larger than the buffers between them, would wait for each other for ever.
            return dist.batch_isend_irecv([dist.P2POp(*call) for call in calls])
        # gloo has no such order, and a batch would cost 0.1 ms more per message.
        return [work for call, tensor, rank in calls if (work := call(tensor, rank))]


def wait(works: list[dist.Work]) -> None:
    """Wait until messages have come, or may be overwritten; once only: gloo would wait for another one."""
    for work in works:
        work.wait()


def ring(tensor: Tensor, circle: Circle) -> None:
    """Sum a tensor over the processes by a ring; each talks to its two neighbours only.

    The tensor is cut into W chunks. Reduce-scatter, W - 1 steps: each process sends a chunk to its right, and adds
    the one that comes from its left to its own; then process r holds the whole sum of chunk r + 1. All-gather, W - 1
    steps: the sums go round. Chunks travel in pieces of about 2 MiB, so that one is added while others are under way;
    with gloo, receives wait for them.

    Source: Patarasuk and Yuan, 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations
    (https://doi.org/10.1016/j.jpdc.2008.09.002).

    Args:
        tensor: contiguous, [n], any n; on the CPU with gloo, on a CUDA device with nccl.
        circle: who takes part.

    Raises:
        RuntimeError: a neighbour died, or was silent for longer than the timeout of the process group.
    """
    size, me = len(circle.ranks), circle.position
    chunks = tensor.tensor_split(size)  # views whose lengths differ by at most 1; the first is the longest
    pieces = max(1, ceil(chunks[0].nbytes / PIECE))
    grid = [chunk.tensor_split(pieces) for chunk in chunks]
    half = (size - 1) * pieces  # messages of the reduce-scatter; as many follow in the all-gather
    staged = pieces == 1  # small: receive everything into scratch, since a copy costs less than a late receive
    ahead = min(AHEAD, pieces)
    early = 0 if tensor.is_cuda else 2 * half if staged else max(0, min(EARLY, half - 1))
    scratch = [torch.empty_like(grid[0][0]) for _ in range(min(2 * half, ahead + early))]
    right, left = (me + 1) % size, (me - 1) % size
    sent = circle.bytes
    arriving: dict[int, list[dist.Work]] = {}
    leaving: dict[int, list[dist.Work]] = {}

    def place(message: int) -> tuple[Tensor, Tensor]:
        """The piece that a message is for, and the memory that it is received into."""
        step, piece = divmod(message, pieces)
        mine = grid[(me - step - 1) % size][piece]
        return mine, scratch[message % len(scratch)][: len(mine)] if message < half or staged else mine

    for message in range(-early, 2 * half + ahead):
        if 0 <= message - ahead < 2 * half:
            wait(arriving.pop(message - ahead))
            mine, received = place(message - ahead)
            if message - ahead < half:
                mine.add_(received)
            elif received is not mine:
                mine.copy_(received)
        coming, receive, send = message + early, None, None
        if coming < 2 * half:
            if coming >= half and not staged:
                wait(leaving.pop(coming - half))  # what was in this place has been sent
            receive = place(coming)[1], left
        if 0 <= message < 2 * half:
            # Piece p of step s + 1 is what was received and added as piece p of step s, `pieces` messages ago: since
            # `ahead` is not more, that is done.
            step, piece = divmod(message, pieces)
            send = grid[(me - step) % size][piece], right
        if tensor.is_cuda:
            arriving[coming], leaving[message] = circle.post(send, receive), []
        else:
            arriving[coming], leaving[message] = circle.post(receive=receive), circle.post(send)
    for works in leaving.values():
        wait(works)
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
    received = torch.empty_like(tensor)

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


def backend(tensor: Tensor, _: Circle) -> None:
    """The process group's own all-reduce, over all its processes: what the others are compared with."""
    dist.all_reduce(tensor)


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
