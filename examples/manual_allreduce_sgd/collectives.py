"""The topics of the tour in which all ranks exchange tensors together. Every rank calls these."""

import math

import torch.distributed as dist

from common.launch.collectives import print0
from examples.manual_allreduce_sgd.table import Tour, text


def broadcast(tour: Tour) -> None:
    """All ranks get what rank 0 holds."""
    value = tour.numbers(tour.rank, 10 * tour.rank)
    before = text(value)
    dist.broadcast(value, src=0)
    tour.show("broadcast from rank 0", before, value, [0, 0])


def scatter(tour: Tour) -> None:
    """Rank 0 gives each rank one part; only rank 0 passes a list."""
    received = tour.numbers(-1.0)
    parts = [tour.numbers(10.0 * peer) for peer in range(tour.world_size)]
    given = parts if tour.rank == 0 else None
    dist.scatter(received, given, src=0)
    tour.show("scatter from rank 0", text(given), received, [10 * tour.rank])


def gather(tour: Tour) -> None:
    """Rank 0 gets the parts of all ranks, ordered by rank.

    Only rank 0 passes a list, with a tensor for each rank of the WORLD (not only of the node).
    """
    collected = tour.blanks() if tour.rank == 0 else None
    dist.gather(tour.numbers(10.0 * tour.rank), collected, dst=0)
    expected = [[10 * peer] for peer in range(tour.world_size)] if tour.rank == 0 else None
    tour.show("gather to rank 0", f"[{10 * tour.rank}]", collected, expected)


def all_gather(tour: Tour) -> None:
    """All ranks get the parts of all ranks, in a list of tensors allocated before, by rank."""
    collected = tour.blanks()
    dist.all_gather(collected, tour.numbers(10.0 * tour.rank))
    expected = [[10 * peer] for peer in range(tour.world_size)]
    tour.show("all_gather", f"[{10 * tour.rank}]", collected, expected)


def reduce(tour: Tour) -> None:
    """Rank 0 gets the sum. The tensors of the others are undefined: gloo leaves partial sums."""
    value = tour.numbers(tour.rank + 1.0)
    before = text(value)
    dist.reduce(value, dst=0)
    after, expected = "undefined", "undefined"
    if tour.rank == 0:
        after, expected = text(value), text([sum(range(tour.world_size + 1))])
    tour.show("reduce SUM to rank 0", before, after, expected)


def all_reduce(tour: Tour) -> None:
    """All ranks get the result. Old texts call `dist.ReduceOp.SUM` `dist.reduce_op.SUM`."""
    values = [peer + 1 for peer in range(tour.world_size)]
    factors = values[:12] + [1] * (tour.world_size - 12)  # 14! is not a number of float32
    results = {"SUM": sum(values), "PRODUCT": math.prod(factors), "MIN": 1, "MAX": tour.world_size}
    for name, result in results.items():
        value = tour.numbers(float((factors if name == "PRODUCT" else values)[tour.rank]))
        before = text(value)
        dist.all_reduce(value, getattr(dist.ReduceOp, name))
        tour.show(f"all_reduce {name}", before, value, [result])
    value = tour.numbers(tour.rank + 1.0)
    before = text(value)
    try:
        dist.all_reduce(value, dist.ReduceOp.AVG)
    except RuntimeError as error:
        print0(f"\nall_reduce AVG\n  refused by {tour.backend}: {str(error).splitlines()[0]}")
    else:
        tour.show("all_reduce AVG", before, value, [f"{sum(values) / tour.world_size:g}"])


def reduce_scatter(tour: Tour) -> None:
    """Part r of the sum goes to rank r: the first half of a ring; all_gather is the second half."""
    parts = [tour.numbers(10.0 * peer + tour.rank) for peer in range(tour.world_size)]
    received = tour.numbers(-1.0)
    before = text(parts)
    dist.reduce_scatter(received, parts)
    expected = 10 * tour.rank * tour.world_size + sum(range(tour.world_size))
    tour.show("reduce_scatter SUM", before, received, [expected])


def all_to_all(tour: Tour) -> None:
    """Part p of rank r goes to rank p: a matrix is transposed."""
    parts = [tour.numbers(10.0 * tour.rank + peer) for peer in range(tour.world_size)]
    received = tour.blanks()
    try:
        dist.all_to_all(received, parts)
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
        print0(f"\nall_to_all\n  refused by {tour.backend}: {str(error).splitlines()[0]}")
        return
    expected = [[10 * peer + tour.rank] for peer in range(tour.world_size)]
    tour.show("all_to_all", text(parts), received, expected)
