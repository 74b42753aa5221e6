"""Compare ways to sum tensors over two ranks: ring, shared memory, compression, all_reduce.

    python -m benchmarks.allreduce

The program then times training steps of ResNet-18 that average gradients with DDP, the ring or
shared memory. Each rank has one core.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from benchmarks import harness
from benchmarks.harness import Claim, Measurement, Result, Table, compare, on_ranks, ratio, timed
from common.precision import autocast
from examples.manual_allreduce_sgd.further.compress import BFloat16, PowerSGD, TopK
from examples.manual_allreduce_sgd.further.shared_memory import SharedMemory
from examples.manual_allreduce_sgd.train import average_gradients, ring_all_reduce

RANKS = 2
TORCH, RING, SHARED = "dist.all_reduce", "ring_all_reduce", "shared memory"
RING_FLOOR, SHARED_FLOOR, STEP_FLOOR = 1.0, 7.0, 1.0
MEGABYTES = (1, 16, 64)


def compare_sums(memory: SharedMemory, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Time each way to sum a tensor over the ranks, in seconds. Every rank calls this."""
    message, repeats = torch.zeros_like(memory.own), max(4, 128 // megabytes)
    sums: dict[str, Callable[[], object]] = {
        TORCH: lambda: dist.all_reduce(message),
        RING: lambda: ring_all_reduce(message),
        SHARED: memory.sum,
    }
    return compare({name: partial(timed, sum_, repeats) for name, sum_ in sums.items()}, rounds)


def compare_compression(width: int, rounds: int) -> dict[str, list[float]]:
    """Time each way to average a matrix [width, width], in seconds. Every rank calls this."""
    torch.manual_seed(dist.get_rank())
    gradient = torch.randn(width * width)
    averages: dict[str, Any] = {
        "bf16": BFloat16(),
        "top-k, 1%": TopK(0.01),
        "PowerSGD, rank 4": PowerSGD([(width, width)], 4),
    }
    steps = {name: partial(each.average, gradient) for name, each in averages.items()}
    steps[TORCH] = partial(dist.all_reduce, gradient.clone())
    return compare({name: partial(timed, step, 4) for name, step in steps.items()}, rounds)


def set_gradients(model: nn.Module, flat: Tensor) -> None:
    """Set each parameter's gradient to a view of the flat tensor [n]."""
    parameters = list(model.parameters())
    views = flat.split([parameter.numel() for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view.view_as(parameter)


def compare_steps(
    memory: SharedMemory, batch: int, size: int, rounds: int
) -> dict[str, list[float]]:
    """Time each kind of training step, in seconds. Every rank calls this."""
    images = torch.randn(batch, 3, size, size)
    labels, bf16 = torch.arange(batch), autocast("auto", torch.device("cpu"))

    def step_of(model: nn.Module, exchange: Callable[[], object]) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)

        def step() -> None:
            if exchange is share:
                set_gradients(model, memory.own.zero_())
            else:
                optimizer.zero_grad()
            with bf16:
                logits = model(images).float()
            F.cross_entropy(logits, labels).backward()
            exchange()
            optimizer.step()

        return step

    models = [resnet18() for _ in range(4)]

    def share() -> None:
        set_gradients(models[3], memory.sum().div(RANKS))

    steps = {
        "no exchange": step_of(models[0], lambda: None),
        "DDP": step_of(DistributedDataParallel(models[1], gradient_as_bucket_view=True), int),
        RING: step_of(models[2], lambda: average_gradients(models[2], ring_all_reduce)),
        SHARED: step_of(models[3], share),
    }
    return compare({name: partial(timed, step, 2) for name, step in steps.items()}, rounds)


def measure(args: Measurement) -> Result:
    """Compare all-reduce implementations, compression methods and training steps."""
    tables, claims = dict[str, Table](), list[Claim]()
    rounds, batch, size, width = args.rounds, 8, 224, 2048
    if args.quick:
        rounds, batch, size, width = 1, 2, 64, 256
    for megabytes in MEGABYTES[:2] if args.quick else MEGABYTES:
        memory = SharedMemory(RANKS, megabytes << 18)
        samples = on_ranks(RANKS, compare_sums, memory, megabytes, rounds)
        tables[f"Sum of {megabytes} MB"] = Table("s", samples)
        for name, floor in {RING: RING_FLOOR, SHARED: SHARED_FLOOR}.items():
            text = f"sum of {megabytes} MB, {name}, faster than {TORCH}"
            if megabytes >= 16:
                claims.append(Claim(text, ratio(samples, TORCH, name), floor))
    samples = on_ranks(RANKS, compare_compression, width, rounds)
    tables[f"Mean of a matrix of {width}x{width}"] = Table("s", samples)
    memory = SharedMemory(RANKS, sum(parameter.numel() for parameter in resnet18().parameters()))
    samples = on_ranks(RANKS, compare_steps, memory, batch, size, rounds)
    tables["Training step of ResNet-18"] = Table("s", samples)
    text = f"training step of ResNet-18, {SHARED}, faster than DDP"
    claims.append(Claim(text, ratio(samples, "DDP", SHARED), STEP_FLOOR))
    inputs = {"ranks": RANKS, "images per rank": batch, "pixels": f"{size}x{size}"}
    return Result(inputs, tables, claims)


if __name__ == "__main__":
    harness.main("allreduce", measure)
