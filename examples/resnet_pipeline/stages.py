"""From flags to the stages of one process: measured, cut, and built as the un-split model is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.launch.collectives import print0
from common.launch.errors import UserError
from common.train.amp import MixedPrecision
from common.train.weights import init_model
from examples.resnet_pipeline.args import PipelineArgs
from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.model import PADDING, Stage, blocks, build
from examples.resnet_pipeline.partition import Partition, make_partition
from examples.resnet_pipeline.pipeline import Pipeline
from examples.resnet_pipeline.schedule import micro_batch_sizes, stage_owners
from examples.resnet_pipeline.timeline import Timeline


@dataclass(frozen=True)
class LocalStages:
    """What a process holds of the model.

    Attributes:
        partition: the cut.
        owners: the process of the pipeline that holds each stage.
        stages: this process's stages, by their index.
        full_model: the un-split model without memory (on the meta device).
    """

    partition: Partition
    owners: list[int]
    stages: dict[int, Stage]
    full_model: nn.Module

    @property
    def modules(self) -> list[Stage]:
        """This process's stages."""
        return list(self.stages.values())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this process's stages."""
        return [parameter for stage in self.modules for parameter in stage.parameters()]

    def neighbours(self, stage: int, pp_rank: int) -> tuple[int, int]:
        """The processes of the stages before and after a stage; its own at the model's ends."""
        before = self.owners[stage - 1] if stage > 0 else pp_rank
        after = self.owners[stage + 1] if stage + 1 < len(self.owners) else pp_rank
        return before, after


def build_local_stages(
    args: PipelineArgs,
    seed: int,
    classes: int,
    images: Tensor,
    amp: MixedPrecision,
    grid: Grid,
) -> LocalStages:
    """Decide where to cut and build this process's stages. Every rank calls this.

    Every process draws the parameters of the full model and keeps its own, so the model is the
    same wherever it is cut. (For a moment that needs the host memory of one full model.)

    Args:
        args: what to build, and where to cut.
        seed: of the parameters.
        classes: number of classes.
        images: a batch of one replica to measure with, [B, 3, H, W], on the device.
        amp: device and precision.
        grid: this process's place.

    Raises:
        UserError: flags that do not fit the model.
    """
    owners = stage_owners(args.schedule, grid.pp_size, args.engine)
    if args.norm == "frozen" and args.init is None:
        print0(
            "warning: --norm frozen without --init: there are no statistics yet, "
            "nothing is normalised"
        )
    sample = amp.move(build(args.arch, classes, args.norm))
    micro_batch = images[: micro_batch_sizes(len(images), args.micro_batches)[0]]
    partition = make_partition(sample, micro_batch, amp, len(owners), args.balance, args.cuts)
    del sample
    torch.manual_seed(seed)  # the same on all processes
    model = build(args.arch, classes, args.norm)
    if args.init is not None:
        init_model(args.init, model)
    row = blocks(model)
    stages = {}
    for index, part in enumerate(partition.ranges):
        if owners[index] == grid.pp_rank:
            stage = Stage(row[part.start : part.stop], amp, amp.compile, args.recompute)
            stages[index] = amp.move(stage).train()
    with torch.device("meta"):
        full_model = build(args.arch, classes, args.norm)
    return LocalStages(partition, owners, stages, full_model)


def check_batch_norm(args: PipelineArgs, smallest_batch: int, image_size: int) -> None:
    """Check that BatchNorm has more than one value per channel to normalise over.

    Args:
        args: the flags.
        smallest_batch: the fewest samples that a replica gets in a step.
        image_size: height and width of the images; 32 times as much as of the last activations.

    Raises:
        UserError: a micro-batch holds one sample, and its last activations are 1x1.
    """
    smallest = micro_batch_sizes(smallest_batch, args.micro_batches)[-1]
    if args.norm == "batch" and smallest == 1 and image_size <= 32:
        raise UserError(
            f"--micro-batches {args.micro_batches}: BatchNorm cannot normalise over one value, and "
            f"there is a micro-batch of one sample; use fewer micro-batches, another "
            f"--batch-size, or --norm group"
        )


def make_pipeline(
    args: PipelineArgs, local: LocalStages, grid: Grid, images: Sequence[int], timeline: Timeline
) -> Any:
    """The engine that `--engine` names: a `Pipeline`, or a `TorchPipeline` with the same `step`.

    Args:
        args: the flags.
        local: this process's stages.
        grid: this process's place.
        images: shape of the local batch, (B, 3, H, W).
        timeline: records what is computed when.
    """
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=PADDING)
    stages, partition = local.stages, local.partition
    if args.engine == "hand":
        return Pipeline(stages, grid, partition, local.owners, criterion, args.schedule, timeline)
    # Importing torch.distributed.pipelining takes 0.3 s.
    from examples.resnet_pipeline.engine import TorchPipeline

    count = len(micro_batch_sizes(images[0], args.micro_batches))
    return TorchPipeline(stages, grid, partition, images, count, criterion, args.schedule, timeline)
