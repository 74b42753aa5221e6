"""The same through torch.distributed.pipelining: GPipe, 1F1B, interleaved and zero-bubble schedules, for real use.

Its schedules want micro-batches of one size, so the batch is filled up with samples whose label is ignored. That
changes nothing, except where BatchNorm counts them, too: then choose a number of micro-batches that divides the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from common.errors import Lost, UserError
from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.model import IGNORED, Stage
from examples.resnet_pipeline.plan import Plan
from examples.resnet_pipeline.timeline import Timeline

# Several stages per process: interleaved, https://arxiv.org/abs/2104.04473; zero-bubble, https://arxiv.org/abs/2401.10241
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class ContiguousGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient: torch sends no other tensors."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """A tensor as it is."""
        return args[0].view_as(args[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """A copy where it is needed."""
        return grad_outputs[0].contiguous()


class ChannelsLast(nn.Module):
    """A stage that exchanges activations as [B, H, W, C], which is the order of their memory."""

    def __init__(self, stage: Stage, first: bool, last: bool) -> None:
        super().__init__()
        self.stage, self.first, self.last = stage, first, last

    def forward(self, x: Tensor) -> Tensor:
        """As the stage."""
        y = self.stage(x if self.first else ContiguousGradient.apply(x).permute(0, 3, 1, 2))
        return y if self.last else y.permute(0, 2, 3, 1).clone()  # torch detaches it in place, which a view forbids


class TorchPipeline:
    """The stages of one process, run by torch.

    Args:
        stages: the stages of this process, by their index.
        grid: this process's place.
        plan: the cut.
        images: shape of the local batch, (B, 3, H, W).
        count: micro-batches.
        criterion: sums the loss of logits [B, classes] and labels [B] over the samples.
        schedule: name of the schedule.
        timeline: records what is computed when.
    """

    def __init__(
        self, stages: dict[int, Stage], grid: Grid, plan: Plan, images: Sequence[int], count: int,
        criterion: Callable[[Tensor, Tensor], Tensor], schedule: str, timeline: Timeline,
    ) -> None:  # fmt: skip
        self.grid, self.total, self.most_kept = grid, 1, 0
        micro = -(-images[0] // count)
        self.batch = micro * count
        shapes = [((micro, *images[1:]), torch.float32)]
        shapes += [((micro, *part.shape), part.dtype) for part in plan.stages]
        if next(iter(stages.values())).numerics.channels_last:
            shapes[1:-1] = [((n, h, w, c), dtype) for (n, c, h, w), dtype in shapes[1:-1]]
        built = []
        for index, stage in stages.items():
            x, y = (torch.empty(shape, dtype=dtype, device=grid.device) for shape, dtype in shapes[index : index + 2])
            if index == 0 and stage.numerics.channels_last:  # torch 2.11 compares strides, too
                x = x.contiguous(memory_format=torch.channels_last)
            x.requires_grad_(index > 0)
            y.requires_grad_()
            count_all = len(plan.stages)
            module = ChannelsLast(stage, index == 0, index == count_all - 1) if stage.numerics.channels_last else stage
            built.append(PipelineStage(module, index, count_all, grid.device, (x,), (y,), group=grid.pipeline))
            self.watch(built[-1], index, timeline)
        self.first, self.last = 0 in stages, len(plan.stages) - 1 in stages

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return criterion(logits.float(), labels) / self.total

        several = schedule not in ("gpipe", "1f1b")
        try:
            self.schedule = SCHEDULES[schedule](
                built if several else built[0], n_microbatches=count, loss_fn=loss, scale_grads=False
            )
        except ValueError as error:
            raise UserError(f"--engine torch --schedule {schedule} --micro-batches {count}: {error}") from None

    def watch(self, stage: Any, index: int, timeline: Timeline) -> None:
        """Record the computations of a stage; torch has no public hook for that."""
        kinds = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
        for name, kind in kinds.items():
            run = getattr(stage, name)

            def timed(micro: int, *args: Any, run: Any = run, kind: str = kind, **named: Any) -> Any:
                half = "I" if kind == "B" and named.get("full_backward") is False else kind
                with timeline.record(half, micro, index):
                    return run(micro, *args, **named)

            setattr(stage, name, timed)

        # torch 2.11 greets neighbours at the start, those in the same process, too, to which gloo has no connection.
        if greet := getattr(stage, "_get_init_p2p_neighbors_ops", None):
            stage._get_init_p2p_neighbors_ops = lambda: [op for op in greet() if op.peer != dist.get_rank()]

    def step(self, images: Tensor, labels: Tensor, sizes: Sequence[int], total: int) -> Tensor:
        """As `Pipeline.step`; the micro-batches are of one size."""
        self.total = total
        missing = self.batch - len(labels)
        labels = F.pad(labels, (0, missing), value=IGNORED)
        losses: list[Tensor] = []
        try:
            inputs = (F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing)),) if self.first else ()
            if self.last:
                self.schedule.step(*inputs, target=labels, losses=losses)
            else:
                self.schedule.step(*inputs)
        except RuntimeError as error:
            if not any(words in str(error) for words in ("losed by peer", "reset by peer", "imed out")):
                raise
            raise Lost(
                f"a neighbour of stage {self.grid.stage} ended or fell silent: {str(error).splitlines()[0]}"
            ) from None
        return (
            torch.stack([loss.detach() for loss in losses]).sum()
            if losses
            else torch.zeros((), device=self.grid.device)
        )
