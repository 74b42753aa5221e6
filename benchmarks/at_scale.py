"""What an all-reduce costs with up to 4,096 GPUs: calculated, nothing is measured.

    python -m benchmarks.at_scale

The model is that of latency_bandwidth.py with two kinds of links: those between the GPUs of a node,
and the node's ports to the network. With W GPUs on M nodes of 8, S bytes, and for each kind of link
alpha seconds per message and beta seconds per byte:

* flat ring: one ring through all GPUs, as `ring()` of manual_allreduce_sgd. Each chunk makes
  2 (W - 1) steps, so it leaves a node up to 2 M times; the slowest link sets the pace:
  2 (W - M - 1) alpha_in + 2 M alpha_out + 2 (W - 1) / W * S * max(beta_in, beta_out);
* tree: two trees over the nodes, each with half of the bytes, and a chain within each node:
  2 (7 alpha_in + log2(M) alpha_out) + 2 S beta;
* two levels, rings: a ring within each node, after which every GPU has the node's sum of an eighth;
  M nodes' rings of these eighths, all eight at once, each through its own port (or its share of the
  only one); a ring within each node:
  2 (7 alpha_in + 7/8 S beta_in) + 2 (M - 1) alpha_out + 2 (M - 1) / M * S/8 * beta_out;
* two levels, trees: the same with trees between the nodes.

Links are used to the full; additions, congestion and waiting for slow ranks are left out.

Sources: Sanders, Speck and Traeff, 2009, Two-tree algorithms for full bandwidth broadcast,
reduction and scan (https://doi.org/10.1016/j.parco.2009.09.001), for the trees; the latencies of
NVLink, PCIe and InfiniBand are those of nccl's own cost model for a ring, Simple protocol
(https://github.com/NVIDIA/nccl/blob/5067397c/src/graph/tuning.cc); bandwidths are those of the
data sheets: NVLink of an H100, 450 GB/s each way; a ConnectX-7 port, 400 Gb/s; PCIe 4.0 x16,
32 GB/s. That a message over TCP takes 50 microseconds is an assumption.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import log2
from typing import Any

import torch
from torchvision import models
from transformers import BertConfig, BertModel

from benchmarks.harness import Measurement, facts, program, save
from benchmarks.latency_bandwidth import Link, ring_seconds

GPUS = 8  # of a node
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Cluster:
    """Nodes of eight GPUs."""

    inside: Link
    """Between the GPUs of a node."""
    port: Link
    """A port of a node to the network."""
    ports: int
    """Of a node: one that all its GPUs share, or one for each."""

    def slowest(self, nodes: int) -> float:
        """Seconds per byte of the slowest link that one ring or tree passes."""
        return self.inside.beta if nodes == 1 else max(self.inside.beta, self.port.beta)

    def eighth(self) -> Link:
        """What a GPU has of the ports when all eight of its node send at once."""
        return Link(self.port.alpha, self.port.beta * GPUS / self.ports)


CLUSTERS = {
    "NVLink and InfiniBand": Cluster(Link(3.4e-6, 1 / 450e9), Link.network(400, 14e-6), GPUS),
    "PCIe and one port of 25 GbE": Cluster(Link(5.7e-6, 1 / 32e9), Link.network(25, 50e-6), 1),
}


def flat_ring(cluster: Cluster, nodes: int, size: float) -> float:
    """Seconds of one ring through all GPUs."""
    ranks = GPUS * nodes
    if nodes == 1:
        return ring_seconds(ranks, size, cluster.inside)
    steps = 2 * (ranks - nodes - 1) * cluster.inside.alpha + 2 * nodes * cluster.port.alpha
    return steps + 2 * (ranks - 1) / ranks * size * cluster.slowest(nodes)


def tree_seconds(nodes: int, size: float, link: Link) -> float:
    """Seconds of two trees over `nodes`, each with half of the bytes, up and down."""
    return 2 * log2(nodes) * link.alpha + (2 * size * link.beta if nodes > 1 else 0)


def tree(cluster: Cluster, nodes: int, size: float) -> float:
    """Seconds of two trees over the nodes, with a chain in each."""
    link = Link(cluster.port.alpha, cluster.slowest(nodes))
    chain = 2 * (GPUS - 1) * cluster.inside.alpha
    return chain + (tree_seconds(nodes, size, link) if nodes > 1 else 2 * size * link.beta)


def two_levels(
    cluster: Cluster, nodes: int, size: float, between: Callable[[int, float, Link], float]
) -> float:
    """Seconds of a ring in each node, and of eight all-reduces of an eighth between the nodes."""
    return ring_seconds(GPUS, size, cluster.inside) + between(nodes, size / GPUS, cluster.eighth())


WAYS: Mapping[str, Callable[[Cluster, int, float], float]] = {
    "flat ring": flat_ring,
    "tree": tree,
    "two levels, rings": lambda *known: two_levels(*known, ring_seconds),
    "two levels, trees": lambda *known: two_levels(*known, tree_seconds),
}


def gradients() -> dict[str, int]:
    """Bytes of the fp32 gradients of the models that the examples train."""
    with torch.device("meta"):
        made = {
            "ResNet-18": models.resnet18(),
            "ResNet-50": models.resnet50(),
            "BERT-base": BertModel(BertConfig(), add_pooling_layer=False),
        }
    return {name: sum(4 * p.numel() for p in model.parameters()) for name, model in made.items()}


def wins_from(found: Mapping[str, Any], way: str, other: str) -> dict[str, int | None]:
    """By model, the number of GPUs from which on one way takes less than another."""
    first: dict[str, int | None] = {}
    for model, seconds in found.items():
        slower = [int(ranks) for ranks, of in seconds.items() if of[way] >= of[other]]
        first[model] = min(
            (ranks for ranks in RANKS if ranks > max(slower, default=0)), default=None
        )
    return first


def main(args: Measurement) -> None:
    """Calculate, and write the result."""
    nowhere = {"cpu": "calculated", "cores": 0, "memory_gib": 0, "gpus": []}
    result: dict[str, Any] = facts("torch") | {"machine": nowhere, "gpus_of_a_node": GPUS}
    result["clusters"] = {}
    result["gradient_bytes"] = gradients()
    for name, cluster in CLUSTERS.items():
        seconds = {
            model: {
                str(ranks): {way: cost(cluster, ranks // GPUS, size) for way, cost in WAYS.items()}
                for ranks in RANKS
            }
            for model, size in result["gradient_bytes"].items()
        }
        result["clusters"][name] = {
            "links": asdict(cluster),
            "seconds": seconds,
            "two_levels_win_from": wins_from(seconds, "two levels, rings", "flat ring"),
            "trees_win_from": wins_from(seconds, "two levels, trees", "two levels, rings"),
        }
    save("at_scale", result, args.out)


if __name__ == "__main__":
    program(Measurement, main, __doc__)
