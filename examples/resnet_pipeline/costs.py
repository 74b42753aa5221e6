"""What each block of the model costs: time, memory and the size of its output, measured."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from common.train.amp import MixedPrecision
from examples.resnet_pipeline.model import Stage, blocks
from examples.resnet_pipeline.schedule import Seconds
from examples.resnet_pipeline.split_backward import (
    Call,
    backward_of_inputs,
    backward_of_weights,
    recorded,
)

LONGEST = 10.0  # seconds of measuring, after the first runs


@dataclass(frozen=True)
class LayerCost:
    """What consecutive blocks cost for one micro-batch, as measured."""

    first: str
    """Name of the first block."""
    last: str
    parameters: int
    shape: tuple[int, ...]
    """Of the output, without the batch."""
    dtype: torch.dtype
    """Of the output."""
    kept: int
    """Bytes that the backward pass needs of the forward pass, without parameters."""
    seconds: Seconds


def joined(costs: Sequence[LayerCost]) -> LayerCost:
    """The costs of consecutive blocks as one."""
    sums = {name: sum(getattr(cost, name) for cost in costs) for name in ("parameters", "kept")}
    seconds = Seconds(*map(sum, zip(*(cost.seconds for cost in costs), strict=True)))
    return replace(costs[-1], first=costs[0].first, seconds=seconds, **sums)


def measure(
    model: nn.Module, images: Tensor, amp: MixedPrecision, repeats: int = 5
) -> tuple[LayerCost, ...]:
    """Time each block, forward and both halves backward (the fastest of `repeats`, after one).

    Of slow runs fewer count: other ranks may be waiting.

    The micro-batch goes through all blocks, as in training. A block alone would get its memory from
    the operating system every time: the first blocks, whose activations are the largest, would seem
    half as slow again as they are.

    Args:
        model: the un-split model; its gradients and statistics are changed.
        images: one micro-batch, [B, 3, H, W], on the device.
        amp: precision.
        repeats: runs that count.
    """
    row = blocks(model)
    stages = [Stage([block], amp) for block in row]
    outputs = _outputs(stages, images)
    _seconds(stages, images)
    runs, start = [_seconds(stages, images)], time.monotonic()
    while len(runs) < repeats and time.monotonic() - start < LONGEST:
        runs.append(_seconds(stages, images))
    by_block = zip(*runs, strict=True)
    costs = []
    for block, stage, output, times in zip(row, stages, outputs, by_block, strict=True):
        parameters = sum(p.numel() for p in stage.parameters())
        fastest = Seconds(*map(min, zip(*times, strict=True)))
        costs.append(LayerCost(block[0][0], block[-1][0], parameters, *output, fastest))
    return tuple(costs)


def _outputs(stages: list[Stage], x: Tensor) -> list[tuple[tuple[int, ...], torch.dtype, int]]:
    """Shape and type of each stage's output, and the bytes that its backward pass needs."""
    parameters = {p.data_ptr() for stage in stages for p in stage.parameters()}
    outputs = []
    for number, stage in enumerate(stages):
        kept: dict[int, int] = {}

        def hold(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        x = x.detach().requires_grad_(number > 0)
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            y = stage(x)
        # The input was counted as the output of the stage before.
        others = parameters | {x.data_ptr()}
        size = sum(size for address, size in kept.items() if address not in others)
        outputs.append((tuple(y.shape[1:]), y.dtype, size))
        x = y
    return outputs


def _seconds(stages: list[Stage], images: Tensor) -> list[Seconds]:
    """Seconds of each stage in one run."""
    passes: list[tuple[list[Call], Tensor, Tensor, float]] = []
    y = images
    for stage in stages:
        x = y.detach().requires_grad_(len(passes) > 0)
        start = _now(images)
        with recorded(stage) as calls:
            y = stage(x)
        passes.append((calls, x, y, _now(images) - start))
    gradient: Tensor | None = torch.ones_like(y)
    times = []
    for stage, (calls, x, y, forward) in zip(stages[::-1], passes[::-1], strict=True):
        start = _now(images)
        halves = backward_of_inputs(stage, calls, x, y, gradient)
        middle = _now(images)
        backward_of_weights(halves)
        times.append(Seconds(forward, middle - start, _now(images) - middle))
        gradient = x.grad
    return times[::-1]


def _now(images: Tensor) -> float:
    if images.device.type == "cuda":
        torch.cuda.synchronize(images.device)
    return time.perf_counter()
