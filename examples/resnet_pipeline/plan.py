"""Where to cut: every part of the model is measured; it is cut so that the slowest stage is as fast as possible."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from common.distributed import World, from_main
from common.errors import UserError
from common.precision import Numerics
from examples.resnet_pipeline.model import Stage, blocks, cut_points
from examples.resnet_pipeline.schedule import SCHEDULES, Op

MIB = 2**20


@dataclass(frozen=True)
class Part:
    """What was measured of consecutive blocks, for one micro-batch."""

    first: str
    last: str
    parameters: int
    shape: tuple[int, ...]
    """Of the output, without the batch."""
    dtype: torch.dtype
    kept: int
    """Bytes that the backward pass needs of the forward pass, without parameters."""
    forward: float
    """Seconds."""
    backward: float
    """Seconds."""

    @property
    def seconds(self) -> float:
        """Of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Plan:
    """The cut: parts of the model, the first part of each stage, and what follows from it."""

    parts: tuple[Part, ...]
    starts: tuple[int, ...]

    @property
    def ranges(self) -> list[range]:
        """The parts of each stage."""
        return [range(a, b) for a, b in zip(self.starts, (*self.starts[1:], len(self.parts)), strict=True)]

    @property
    def stages(self) -> list[Part]:
        """What was measured, added up per stage."""
        return [joined(self.parts[r.start : r.stop]) for r in self.ranges]

    def input(self, stage: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape (of one sample) and type of what a stage receives from the one before it (nothing before the first)."""
        if stage == 0:
            return (), torch.float32
        before = self.parts[self.starts[stage] - 1]
        return before.shape, before.dtype


def joined(parts: Sequence[Part]) -> Part:
    """Consecutive parts as one."""
    sums = {name: sum(getattr(p, name) for p in parts) for name in ("parameters", "kept", "forward", "backward")}
    return replace(parts[-1], first=parts[0].first, **sums)


def measure(model: nn.Module, images: Tensor, numerics: Numerics, repeats: int = 5) -> tuple[Part, ...]:
    """Take one micro-batch through the parts, forward and back, and time each (the fastest of `repeats`, after one).

    Through all of them, as in training: a part by itself would get its memory from the operating system every time,
    and the first parts, whose activations are the largest, would seem half as slow again as they are.

    Args:
        model: the un-split model; its gradients and statistics are changed.
        images: one micro-batch, [B, 3, H, W], on the device.
        numerics: device and precision.
        repeats: runs that count.
    """
    parts = blocks(model)
    stages = [Stage([part], replace(numerics, compile=False)) for part in parts]
    parameters = {p.data_ptr() for p in model.parameters()}
    times: list[list[tuple[float, float]]] = [[] for _ in parts]
    shapes: list[tuple[tuple[int, ...], torch.dtype, int]] = []
    for run in range(repeats + 1):
        ends: list[tuple[Tensor, Tensor, float]] = []
        y = images
        for stage in stages:
            kept: dict[int, int] = {}

            def hold(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            x = y.detach().requires_grad_(ends != [])
            count = torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor)
            with count if run == 0 else contextlib.nullcontext():
                start = _now(images)
                y = stage(x)
                ends.append((x, y, _now(images) - start))
            if run == 0:
                others = parameters | {x.data_ptr()}  # the input was counted as the output of the part before
                bytes_kept = sum(size for address, size in kept.items() if address not in others)
                shapes.append((tuple(y.shape[1:]), y.dtype, bytes_kept))
        gradient: Tensor | None = torch.ones_like(y)
        for part_times in reversed(times):
            x, y, forward = ends.pop()
            start = _now(images)
            y.backward(gradient)
            part_times.append((forward, _now(images) - start))
            gradient = x.grad
    found = []
    for part, stage, (shape, dtype, size), measured in zip(parts, stages, shapes, times, strict=True):
        forward, backward = (min(column) for column in zip(*measured[1:], strict=True))
        count_parameters = sum(p.numel() for p in stage.parameters())
        found.append(Part(part[0][0], part[-1][0], count_parameters, shape, dtype, size, forward, backward))
    return tuple(found)


def _now(images: Tensor) -> float:
    if images.device.type == "cuda":
        torch.cuda.synchronize(images.device)
    return time.perf_counter()


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Cut a row of costs so that the largest sum is as small as possible (dynamic programming).

    Returns:
        The index with which each stage begins.
    """

    @lru_cache(None)
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sum(costs[start:]), (start,)
        options = (
            (max(sum(costs[start:end]), rest), (start, *starts))
            for end in range(start + 1, len(costs) - left + 2)
            for rest, starts in [best(end, left - 1)]
        )
        return min(options)

    return list(best(0, stages)[1])


def make_plan(
    model: nn.Module, images: Tensor, numerics: Numerics, world: World, stages: int, balance: str, cuts: Sequence[str]
) -> Plan:
    """Measure on the main rank while the others wait, and cut.

    Args:
        model: an un-split model to measure, which is used up.
        images: one micro-batch, [B, 3, H, W], on the device.
        numerics: device and precision.
        world: this process's world.
        stages: stages of the pipeline.
        balance: `auto` by the measured time, or `even`, as many blocks in each.
        cuts: first blocks of the second and later stages; overrides `balance`.

    Raises:
        UserError: more stages than parts, or cuts that do not fit.
    """
    count = len(blocks(model))
    if stages > count:
        raise UserError(f"{stages} stages: the model has only {count} parts that a cut can separate; use fewer")
    starts = cut_points(cuts, blocks(model))
    if cuts and len(starts) != stages:
        raise UserError(f"--cuts: {stages} stages need {stages - 1} cut(s), {len(cuts)} were given")
    repeats = 5 if balance == "auto" and not cuts else 1
    parts = from_main(world, lambda: measure(model, images, numerics, repeats))
    if not cuts:
        starts = balanced([part.seconds if balance == "auto" else 1.0 for part in parts], stages)
    return Plan(parts, tuple(starts))


def simulate(schedule: str, forward: Sequence[float], backward: Sequence[float], count: int, processes: int) -> float:
    """The seconds that a step takes when messages cost nothing.

    Args:
        schedule: gpipe, 1f1b or interleaved.
        forward: seconds of one micro-batch per stage.
        backward: the same of the backward pass.
        count: micro-batches.
        processes: stage s is on process s modulo their number.
    """
    waiting = [SCHEDULES[schedule](process, processes, count) for process in range(processes)]
    done: dict[Op, float] = {}
    clocks = [0.0] * processes
    while any(waiting):
        before = len(done)
        for process, ops in enumerate(waiting):
            while ops:
                op = ops[0]
                needs = op._replace(stage=op.stage + (1 if op.kind == "B" else -1))
                if 0 <= needs.stage < len(forward) and needs not in done:
                    break
                seconds = (forward if op.kind == "F" else backward)[op.stage]
                clocks[process] = done[op] = max(clocks[process], done.get(needs, 0.0)) + seconds
                ops.pop(0)
        assert len(done) > before, "the processes wait for each other"
    return max(clocks)


def predicted_bubble(plan: Plan, schedule: str, count: int, processes: int) -> float:
    """The idle share of all processes that the measured times lead to."""
    forward, backward = [s.forward for s in plan.stages], [s.backward for s in plan.stages]
    span = simulate(schedule, forward, backward, count, processes)
    return 1 - count * (sum(forward) + sum(backward)) / (processes * span)


def describe(plan: Plan, schedule: str, processes: int, count: int, micro_batch: int) -> list[str]:
    """The plan as lines to print."""
    lines = [f"plan: {len(plan.starts)} stage(s) on {processes} process(es) per replica, {schedule}"]
    for number, stage in enumerate(plan.stages):
        lines.append(
            f"  stage {number}: {stage.first} .. {stage.last}, {stage.parameters:,} parameters, "
            f"{stage.kept / MIB:.1f} MiB of activations per micro-batch of {micro_batch}, "
            f"{1e3 * stage.forward:.1f} + {1e3 * stage.backward:.1f} ms"
        )
    if schedule in SCHEDULES and (processes > 1 or len(plan.starts) == 1):
        each = len(plan.starts) // processes
        ideal = (processes - 1) / (each * count + processes - 1)
        formula = f"(P-1)/({each if each > 1 else ''}M+P-1)"
        lines.append(
            f"  predicted bubble: {ideal:.1%} by {formula} with P = {processes}, M = {count}, "
            f"{predicted_bubble(plan, schedule, count, processes):.1%} with these stages"
        )
    return lines
