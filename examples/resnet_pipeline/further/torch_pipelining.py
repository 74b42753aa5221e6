"""Run resnet_pipeline's stages with torch.distributed.pipelining, PyTorch's pipeline engine.

    torchrun --standalone --nproc-per-node 2 -m examples.resnet_pipeline.further.torch_pipelining
    torchrun --standalone --nproc-per-node 2 -m examples.resnet_pipeline.further.torch_pipelining \
        --schedule zbv

A rank has one stage with gpipe and 1f1b, and two stages with the other schedules. With interleaved,
rank p of P has the stages p and P + p, so that the next rank waits less than with 1f1b. With
zbv (https://arxiv.org/abs/2401.10241), rank p has the stages p and 2 P - 1 - p. The first rank then
has the first and the last stage, so that the backward pass starts on the rank where the forward
pass ends. Weight gradients fill the remaining bubble. With torch 2.11, zbv needs NCCL.
"""

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.distributed import pipelining

from common.launch import RunArgs
from common.rank import init_distributed, print0

from ..stages import build_stage

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Args:
    """Train a ResNet for a few steps with one of torch's schedules."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    arch: str = "resnet50"
    batch_size: int = 32
    micro_batches: int = 4  # for interleaved, a multiple of P; for zbv, a multiple of 2 P
    image_size: int = 64
    steps: int = 4


def stage_indices(schedule: str, rank: int, ranks: int) -> list[int]:
    """Return the indices of a rank's stages."""
    if schedule in ("gpipe", "1f1b"):
        return [rank]
    return [rank, 2 * ranks - 1 - rank if schedule == "zbv" else ranks + rank]


def train(args: Args, device: torch.device) -> list[float]:
    """Train, print the time per step, and return the losses. Every rank calls this."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if dist.get_backend() == "gloo" else device  # gloo sends no CUDA
    indices = stage_indices(args.schedule, rank, ranks)
    stages, modules, built = len(indices) * ranks, [], []
    for index in indices:
        torch.manual_seed(0)
        module = build_stage(args.arch, 10, "group", stages, index)
        # The engine sends contiguous tensors only, so channels_last is not possible.
        modules.append(module.to(device).to(memory_format=torch.contiguous_format))
        built.append(pipelining.PipelineStage(modules[-1], index, stages, device))

    def loss_function(logits: Tensor, labels: Tensor) -> Tensor:
        # This is the mean over the GLOBAL batch. The engine's default, the mean of the micro-batch
        # means, is equal only if all micro-batches have the same size.
        return F.cross_entropy(logits, labels, reduction="sum") / args.batch_size

    schedule = SCHEDULES[args.schedule](
        built if len(built) > 1 else built[0],
        n_microbatches=args.micro_batches,
        loss_fn=loss_function,
        scale_grads=False,
    )
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], 0.1)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels, history, times = torch.arange(args.batch_size, device=device) % 10, [], []
    for _ in range(args.steps):
        start, losses = time.perf_counter(), list[Tensor]()
        inputs = [images] if 0 in indices else []
        target = {"target": labels, "losses": losses} if stages - 1 in indices else {}
        schedule.step(*inputs, **target)
        optimizer.step()
        optimizer.zero_grad()
        loss = sum(losses, torch.zeros((), device=device)).detach()  # only the last stage has any
        dist.all_reduce(loss)
        history.append(loss.item())
        times.append(time.perf_counter() - start)
    print0(
        f"{args.schedule}: {stages} stages on {ranks} rank(s), {min(times):.3f} s per step, "
        f"loss {history[0]:.4f} to {history[-1]:.4f}"
    )
    return history


if __name__ == "__main__":
    train(tyro.cli(Args), init_distributed(RunArgs(), local_rank=0))  # torchrun sets it
    dist.destroy_process_group()
