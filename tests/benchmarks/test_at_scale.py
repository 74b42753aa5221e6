"""The model of at_scale.py: a ring is followed message by message, two levels are compared with their parts."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.at_scale import CLUSTERS, GPUS, RANKS, WAYS, Cluster, flat_ring, tree, two_levels
from benchmarks.latency_bandwidth import Link, ring_seconds

each_cluster = pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=str)


def simulated(cluster: Cluster, nodes: int, size: float) -> float:
    """A flat ring, message by message: a link is busy with a chunk, which arrives its latency later."""
    ranks = GPUS * nodes
    links = [cluster.port if rank % GPUS == GPUS - 1 and nodes > 1 else cluster.inside for rank in range(ranks)]
    free, there = [0.0] * ranks, [0.0] * ranks  # links, and the newest chunk of each rank
    for _ in range(2 * (ranks - 1)):
        arrived = [0.0] * ranks
        for rank, link in enumerate(links):
            free[rank] = max(free[rank], there[rank]) + size / ranks * link.beta
            arrived[(rank + 1) % ranks] = free[rank] + link.alpha
        there = arrived
    return max(there)


@each_cluster
@pytest.mark.parametrize("nodes", [1, 2, 4, 16])
@pytest.mark.parametrize("size", [1e3, 1e8])
def test_the_flat_ring_is_a_ring(cluster: Cluster, nodes: int, size: float) -> None:
    """Latency and bandwidth are added in the formula; messages overlap them in part."""
    latency, whole = flat_ring(cluster, nodes, 0), flat_ring(cluster, nodes, size)
    assert max(latency, whole - latency) * 0.99 <= simulated(cluster, nodes, size) <= whole * 1.01


@settings(deadline=None)
@given(st.integers(1, 9), st.floats(0, 1e9))
def test_one_node_is_the_same_for_all_rings(exponent: int, size: float) -> None:
    for cluster in CLUSTERS.values():
        inside = ring_seconds(GPUS, size, cluster.inside)
        assert flat_ring(cluster, 1, size) == pytest.approx(inside)
        nodes = 2**exponent
        between = two_levels(cluster, nodes, size, ring_seconds) - inside
        assert between == pytest.approx(ring_seconds(nodes, size / GPUS, cluster.eighth()))


@each_cluster
def test_a_tree_grows_by_two_messages_when_the_nodes_double(cluster: Cluster) -> None:
    for fewer, more in pairwise([2, 4, 8, 16]):
        longer = tree(cluster, more, 1e8) - tree(cluster, fewer, 1e8)
        assert longer == pytest.approx(2 * cluster.port.alpha)


def test_a_port_for_each_gpu_makes_two_levels_eight_times_as_wide() -> None:
    """Without latencies, and with links inside that cost nothing, only the ports count."""
    free, port = Link(0, 0), Link(0, 1e-9)
    ports = {number: Cluster(free, port, number) for number in (1, GPUS)}
    wide, narrow = (two_levels(ports[number], 4, 1e9, ring_seconds) for number in (GPUS, 1))
    assert narrow == pytest.approx(GPUS * wide)


@each_cluster
@pytest.mark.parametrize("way", WAYS)
def test_more_gpus_never_take_less(cluster: Cluster, way: str) -> None:
    seconds = [WAYS[way](cluster, ranks // GPUS, 4e8) for ranks in RANKS]
    assert seconds == sorted(seconds)
