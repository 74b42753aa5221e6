"""From flags to the stages of one process: measured, planned, built as the un-split model is, and cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.data import ImageData
from common.distributed import World, say
from common.errors import UserError
from common.precision import Numerics
from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.model import IGNORED, Stage, blocks, build
from examples.resnet_pipeline.options import Cut
from examples.resnet_pipeline.plan import Plan, make_plan
from examples.resnet_pipeline.schedule import Pipeline
from examples.resnet_pipeline.timeline import Timeline


@dataclass(frozen=True)
class Parts:
    """What a process holds of the model.

    Attributes:
        plan: the cut.
        owners: the process of the pipeline that holds each stage.
        stages: this process's stages, by their index.
        unsplit: the un-split model without memory (on the meta device).
    """

    plan: Plan
    owners: list[int]
    stages: dict[int, Stage]
    unsplit: nn.Module

    @property
    def first(self) -> bool:
        """Whether the images enter here."""
        return 0 in self.stages

    @property
    def last(self) -> bool:
        """Whether the loss is computed here."""
        return len(self.owners) - 1 in self.stages


def make_parts(
    cut: Cut, seed: int, images: Tensor, data: ImageData, numerics: Numerics, world: World, grid: Grid
) -> Parts:
    """Plan the cut and build this process's stages.

    Every process draws the parameters of the whole model and keeps its own, so the model is the same wherever it is
    cut. (That needs the memory of one whole model on the host for a moment.)

    Args:
        cut: what to build, and where to cut.
        seed: of the parameters.
        images: a batch of one replica to measure with, [B, 3, H, W], on the device.
        data: what is trained on.
        numerics: device and precision.
        world: this process's world.
        grid: this process's place.

    Raises:
        UserError: flags that do not fit the model.
    """
    owners = list(range(grid.stages))
    if cut.schedule in ("interleaved", "zero-bubble") and (grid.stages > 1 or cut.engine == "torch"):
        owners += owners  # 0 1 2 0 1 2
    elif cut.schedule == "zbv":
        owners += reversed(owners)  # 0 1 2 2 1 0
    count, last = (
        cut.micro_batches,
        -(-(len(data.train) % (len(images) * grid.replicas)) // grid.replicas) or len(images),
    )
    smallest = min(*micro_batch_sizes(len(images), count), *micro_batch_sizes(last, count))
    if cut.norm == "batch" and smallest == 1 and images.shape[2] <= 32:  # then the last activations are of 1x1
        raise UserError(
            f"--micro-batches {count}: BatchNorm cannot normalise over one value, and there is a micro-batch of one "
            f"sample; use fewer micro-batches, another --batch-size, or --norm group"
        )
    if cut.norm == "frozen" and cut.weights is None:
        say(world, "warning: --norm frozen without --weights: there are no statistics yet, nothing is normalised")
    sample = numerics.prepare(build(cut.arch, data.classes, cut.norm))
    plan = make_plan(
        sample, images[: micro_batch_sizes(len(images), count)[0]], numerics, world, len(owners), cut.balance, cut.cuts
    )
    del sample
    torch.manual_seed(seed)  # the same on all processes
    model = build(cut.arch, data.classes, cut.norm)
    if cut.weights is not None:
        _load(model, cut.weights)
    separable = blocks(model)
    stages = {
        index: numerics.prepare(Stage(separable[part.start : part.stop], numerics, cut.recompute)).train()
        for index, part in enumerate(plan.ranges)
        if owners[index] == grid.stage
    }
    with torch.device("meta"):
        unsplit = build(cut.arch, data.classes, cut.norm)
    return Parts(plan, owners, stages, unsplit)


def make_pipeline(cut: Cut, parts: Parts, grid: Grid, images: Sequence[int], timeline: Timeline) -> Any:
    """The engine that `--engine` names.

    Args:
        cut: the flags.
        parts: this process's stages.
        grid: this process's place.
        images: shape of the local batch, [B, 3, H, W].
        timeline: records what is computed when.
    """
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=IGNORED)
    if cut.engine == "hand":
        return Pipeline(parts.stages, grid, parts.plan, criterion, cut.schedule, timeline)
    from examples.resnet_pipeline.engine import TorchPipeline  # half a second

    count = len(micro_batch_sizes(images[0], cut.micro_batches))
    return TorchPipeline(parts.stages, grid, parts.plan, images, count, criterion, cut.schedule, timeline)


def _load(model: nn.Module, path: Path) -> None:
    """Set weights from a safetensors file; BatchNorm's count of batches may be missing or too much."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--weights {path} cannot be read ({error}): give a safetensors file") from None
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = [name for name in own.keys() ^ found.keys() if not name.endswith("num_batches_tracked")]
    wrong += [name for name in own.keys() & found.keys() if own[name] != found[name].shape]
    if wrong:
        raise UserError(f"--weights {path} does not fit the model, for example {min(wrong)}: check --arch and --norm")
    model.load_state_dict({name: tensor for name, tensor in found.items() if name in own}, strict=False)


def micro_batch_sizes(samples: int, count: int) -> list[int]:
    """Cut a batch into micro-batches whose sizes differ by one at most: 10 in 4 are 3, 3, 2, 2."""
    return [len(range(part, samples, count)) for part in range(min(count, samples))]
