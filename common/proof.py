"""Proofs at the end of a run that every rank took part. A violation fails the run: it is an error of the program."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import World


class ProofError(RuntimeError):
    """The run did not do what it claims: replicas differ, or samples were lost or seen twice."""


def parameter_hash(model: nn.Module) -> str:
    """SHA-256 of parameters and buffers in name order: equal hashes mean bit-identical training."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def prove_replicas_agree(model: nn.Module, world: World, part: int = 0) -> str:
    """Check that all ranks hold the same parameters and buffers, and that all of them are there.

    Args:
        model: this rank's replica.
        world: this process's world.
        part: where the model is cut into parts, which of them this rank holds: only replicas of one part must agree.

    Returns:
        The common parameter hash (of this rank's part).

    Raises:
        ProofError: the ranks whose replicas differ are named.
    """
    if dist.get_world_size() != world.size:
        raise ProofError(f"{dist.get_world_size()} processes take part, {world.size} were asked for")
    held: list[Any] = [None] * world.size
    dist.all_gather_object(held, (part, parameter_hash(model)))
    expected: dict[int, int] = {}  # per part, the first rank that holds it
    different = [str(rank) for rank, entry in enumerate(held) if entry != held[expected.setdefault(entry[0], rank)]]
    if different:
        theirs = sorted({expected[held[int(rank)][0]] for rank in different})
        raise ProofError(
            f"the replicas differ: rank(s) {', '.join(different)} hold other parameters than rank "
            f"{', '.join(map(str, theirs))}"
        )
    return held[expected[part]][1]


def prove_seen_once(seen: Tensor) -> None:
    """Check that the ranks together trained on every sample of the epoch exactly once.

    Args:
        seen: how often this rank trained on each sample of the dataset, [N], int32, on the CPU; summed in place.

    Raises:
        ProofError: samples were lost or trained on twice.
    """
    dist.all_reduce(seen)
    lost, repeated = int((seen == 0).sum()), int((seen > 1).sum())
    if lost or repeated:
        raise ProofError(
            f"of {len(seen)} samples of the epoch, {lost} were lost and {repeated} trained on more than once"
        )
