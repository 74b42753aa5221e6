"""The model of scaling.py: its formula counts what a ring sends, and its fit finds what it was made from."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.latency_bandwidth import (
    Link,
    Point,
    data_parallel_seconds,
    errors,
    fit,
    pipeline_seconds,
    ring_seconds,
)

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 46_000_000)


def simulated(ranks: int, size: int, link: Link) -> float:
    """A ring, message by message: a rank goes on when it has sent its chunk and its left neighbour's has come."""
    clocks = [0.0] * ranks
    for _ in range(2 * (ranks - 1)):
        sent = [clock + link.alpha + size / ranks * link.beta for clock in clocks]
        clocks = [max(sent[rank], sent[rank - 1]) for rank in range(ranks)]
    return max(clocks)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 10**9), st.floats(0, 1e-2), st.floats(0, 1e-7))
def test_the_model_is_a_ring(ranks: int, size: int, alpha: float, beta: float) -> None:
    link = Link(alpha, beta)
    assert ring_seconds(ranks, size, link) == pytest.approx(simulated(ranks, size, link), rel=1e-9, abs=1e-15)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7), st.integers(0, 1000))
def test_the_fit_recovers_what_the_points_were_made_from(alpha: float, beta: float, seed: int) -> None:
    link, chance = Link(alpha, beta), random.Random(seed)
    exact = [Point(ranks, size, ring_seconds(ranks, size, link)) for ranks in (2, 3, 4) for size in SIZES]
    found = fit(exact)
    assert ring_seconds(512, 46e6, found) == pytest.approx(ring_seconds(512, 46e6, link), rel=1e-6)
    assert errors(exact, found)["largest_error"] < 1e-6
    noisy = [Point(p.ranks, p.size, p.seconds * chance.uniform(0.95, 1.05)) for p in exact]
    found = fit(noisy)
    assert ring_seconds(512, 46e6, found) == pytest.approx(ring_seconds(512, 46e6, link), rel=0.12)
    assert 0 < errors(noisy, found)["largest_error"] < 0.2


def test_latency_and_bandwidth_are_told_apart() -> None:
    link = Link(300e-6, 1e-9)
    found = fit([Point(ranks, size, ring_seconds(ranks, size, link)) for ranks in (2, 4) for size in SIZES])
    assert (found.alpha, found.beta) == pytest.approx((link.alpha, link.beta))


def test_what_cannot_be_fitted() -> None:
    assert fit([Point(2, size, 1e-3) for size in (10**6, 10**3)]).beta >= 0  # a larger message takes as long
    one_size = fit([Point(2, 10**6, 1e-3)] * 2)  # which cannot tell them apart
    assert (one_size.alpha, one_size.beta) == (0, pytest.approx(1e-9))
    with pytest.raises(ValueError, match="two points"):
        fit([Point(1, 10**6, 1e-3)] * 3)


def test_steps() -> None:
    """By hand: 4 ranks, 100 Gb/s, 1 GB of gradients: 6 messages of 20 ms and 10 us."""
    link = Link.network(100, 10e-6)
    exchange = 6 * (0.02 + 10e-6)
    assert ring_seconds(4, 1e9, link) == pytest.approx(exchange)
    assert data_parallel_seconds(4, 1e9, 0.3, link, overlap=False) == pytest.approx(0.3 + exchange)
    assert data_parallel_seconds(4, 1e9, 0.3, link, overlap=True) == pytest.approx(0.3)  # hidden: 0.12 of 0.2
    assert data_parallel_seconds(4, 1e9, 0.03, link, overlap=True) == pytest.approx(0.01 + exchange)
    # 2 stages x 2 replicas, 4 micro-batches: 5/4 of the computing, a message there and one back, half the gradients
    expected = 0.3 * 5 / 4 + 2 * (10e-6 + 1e6 * 8e-11) + 2 * (10e-6 + 0.25e9 * 8e-11)
    assert pipeline_seconds(4, 1e9, 0.3, link, 2, 4, 1e6) == pytest.approx(expected)
    assert pipeline_seconds(1, 1e9, 0.3, link, 1, 4, 1e6) == data_parallel_seconds(1, 1e9, 0.3, link, overlap=True)
