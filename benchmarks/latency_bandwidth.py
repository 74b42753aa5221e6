"""What an all-reduce, and a training step with it, cost by the latency-bandwidth model.

A message of n bytes takes alpha + n * beta seconds: alpha is what it costs however short it is,
1 / beta is the bandwidth of one process's link. With W ranks and S bytes, each step of a ring sends
S / W bytes, and there are 2 (W - 1) steps one after the other:

    T(W, S) = 2 (W - 1) alpha + 2 (W - 1) / W * S * beta

In the functions `size` is S, the bytes of the whole model's gradients, and `compute` the seconds
that one rank computes its share of a step.

Sources: Hockney, 1994, The communication challenge for MPP, for the model
(https://doi.org/10.1016/S0167-8191(06)80021-9); Thakur, Rabenseifner and Gropp, 2005, Optimization
of collective communication operations in MPICH, section 4.5, for the ring, without its term for the
additions (https://doi.org/10.1177/1094342005051521).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Link:
    """How a process reaches the next one."""

    alpha: float
    """Seconds per message."""
    beta: float
    """Seconds per byte."""

    @classmethod
    def network(cls, gigabits: float, alpha: float) -> "Link":
        """A network of so many gigabits per second and rank, used to the full."""
        return cls(alpha, 8 / (gigabits * 1e9))


@dataclass(frozen=True)
class Point:
    """A measured all-reduce: ranks, bytes, seconds."""

    ranks: int
    size: int
    seconds: float


def ring_seconds(ranks: int, size: float, link: Link) -> float:
    """Seconds of an all-reduce of `size` bytes by a ring."""
    return 2 * (ranks - 1) * link.alpha + 2 * (ranks - 1) / ranks * size * link.beta


def data_parallel_seconds(
    ranks: int, size: float, compute: float, link: Link, overlap: bool
) -> float:
    """Seconds of a step of data parallel training.

    With `overlap` the all-reduce hides behind backward, as far as it goes; nowhere else.
    """
    exchange = ring_seconds(ranks, size, link)
    return compute / 3 + max(2 * compute / 3, exchange) if overlap else compute + exchange


def pipeline_seconds(
    ranks: int,
    size: float,
    compute: float,
    link: Link,
    stages: int,
    micro_batches: int,
    activations: float,
) -> float:
    """Seconds of a step of `stages` equal stages, in `ranks / stages` replicas.

    Messages travel while stages compute, so only those that fill and empty the pipeline count; each
    has the bytes of one micro-batch's activations at a cut. The replicas add up the gradients.
    """
    filled = (micro_batches + stages - 1) / micro_batches * compute
    messages = 2 * (stages - 1) * (link.alpha + activations * link.beta)
    return filled + messages + ring_seconds(ranks // stages, size / stages, link)


def fit(points: Iterable[Point]) -> Link:
    """The latency and the bandwidth with which the ring's formula is nearest to what was measured.

    The squares of the relative errors are the least possible: absolute ones would be those of the
    largest messages only. Neither latency nor bandwidth is negative.

    Raises:
        ValueError: fewer than two points with two or more ranks.
    """
    used = [point for point in points if point.ranks > 1]
    if len(used) < 2:
        raise ValueError("two points or more are needed to fit a latency and a bandwidth")
    # 1 = beta * moved + alpha * messages, divided by the measured seconds, in columns of like size.
    # Of one size of message, which cannot tell them apart, the first column gets it all.
    moved = np.array([2 * (p.ranks - 1) / p.ranks * p.size / p.seconds for p in used])
    messages = np.array([2 * (p.ranks - 1) / p.seconds for p in used])
    columns = np.stack([moved / moved.max(), messages / messages.max()], axis=1)
    (beta, alpha), _ = nnls(columns, np.ones(len(used)))
    return Link(float(alpha / messages.max()), float(beta / moved.max()))


def errors(points: Iterable[Point], link: Link) -> dict[str, float]:
    """How far the model is from the points: the median and the largest relative error."""
    found = [
        abs(ring_seconds(p.ranks, p.size, link) / p.seconds - 1) for p in points if p.ranks > 1
    ]
    return {"median_error": median(found), "largest_error": max(found)}
