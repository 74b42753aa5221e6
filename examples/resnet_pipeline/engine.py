"""The same stages by torch.distributed.pipelining: GPipe, 1F1B, interleaved, zero-bubble.

Its schedules need micro-batches of one size, so the batch is filled up with samples whose label is
ignored. That changes nothing, except that BatchNorm normalises over them, too: with it, choose a
number of micro-batches that divides the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from common.launch.errors import UserError
from common.launch.messages import message_device
from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.model import PADDING, Stage
from examples.resnet_pipeline.partition import Partition
from examples.resnet_pipeline.timeline import Timeline

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    # With two stages per process: https://arxiv.org/abs/2104.04473
    "interleaved": ScheduleInterleaved1F1B,
    # https://arxiv.org/abs/2401.10241
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    # https://github.com/deepseek-ai/DualPipe
    "dualpipev": ScheduleDualPipeV,
}


class TimedStage(PipelineStage):
    """torch's stage, which records when it computes.

    torch has no public hook for that: the three methods are those that its schedules call.

    Args:
        timeline: records what is computed when.
        module: the stage.
        args: as those of `PipelineStage`.
        named: as those of `PipelineStage`.
    """

    def __init__(self, timeline: Timeline, module: nn.Module, *args: Any, **named: Any) -> None:
        self.timeline = timeline
        super().__init__(module, *args, **named)

    def forward_one_chunk(self, micro: int, *args: Any, **named: Any) -> Any:
        """Compute the activations of a micro-batch."""
        with self.timeline.record("F", micro, self.stage_index):
            return super().forward_one_chunk(micro, *args, **named)

    def backward_one_chunk(self, micro: int, *args: Any, **named: Any) -> Any:
        """Compute all gradients of a micro-batch, or only that of the stage's input."""
        kind = "I" if named.get("full_backward") is False else "B"
        with self.timeline.record(kind, micro, self.stage_index):
            return super().backward_one_chunk(micro, *args, **named)

    def backward_weight_one_chunk(self, micro: int, *args: Any, **named: Any) -> Any:
        """Compute the gradients of the parameters for a micro-batch."""
        with self.timeline.record("W", micro, self.stage_index):
            return super().backward_weight_one_chunk(micro, *args, **named)

    def _get_init_p2p_neighbors_ops(self) -> Any:
        # Only torch 2.11 calls this, to greet all neighbours at the start. gloo has no connection
        # to those in the same process.
        greetings: Any = getattr(super(), "_get_init_p2p_neighbors_ops")()  # noqa: B009
        return [operation for operation in greetings if operation.peer != dist.get_rank()]


class ContiguousGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient: torch sends no others."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """A view of the tensor."""
        return args[0].view_as(args[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """A copy where one is needed."""
        return grad_outputs[0].contiguous()


class ChannelsLast(nn.Module):
    """A stage that exchanges activations as [B, H, W, C], which is the order of their memory."""

    def __init__(self, stage: Stage, first: bool, last: bool) -> None:
        super().__init__()
        self.stage, self.first, self.last = stage, first, last

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the stage does."""
        y = self.stage(x if self.first else ContiguousGradient.apply(x).permute(0, 3, 1, 2))
        # A copy: torch detaches the output in place, which a view forbids.
        return y if self.last else y.permute(0, 2, 3, 1).clone()


class TorchPipeline:
    """The stages of one process, run by torch.

    Args:
        stages: the stages of this process, by their index.
        grid: this process's place.
        partition: says what the stages exchange.
        images: shape of the local batch, (B, 3, H, W).
        count: micro-batches.
        criterion: sums the loss of logits [B, classes] and labels [B] over the samples.
        schedule: name of the schedule.
        timeline: records what is computed when.

    Raises:
        UserError: torch's schedule does not take this number of micro-batches; or CUDA devices
            under gloo, which has no point-to-point messages for them.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        grid: Grid,
        partition: Partition,
        images: Sequence[int],
        count: int,
        criterion: Callable[[Tensor, Tensor], Tensor],
        schedule: str,
        timeline: Timeline,
    ) -> None:
        if message_device(grid.device) != grid.device:
            raise UserError(
                "--engine torch sends CUDA tensors from rank to rank, which gloo cannot: use "
                "--engine hand, or a device for each process"
            )
        self.grid, self.timeline = grid, timeline
        self.samples, self.most_kept = 1.0, 0
        micro = -(-images[0] // count)
        self.batch = micro * count
        costs = partition.stages
        self.first, self.last = 0 in stages, len(costs) - 1 in stages
        shapes = [((micro, *images[1:]), torch.float32)]
        shapes += [((micro, *cost.shape), cost.dtype) for cost in costs]
        built = [self._build(stage, index, shapes) for index, stage in stages.items()]

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return criterion(logits.float(), labels) / self.samples

        several = schedule not in ("gpipe", "1f1b")
        try:
            self.schedule = SCHEDULES[schedule](
                built if several else built[0],
                n_microbatches=count,
                loss_fn=loss,
                scale_grads=False,
            )
        except ValueError as error:
            raise UserError(
                f"--engine torch --schedule {schedule} --micro-batches {count}: {error}"
            ) from None

    def _build(
        self, stage: Stage, index: int, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> TimedStage:
        """Tell torch about a stage: what it computes, and examples of its input and output."""
        last = len(shapes) - 2  # the shapes are those between stages, images and logits included
        module: nn.Module = stage
        if stage.amp.channels_last:
            module = ChannelsLast(stage, index == 0, index == last)
            between = [((n, h, w, c), dtype) for (n, c, h, w), dtype in shapes[1:-1]]
            shapes = [shapes[0], *between, shapes[-1]]
        x, y = (
            torch.empty(shape, dtype=dtype, device=self.grid.device)
            for shape, dtype in shapes[index : index + 2]
        )
        if index == 0 and stage.amp.channels_last:  # torch 2.11 compares strides, too
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_(index > 0)
        y.requires_grad_()
        device, group = self.grid.device, self.grid.pipeline
        return TimedStage(self.timeline, module, index, last + 1, device, (x,), (y,), group=group)

    def step(self, images: Tensor, labels: Tensor, sizes: Sequence[int], samples: float) -> Tensor:
        """Forward and backward of one batch, as `Pipeline.step`; micro-batches have one size.

        Every rank of the pipeline calls this.

        Raises:
            RuntimeError: a neighbour died, or was silent for longer than the timeout.
        """
        self.samples = samples
        missing = self.batch - len(labels)
        labels = F.pad(labels, (0, missing), value=PADDING)
        losses: list[Tensor] = []
        inputs = (F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing)),) if self.first else ()
        if self.last:
            self.schedule.step(*inputs, target=labels, losses=losses)
        else:
            self.schedule.step(*inputs)
        if not losses:
            return torch.zeros((), device=self.grid.device)
        return torch.stack([loss.detach() for loss in losses]).sum()
