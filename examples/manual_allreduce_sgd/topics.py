"""The topics of the tour, each a function that communicates, asserts what every rank holds, and shows it."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import World, say


def text(value: object) -> str:
    """Tensors and lists of tensors as nested lists of numbers, anything else as it is."""
    if isinstance(value, Tensor):
        return str(value.tolist()).replace(".0,", ",").replace(".0]", "]")
    return f"[{', '.join(map(text, value))}]" if isinstance(value, list) else str(value)


class Tour:
    """What the topics have in common: the world, numbers to send, and a table of before and after.

    Args:
        world: this process's world.
    """

    def __init__(self, world: World) -> None:
        self.world, self.rank, self.size = world, world.rank, world.size
        self.right, self.left = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def numbers(self, *values: float) -> Tensor:
        """A float tensor on this process's device."""
        return torch.tensor(values, dtype=torch.float32, device=self.world.device)

    def blanks(self, count: int = 1) -> list[Tensor]:
        """A tensor [count] for each rank, to receive into."""
        return [torch.full((count,), -1.0, device=self.world.device) for _ in range(self.size)]

    def show(self, title: str, before: str, after: object, expected: object) -> None:
        """Check what this rank holds now, and print what all ranks held before and hold after.

        Raises:
            AssertionError: it is not what was expected.
        """
        assert text(after) == text(expected), f"{title}: rank {self.rank} holds {text(after)}, not {text(expected)}"
        rows: list[Any] = [None] * self.size
        dist.all_gather_object(rows, (before, text(after)))
        width = max(len("before"), *(len(row[0]) for row in rows))
        say(self.world, f"\n{title}\n  rank  {'before':{width}}  after")
        for rank, row in enumerate(rows):
            say(self.world, f"  {rank:>4}  {row[0]:{width}}  {row[1]}")


def send_recv(tour: Tour) -> None:
    """Blocking: send returns when the tensor may be changed, recv when it is there. Ranks receive, add 1, pass on."""
    value = tour.numbers(100.0)
    before = text(value)
    if tour.rank > 0:  # the first one must send first: if all waited for their left, all would wait for ever
        dist.recv(value, src=tour.left)
        value += 1
    if tour.rank < tour.size - 1:
        dist.send(value, dst=tour.right)
    tour.show("send / recv: a chain, each rank adds 1", before, value, [100 + tour.rank])


def isend_irecv(tour: Tour) -> None:
    """Not blocking: the calls return at once, and the tensors must be left alone until `wait` returns."""
    value, events = tour.numbers(-1.0), []
    if tour.rank == 0:
        value = tour.numbers(7.0)
        before = text(value)
        works = [dist.isend(value, dst=peer) for peer in range(1, tour.size)]
        events.append("started sending")
    else:
        before = text(value)
        works = [dist.irecv(value, src=0)]
        events.append("started receiving")
    for work in works:
        assert work is not None
        work.wait()
    events.append(f"waited, holds {text(value)}")
    start = "sending" if tour.rank == 0 else "receiving"
    tour.show("isend / irecv, wait", before, events, [f"started {start}", "waited, holds [7]"])


def batched(tour: Tour) -> None:
    """Several at once: with nccl the only safe way for neighbours to send to each other at the same time."""
    mine, theirs = tour.numbers(float(tour.rank)), tour.numbers(-1.0)
    calls = [dist.P2POp(dist.isend, mine, tour.right), dist.P2POp(dist.irecv, theirs, tour.left)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    tour.show("batch_isend_irecv: to the right, from the left", text(mine), theirs, [tour.left])


def broadcast(tour: Tour) -> None:
    """Everybody gets what rank 0 holds."""
    value = tour.numbers(tour.rank, 10 * tour.rank)
    before = text(value)
    dist.broadcast(value, src=0)
    tour.show("broadcast from rank 0", before, value, [0, 0])


def scatter(tour: Tour) -> None:
    """Rank 0 gives each rank one part; only rank 0 passes a list."""
    received = tour.numbers(-1.0)
    parts = [tour.numbers(10.0 * peer) for peer in range(tour.size)]
    given = None if tour.rank else parts
    dist.scatter(received, given, src=0)
    tour.show("scatter from rank 0", text(given), received, [10 * tour.rank])


def gather(tour: Tour) -> None:
    """Rank 0 gets everybody's part, ordered by rank; only rank 0 passes a list, as long as the WORLD (not the node)."""
    collected = None if tour.rank else tour.blanks()
    dist.gather(tour.numbers(10.0 * tour.rank), collected, dst=0)
    expected = None if tour.rank else [[10 * peer] for peer in range(tour.size)]
    tour.show("gather to rank 0", f"[{10 * tour.rank}]", collected, expected)


def all_gather(tour: Tour) -> None:
    """Everybody gets everybody's part, in a list of tensors that are there before, ordered by rank."""
    collected = tour.blanks()
    dist.all_gather(collected, tour.numbers(10.0 * tour.rank))
    tour.show("all_gather", f"[{10 * tour.rank}]", collected, [[10 * peer] for peer in range(tour.size)])


def reduce(tour: Tour) -> None:
    """Rank 0 gets the sum. What the others hold afterwards is not defined (gloo leaves partial sums there)."""
    value = tour.numbers(tour.rank + 1.0)
    before = text(value)
    dist.reduce(value, dst=0)
    after = "undefined" if tour.rank else value
    tour.show("reduce SUM to rank 0", before, after, "undefined" if tour.rank else [sum(range(tour.size + 1))])


def all_reduce(tour: Tour) -> None:
    """Everybody gets the result. (`dist.reduce_op.SUM` of old texts is `dist.ReduceOp.SUM`.)"""
    values = [peer + 1 for peer in range(tour.size)]
    results = {"SUM": sum(values), "PRODUCT": math.prod(values), "MIN": 1, "MAX": tour.size}
    for name, result in results.items():
        value = tour.numbers(tour.rank + 1.0)
        before = text(value)
        dist.all_reduce(value, getattr(dist.ReduceOp, name))
        tour.show(f"all_reduce {name}", before, value, [result])
    value = tour.numbers(tour.rank + 1.0)
    before = text(value)
    try:
        dist.all_reduce(value, dist.ReduceOp.AVG)
    except RuntimeError as error:
        say(tour.world, f"\nall_reduce AVG\n  refused by {tour.world.backend}: {str(error).splitlines()[0]}")
    else:
        tour.show("all_reduce AVG", before, value, [f"{sum(values) / tour.size:g}"])


def reduce_scatter(tour: Tour) -> None:
    """Part r of the sum goes to rank r: the first half of a ring all-reduce; all_gather is the second."""
    parts = [tour.numbers(10.0 * peer + tour.rank) for peer in range(tour.size)]
    received = tour.numbers(-1.0)
    before = text(parts)
    dist.reduce_scatter(received, parts)
    tour.show("reduce_scatter SUM", before, received, [10 * tour.rank * tour.size + sum(range(tour.size))])


def all_to_all(tour: Tour) -> None:
    """Part p of rank r goes to rank p: a matrix is transposed."""
    parts, received = [tour.numbers(10.0 * tour.rank + peer) for peer in range(tour.size)], tour.blanks()
    dist.all_to_all(received, parts)
    tour.show("all_to_all", text(parts), received, [[10 * peer + tour.rank] for peer in range(tour.size)])


def barrier(tour: Tour) -> None:
    """Released when all have arrived, and not before."""
    tour.world.store.add("arrived", 1)
    dist.barrier()
    arrived = tour.world.store.add("arrived", 0)
    tour.show("barrier", "waits", f"{arrived} of {tour.size} have arrived", f"{tour.size} of {tour.size} have arrived")


def objects(tour: Tour) -> None:
    """Python objects, pickled: for small things, from processes that are trusted (unpickling can run code)."""
    mine: dict[str, Any] = {"rank": tour.rank}
    everybody: list[Any] = [None] * tour.size
    dist.all_gather_object(everybody, mine)
    tour.show("all_gather_object", text(mine), everybody, [{"rank": peer} for peer in range(tour.size)])
    collected: list[Any] | None = None if tour.rank else [None] * tour.size
    dist.gather_object(mine, collected, dst=0)
    tour.show("gather_object to rank 0", text(mine), collected, None if tour.rank else everybody)
    shared: list[Any] = [None if tour.rank else "from rank 0"]
    before = text(shared)
    dist.broadcast_object_list(shared, src=0)
    tour.show("broadcast_object_list from rank 0", before, shared, ["from rank 0"])
    part: list[Any] = [None]
    dist.scatter_object_list(part, None if tour.rank else everybody, src=0)
    tour.show("scatter_object_list from rank 0", text(None if tour.rank else everybody), part, [mine])


def new_group(tour: Tour) -> None:
    """A group of some ranks: ALL ranks call new_group, its members use it."""
    members = list(range(0, tour.size, 2))
    group = dist.new_group(members)
    value = tour.numbers(tour.rank + 1.0)
    before = text(value)
    if tour.rank in members:
        dist.all_reduce(value, group=group)
    expected = sum(peer + 1 for peer in members) if tour.rank in members else tour.rank + 1
    tour.show(f"new_group of the even ranks, all_reduce SUM in it: {members}", before, value, [expected])


def unequal(tour: Tour) -> None:
    """Collectives want equal sizes: pad to the longest, and cut the padding off. (all_to_all_single takes unequal.)"""
    mine = tour.numbers(*[float(tour.rank)] * (tour.rank + 1))
    lengths: list[int] = [0] * tour.size
    dist.all_gather_object(lengths, len(mine))
    padded = tour.blanks(max(lengths))[0]
    padded[: len(mine)] = mine
    collected = tour.blanks(max(lengths))
    dist.all_gather(collected, padded)
    rows = [row[:length] for row, length in zip(collected, lengths, strict=True)]
    tour.show("unequal sizes: all_gather of padded rows", text(mine), rows, [[p] * (p + 1) for p in range(tour.size)])


def strided(tour: Tour) -> None:
    """A column of a matrix is not contiguous: send its contiguous copy, and copy the result back."""
    matrix = tour.numbers(1, 2, 3, 4).view(2, 2) * (tour.rank + 1)
    column = matrix[:, 1]  # [2], stride 2
    before, total = text(matrix), column.contiguous()
    dist.all_reduce(total)
    column.copy_(total)
    ranks, first = sum(range(tour.size + 1)), tour.rank + 1
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
