"""The topics of the tour: each communicates, checks what every rank holds, and shows it.

Every rank calls these.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from common.launch import place, rendezvous
from common.launch.messages import message_device
from examples.manual_allreduce_sgd.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from examples.manual_allreduce_sgd.table import Tour, text


def send_recv(tour: Tour) -> None:
    """Blocking: send returns when the tensor may be changed, recv when it has arrived.

    Each rank receives a number, adds 1 and passes it on.
    """
    value = tour.numbers(100.0).to(message_device(tour.device))
    before = text(value)
    # Rank 0 sends without receiving: if every rank waited for its left, all would wait forever.
    if tour.rank > 0:
        dist.recv(value, src=tour.left)
        value += 1
    if tour.rank < tour.world_size - 1:
        dist.send(value, dst=tour.right)
    tour.show("send / recv: a chain, each rank adds 1", before, value, [100 + tour.rank])


def isend_irecv(tour: Tour) -> None:
    """Not blocking: the calls return at once; do not touch the tensors until `wait` returns."""
    value = tour.numbers(-1.0 if tour.rank else 7.0).to(message_device(tour.device))
    before = text(value)
    if tour.rank:
        works, events = [dist.irecv(value, src=0)], ["started receiving"]
    else:
        works, events = (
            [dist.isend(value, dst=peer) for peer in range(1, tour.world_size)],
            ["started sending"],
        )
    for work in works:
        assert work is not None
        work.wait()
    events.append(f"waited, holds {text(value)}")
    start = "receiving" if tour.rank else "sending"
    tour.show("isend / irecv, wait", before, events, [f"started {start}", "waited, holds [7]"])


def batched(tour: Tour) -> None:
    """Several at once: with nccl, the only safe way for two ranks to send to each other."""
    mine, theirs = tour.numbers(float(tour.rank), -1.0).to(message_device(tour.device)).split(1)
    send, receive = (
        dist.P2POp(dist.isend, mine, tour.right),
        dist.P2POp(dist.irecv, theirs, tour.left),
    )
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    title = "batch_isend_irecv: to the right, from the left"
    tour.show(title, text(mine), theirs, [tour.left])


def barrier(tour: Tour) -> None:
    """No rank continues before all have arrived."""
    store = rendezvous.joined
    assert store is not None
    store.add("arrived", 1)
    dist.barrier()
    arrived = f"{store.add('arrived', 0)} of {tour.world_size} have arrived"
    tour.show("barrier", "waits", arrived, f"{tour.world_size} of {tour.world_size} have arrived")


def objects(tour: Tour) -> None:
    """Python objects, pickled: for small ones, from trusted processes (unpickling can run code)."""
    mine: dict[str, Any] = {"rank": tour.rank}
    everybody: list[Any] = [None] * tour.world_size
    dist.all_gather_object(everybody, mine)
    expected = [{"rank": peer} for peer in range(tour.world_size)]
    tour.show("all_gather_object", text(mine), everybody, expected)
    on_rank_0 = everybody if tour.rank == 0 else None
    collected: list[Any] | None = [None] * tour.world_size if tour.rank == 0 else None
    dist.gather_object(mine, collected, dst=0)
    tour.show("gather_object to rank 0", text(mine), collected, on_rank_0)
    shared: list[Any] = [None if tour.rank else "from rank 0"]
    before = text(shared)
    dist.broadcast_object_list(shared, src=0)
    tour.show("broadcast_object_list from rank 0", before, shared, ["from rank 0"])
    part: list[Any] = [None]
    dist.scatter_object_list(part, on_rank_0, src=0)
    tour.show("scatter_object_list from rank 0", text(on_rank_0), part, [mine])


def new_group(tour: Tour) -> None:
    """A group of some ranks: ALL ranks call new_group, only its members use the group."""
    members = list(range(0, tour.world_size, 2))
    # Without a time-out it would have torch's, 30 minutes.
    group = dist.new_group(members, timeout=place.current().flags.patience)
    value = tour.numbers(tour.rank + 1.0)
    before = text(value)
    if isinstance(group, dist.ProcessGroup):  # the others get a placeholder
        dist.all_reduce(value, group=group)
    expected = sum(peer + 1 for peer in members) if tour.rank in members else tour.rank + 1
    title = f"new_group of the even ranks, all_reduce SUM in it: {members}"
    tour.show(title, before, value, [expected])


def unequal(tour: Tour) -> None:
    """Collectives need equal sizes: pad to the longest, then cut.

    all_to_all_single takes unequal ones.
    """
    mine = tour.numbers(*[float(tour.rank)] * (tour.rank + 1))
    lengths: list[int] = [0] * tour.world_size
    dist.all_gather_object(lengths, len(mine))
    padded = tour.blanks(max(lengths))[0]
    padded[: len(mine)] = mine
    collected = tour.blanks(max(lengths))
    dist.all_gather(collected, padded)
    rows = [row[:length] for row, length in zip(collected, lengths, strict=True)]
    expected = [[peer] * (peer + 1) for peer in range(tour.world_size)]
    tour.show("unequal sizes: all_gather of padded rows", text(mine), rows, expected)


def strided(tour: Tour) -> None:
    """A column of a matrix is not contiguous: sum its contiguous copy, and copy the result back."""
    matrix = tour.numbers(1, 2, 3, 4).view(2, 2) * (tour.rank + 1)
    column = matrix[:, 1]  # [2], stride 2
    before, total = text(matrix), column.contiguous()
    dist.all_reduce(total)
    column.copy_(total)
    ranks, first = sum(range(tour.world_size + 1)), tour.rank + 1
    expected = [[first, 2 * ranks], [3 * first, 4 * ranks]]
    tour.show("not contiguous: all_reduce of the second column", before, matrix, expected)


TOPICS: dict[str, Callable[[Tour], None]] = {
    "send-recv": send_recv,
    "isend-irecv": isend_irecv,
    "batched": batched,
    "broadcast": broadcast,
    "scatter": scatter,
    "gather": gather,
    "all-gather": all_gather,
    "reduce": reduce,
    "all-reduce": all_reduce,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "barrier": barrier,
    "objects": objects,
    "new-group": new_group,
    "unequal-sizes": unequal,
    "not-contiguous": strided,
}
