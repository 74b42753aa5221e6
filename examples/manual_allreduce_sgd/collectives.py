"""The topics of the tour about tensors that all ranks exchange together."""

import math

import torch.distributed as dist

from common.distributed import say
from examples.manual_allreduce_sgd.table import Tour, text


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
    """Rank 0 gets the sum. What the others hold then is not defined: gloo leaves partial sums."""
    value = tour.numbers(tour.rank + 1.0)
    before = text(value)
    dist.reduce(value, dst=0)
    after = "undefined" if tour.rank else value
    tour.show("reduce SUM to rank 0", before, after, "undefined" if tour.rank else [sum(range(tour.size + 1))])


def all_reduce(tour: Tour) -> None:
    """Everybody gets the result. In old texts `dist.ReduceOp.SUM` is called `dist.reduce_op.SUM`."""
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
    try:
        dist.all_to_all(received, parts)
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
        say(tour.world, f"\nall_to_all\n  refused by {tour.world.backend}: {str(error).splitlines()[0]}")
        return
    tour.show("all_to_all", text(parts), received, [[10 * peer + tour.rank] for peer in range(tour.size)])
