"""Checks that every rank took part. A violation fails the run: it is an error of the program."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.launch.console import listed
from common.launch.place import current


class CheckError(RuntimeError):
    """The run did not do what it claims: replicas differ, or samples were lost or seen twice."""


def parameter_hash(model: nn.Module) -> str:
    """SHA-256 of parameters and buffers in name order: equal hashes mean bit-identical training."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_replicas(model: nn.Module, part: int = 0) -> str:
    """Check that all ranks hold the same parameters and buffers. Every rank calls this.

    Args:
        model: this rank's replica.
        part: of a model that is cut into parts, the number of the one that this rank holds; only
            replicas of one part must be equal.

    Returns:
        The common parameter hash (of this rank's part).

    Raises:
        CheckError: ranks are missing, or their replicas differ; they are named.
    """
    size, asked_for = dist.get_world_size(), current().world_size
    if size != asked_for:
        raise CheckError(f"{size} processes take part, {asked_for} were asked for")
    held: list[Any] = [None] * size
    dist.all_gather_object(held, (part, parameter_hash(model)))
    first: dict[int, int] = {}  # per part, the first rank that holds it
    for rank in reversed(range(size)):
        first[held[rank][0]] = rank
    different = [rank for rank in range(size) if held[rank] != held[first[held[rank][0]]]]
    if different:
        others = sorted({first[held[rank][0]] for rank in different})
        raise CheckError(
            f"the replicas differ: rank(s) {listed(different)} hold other parameters "
            f"than rank {listed(others)}"
        )
    return held[first[part]][1]


def check_seen_once(sample_counts: Tensor) -> None:
    """Check that the ranks together trained on every sample of the epoch exactly once.

    Every rank calls this.

    Args:
        sample_counts: how often this rank trained on each sample of the dataset, [N], int32, on
            the CPU; summed over the ranks in place.

    Raises:
        CheckError: samples were lost or trained on twice.
    """
    dist.all_reduce(sample_counts)
    lost, repeated = int((sample_counts == 0).sum()), int((sample_counts > 1).sum())
    if lost or repeated:
        raise CheckError(
            f"of {len(sample_counts)} samples of the epoch, {lost} were lost and {repeated} "
            f"trained on more than once"
        )
