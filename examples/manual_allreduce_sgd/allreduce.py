"""All-reduce by hand: each algorithm leaves the sum over all ranks in a tensor, on every rank.

For W ranks and a tensor of S bytes:

| algorithm | bytes that a rank sends | messages, one after the other | when |
|---|---|---|---|
| `ring` | 2 (W - 1) / W * S, the minimum | 2 (W - 1) | large tensors |
| `recursive_doubling` | log2(W) * S | log2(W); 2 more if W is not a power of 2 | small tensors |
| `FastRing` in fast_ring.py | as `ring` | as `ring`, in pieces that overlap | large tensors, CPU |
| `SharedMemory` in shared_memory.py | 0 within a node | 2 barriers | ranks of one node |

Each rank derives its peers and its chunks from its rank; there is no coordinator. After each
algorithm all ranks hold the same bits. Different algorithms add in different orders: their sums of
floating-point numbers agree up to rounding.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from common.launch.messages import message_device

Algorithm = Callable[[Tensor], int]
"""Sums a contiguous tensor [n] over the ranks in place, and returns the bytes this rank sent."""


def ring(tensor: Tensor, group: dist.ProcessGroup | None = None) -> int:
    """Sum a tensor over the ranks in place; each rank talks to its two neighbours only.

    The tensor is cut into W chunks. Reduce-scatter, W - 1 steps: each rank sends a chunk to its
    right and adds the chunk that arrives from its left to its own; then rank r holds the complete
    sum of chunk r + 1. All-gather, W - 1 steps: the complete chunks travel round the ring.

    Every rank of the group calls this.

    Source: Patarasuk and Yuan, 2009, Bandwidth optimal all-reduce algorithms for clusters of
    workstations (https://doi.org/10.1016/j.jpdc.2008.09.002).

    Args:
        tensor: contiguous, [n], any n; on a CUDA device with nccl only (see `message_device`).
        group: the ranks; by default all.

    Returns:
        The bytes this rank sent.

    Raises:
        RuntimeError: a neighbour died, or was silent for longer than the timeout of the group.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)  # views of n / W elements, rounded up or down
    buffer, sent = torch.empty_like(chunks[0]), 0  # chunk 0 is one of the longest
    for step in range(world_size - 1):  # reduce-scatter: partial sums travel to the right
        outgoing, mine = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        incoming = buffer[: len(mine)]
        sent += exchange(outgoing, right, incoming, left, group)
        mine += incoming
    for step in range(world_size - 1):  # all-gather: complete sums travel to the right
        outgoing, into = chunks[(rank + 1 - step) % world_size], chunks[(rank - step) % world_size]
        sent += exchange(outgoing, right, into, left, group)
    return sent


def recursive_doubling(tensor: Tensor, group: dist.ProcessGroup | None = None) -> int:
    """Sum a tensor over the ranks in place, by exchanges with partners at distance 1, 2, 4, ...

    After each exchange, twice as many ranks hold the same partial sum. The ranks beyond the largest
    power of two first hand their tensor to a partner, and get the result from it at the end.

    Every rank of the group calls this. With nccl, another collective must have come before it:
    messages between some ranks only cannot be the first call of a group.

    Source: Thakur, Rabenseifner and Gropp, 2005, Optimization of collective communication
    operations in MPICH (https://doi.org/10.1177/1094342005051521), section 4.5.

    Args:
        tensor: contiguous, [n], any n.
        group: the ranks; by default all.

    Returns:
        The bytes this rank sent.

    Raises:
        RuntimeError: as `ring`.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    power = 1 << (world_size.bit_length() - 1)  # the largest power of two
    if rank >= power:
        dist.send(tensor, group=group, group_dst=rank - power)
        dist.recv(tensor, group=group, group_src=rank - power)
        return tensor.nbytes
    buffer, sent = torch.empty_like(tensor), 0
    if rank + power < world_size:
        dist.recv(buffer, group=group, group_src=rank + power)
        tensor += buffer
    distance = 1
    while distance < power:
        sent += exchange(tensor, rank ^ distance, buffer, rank ^ distance, group)
        tensor += buffer  # a + b here, b + a there: the same bits
        distance *= 2
    if rank + power < world_size:
        dist.send(tensor, group=group, group_dst=rank + power)
        sent += tensor.nbytes
    return sent


def exchange(
    outgoing: Tensor, to: int, incoming: Tensor, source: int, group: dist.ProcessGroup | None
) -> int:
    """Send one tensor and receive another at the same time; returns the bytes sent.

    Send and receive are posted together: if two ranks both sent first, each would wait until the
    other receives, forever. `to` and `source` are ranks within the group.
    """
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=to)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=source)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return outgoing.nbytes


def backend(tensor: Tensor, group: dist.ProcessGroup | None = None) -> int:
    """Torch's own all-reduce, which the others are compared with; nothing is sent by hand."""
    dist.all_reduce(tensor, group=group)
    return 0


@torch.no_grad()
def all_reduce(tensor: Tensor, algorithm: Algorithm = ring) -> int:
    """Sum a tensor of any shape and layout over the ranks in place. Every rank calls this.

    Messages are ranges of memory that the backend can read: a tensor that is not contiguous, or on
    a CUDA device under gloo, is copied, and copied back.

    Returns:
        The bytes this rank sent.
    """
    flat = tensor.contiguous().view(-1).to(message_device(tensor.device))
    sent = algorithm(flat)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
    return sent
