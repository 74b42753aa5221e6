"""Where to cut the model: so that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from common.launch.collectives import broadcast_object
from common.launch.errors import UserError
from common.train.amp import MixedPrecision
from examples.resnet_pipeline.costs import LayerCost, joined, measure
from examples.resnet_pipeline.model import blocks, cut_points
from examples.resnet_pipeline.operations import BY_HAND, simulate
from examples.resnet_pipeline.schedule import bubble_factor, ideal_bubble

MIB = 2**20


@dataclass(frozen=True)
class Partition:
    """Which blocks form which stage.

    Attributes:
        blocks: costs of all blocks of the model.
        starts: the number of the block with which each stage begins.
    """

    blocks: tuple[LayerCost, ...]
    starts: tuple[int, ...]

    @property
    def ranges(self) -> list[range]:
        """The numbers of each stage's blocks."""
        ends = (*self.starts[1:], len(self.blocks))
        return [range(a, b) for a, b in zip(self.starts, ends, strict=True)]

    @property
    def stages(self) -> list[LayerCost]:
        """The costs of each stage."""
        return [joined(self.blocks[r.start : r.stop]) for r in self.ranges]

    def input(self, stage: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape of one sample, and type, of what a stage receives from the one before it."""
        assert stage > 0, "the first stage receives images"
        before = self.blocks[self.starts[stage] - 1]
        return before.shape, before.dtype


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Cut a row of costs so that the largest sum is as small as possible (dynamic programming).

    Args:
        costs: at least as many as there are stages.
        stages: number of stages.

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


def make_partition(
    model: nn.Module,
    images: Tensor,
    amp: MixedPrecision,
    stages: int,
    balance: str,
    cuts: Sequence[str],
) -> Partition:
    """Measure on rank 0 while the others wait, and cut. Every rank calls this.

    Args:
        model: the un-split model; its gradients and statistics are changed.
        images: one micro-batch, [B, 3, H, W], on the device.
        amp: precision.
        stages: stages of the pipeline.
        balance: `auto` by the measured time, or `even`, as many blocks in each.
        cuts: first blocks of the second and later stages; overrides `balance`.

    Raises:
        UserError: more stages than blocks, or cuts that do not fit.
    """
    count = len(blocks(model))
    if stages > count:
        raise UserError(
            f"{stages} stages: the model has only {count} blocks that a cut can separate; use fewer"
        )
    starts = cut_points(cuts, blocks(model))
    if cuts and len(starts) != stages:
        raise UserError(f"--cuts: {stages} stages need {stages - 1} cut(s), {len(cuts)} were given")
    by_time = balance == "auto" and not cuts
    costs = broadcast_object(lambda: measure(model, images, amp, repeats=5 if by_time else 1))
    if not cuts:
        starts = balanced([sum(cost.seconds) if by_time else 1.0 for cost in costs], stages)
    return Partition(costs, tuple(starts))


def predicted_bubble(partition: Partition, schedule: str, count: int, pp_size: int) -> float:
    """The idle share of all processes, from the measured times."""
    seconds = [stage.seconds for stage in partition.stages]
    span = simulate(schedule, seconds, count, pp_size)
    return 1 - count * sum(map(sum, seconds)) / (pp_size * span)


def describe(partition: Partition, schedule: str, pp_size: int, sizes: Sequence[int]) -> list[str]:
    """The partition as lines to print.

    Args:
        partition: what to describe.
        schedule: its name.
        pp_size: processes of a pipeline, P.
        sizes: samples of each micro-batch.
    """
    stages, count = partition.stages, len(sizes)
    lines = [f"plan: {len(stages)} stage(s) on {pp_size} process(es) per replica, {schedule}"]
    for number, stage in enumerate(stages):
        lines.append(
            f"  stage {number}: {stage.first} .. {stage.last}, {stage.parameters:,} parameters, "
            f"{stage.kept / MIB:.1f} MiB of activations per micro-batch of {sizes[0]}, "
            f"{1e3 * stage.seconds.forward:.1f} + {1e3 * stage.seconds.of('B'):.1f} ms"
        )
    if schedule in BY_HAND and (pp_size > 1 or len(stages) == 1):
        factor = str(bubble_factor(schedule, pp_size)).strip("1")
        lines.append(
            f"  predicted bubble: {ideal_bubble(schedule, count, pp_size):.1%} by "
            f"(P-1)/({factor}M+P-1) with P = {pp_size}, M = {count}, "
            f"{predicted_bubble(partition, schedule, count, pp_size):.1%} with these stages"
        )
    return lines
