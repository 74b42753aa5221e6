"""Unequal machines: a rank that computes slower gets fewer samples of each global batch.

| `--shares` | what each rank gets of a global batch | batch size |
|---|---|---|
| equal | as many samples as the others | a multiple of the world size |
| 3,1 | rank 0 three quarters, rank 1 one quarter | any that leaves no rank without a sample |
| auto | so many that all compute equally long, measured before the first step | the same |

A step takes as long as the slowest rank computes. The gradient stays that of the global batch of N
samples: the mean over the W ranks of (sum over the rank's samples) W / N is the sum over all
samples / N, however they are divided. The mean of the ranks' own means is not: a sample of a rank
that has few of them would count more.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from common.launch.errors import UserError
from common.train.run import Run
from examples.manual_allreduce_sgd.args import Args

ROUNDS = 3  # in each, a rank measures the share that follows from the one before
SECONDS = 0.3  # of a round: many turns on a core that other programs use, too


def division(args: Args) -> dict[str, Any]:
    """What `Run` has to know of unequal shares. Every rank calls this.

    Raises:
        UserError: the numbers are not one for each rank, or a rank would get no sample.
    """
    if args.shares == "equal":
        return {}
    world_size = dist.get_world_size()
    shares = args.share_numbers or [1] * world_size
    if len(shares) != world_size:
        raise UserError(
            f"--shares {args.shares}: {len(shares)} for {world_size} rank(s); give one for each"
        )
    least = -(-sum(shares) // min(shares))
    if args.batch_size < least:
        raise UserError(
            f"--shares {args.shares}: rank {shares.index(min(shares))} would get no sample of "
            f"--batch-size {args.batch_size} (global); use {least} or more"
        )
    # Shard 0 of 1: the loader gives this rank no sample that is not its own.
    return {"shard": (0, 1), "shares": f"{world_size} shares ({args.shares})"}


def agreed_shares(args: Args, run: Run, model: nn.Module) -> list[int]:
    """The share of each rank, the same on all. Every rank calls this, after `run.resume`.

    Measured shares are in the checkpoint: a resumed run continues with them, and has the same bits.
    With another number of ranks it measures again.
    """
    if args.shares == "equal":
        return [1] * dist.get_world_size()
    if args.share_numbers:
        return args.share_numbers
    shares: list[int] = run.state.notes.get("shares", [])
    if len(shares) != dist.get_world_size():
        shares = measured_shares(args.batch_size, run, model)
        words = ",".join(map(str, shares))
        run.print0(f"shares of {args.batch_size}, as measured: {words} (again: --shares {words})")
    run.state.notes["shares"] = shares
    return shares


def measured_shares(batch_size: int, run: Run, model: nn.Module) -> list[int]:
    """Samples of a batch for each rank, with which all compute equally long. Every rank calls this.

    All measure at the same time, as they will compute. A step also has a part that costs the same
    however many samples it has: so what follows from one measurement is measured again.

    Source: Chen et al., 2020, Semi-dynamic load balancing: efficient distributed learning in
    non-dedicated environments (https://arxiv.org/abs/1806.02508), which goes on throughout the
    training.
    """
    samples = proportional(batch_size, [1.0] * dist.get_world_size())
    for _ in range(ROUNDS):
        own = samples[dist.get_rank()]
        speeds = [0.0] * dist.get_world_size()  # samples per second
        dist.all_gather_object(speeds, own / step_seconds(own, run, model))
        samples = proportional(batch_size, speeds)
    return samples


def step_seconds(samples: int, run: Run, model: nn.Module) -> float:
    """How long this rank needs for forward and backward of so many samples. Nothing is trained."""
    numbers = [number % len(run.data.train) for number in range(samples)]
    pixels, labels, _ = run.data.train.__getitems__(numbers)  # [B, 1, H, W] bytes, [B]
    pixels, labels = pixels.to(run.device), labels.to(run.device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        with run.autocast():
            logits = model(run.data.normalise(pixels)).float()  # [B, classes]
        # Not backward(), whose hooks would send gradients.
        first, *_ = torch.autograd.grad(F.cross_entropy(logits, labels), parameters)
        first.sum().item()  # waits until a GPU has done all

    step()  # the first one allocates memory
    steps, began = 0, time.perf_counter()
    while time.perf_counter() < began + SECONDS:
        step()
        steps += 1
    return (time.perf_counter() - began) / steps


def proportional(samples: int, speeds: list[float]) -> list[int]:
    """So many samples divided in proportion to the ranks' speeds, at least one for each.

    Args:
        samples: N, at least as many as there are ranks.
        speeds: of each rank, [W].
    """
    found = [max(1, round(samples * speed / sum(speeds))) for speed in speeds]
    while (left := samples - sum(found)) < 0:  # what the slowest ranks got beyond their part
        found[found.index(max(found))] -= 1
    found[found.index(max(found))] += left  # what rounding has left over
    return found
