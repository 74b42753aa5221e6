"""Pipeline schedules over point-to-point messages, by hand: GPipe and 1F1B.

A stage runs a list of operations: F3 is the forward of micro-batch 3, B3 its backward. The list depends only on the
stage's place and on the number of micro-batches, so nobody has to tell anybody what comes next.

    GPipe (https://arxiv.org/abs/1811.06965), 3 stages, 4 micro-batches: all activations are kept until the middle

        stage 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    1F1B (https://arxiv.org/abs/1806.03377, with a flush after each batch): as long, but stage s keeps the activations
    of at most `stages - s` micro-batches

        stage 0   F0 F1 F2 .  .  B0 F3 .  B1 .  B2 B3
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.model import Stage
from examples.resnet_pipeline.timeline import Timeline

if TYPE_CHECKING:
    from examples.resnet_pipeline.plan import Plan

AHEAD = 3  # operations whose messages are expected before their turn, so that they travel during the computation


class Op(NamedTuple):
    """One operation of a stage: forward or backward of one micro-batch."""

    kind: Literal["F", "B"]
    micro: int


def gpipe(stage: int, stages: int, count: int) -> list[Op]:
    """All forwards, then all backwards."""
    return [Op("F", i) for i in range(count)] + [Op("B", i) for i in range(count)]


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[Op]:
    """As many forwards as there are stages behind this one, then forward and backward in turn, then the backwards."""
    warm_up = min(stages - stage - 1, count)
    ops = [Op("F", i) for i in range(warm_up)]
    for i in range(count - warm_up):
        ops += [Op("F", warm_up + i), Op("B", i)]
    return ops + [Op("B", i) for i in range(count - warm_up, count)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Op]]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


class Message(NamedTuple):
    """A tensor on its way; it must stay as it is until `work` is done."""

    tensor: Tensor
    work: dist.Work


def send(tensor: Tensor, stage: Stage, rank: int, group: dist.ProcessGroup, tag: int) -> Message:
    """Begin to send a tensor that `stage` has computed to a global rank."""
    tensor = in_order(tensor, stage)
    work = dist.isend(tensor, rank, group, tag)
    assert work is not None
    return Message(tensor, work)


def receive(
    shape: Sequence[int], dtype: torch.dtype, stage: Stage, rank: int, group: dist.ProcessGroup, tag: int
) -> Message:
    """Begin to receive a tensor that `stage` needs from a global rank."""
    layout = torch.channels_last if stage.numerics.channels_last else torch.contiguous_format
    tensor = torch.empty(tuple(shape), dtype=dtype, device=stage.numerics.device, memory_format=layout)
    work = dist.irecv(in_order(tensor, stage), rank, group, tag)
    assert work is not None
    return Message(tensor, work)


def in_order(tensor: Tensor, stage: Stage) -> Tensor:
    """The tensor with its dimensions in the order of its memory, as messages need it; no copy where it has one."""
    return (tensor.permute(0, 2, 3, 1) if stage.numerics.channels_last else tensor).contiguous()


class Pipeline:
    """One stage of a pipeline over processes.

    Args:
        stage: this process's part of the model.
        grid: this process's place among the stages.
        plan: says what the stage receives.
        criterion: sums the loss of logits [B, classes] and labels [B] over the samples.
        schedule: name of the schedule.
        timeline: records what is computed when.
    """

    def __init__(
        self,
        stage: Stage,
        grid: Grid,
        plan: "Plan",
        criterion: Callable[[Tensor, Tensor], Tensor],
        schedule: str,
        timeline: Timeline,
    ) -> None:
        self.stage, self.grid, self.criterion, self.timeline = stage, grid, criterion, timeline
        self.shape, self.dtype = plan.input(grid.stage)
        self.ops = SCHEDULES[schedule]
        self.first, self.last = grid.stage == 0, grid.stage == grid.stages - 1
        self.most_kept = 0  # micro-batches whose activations were kept at the same time

    def step(self, images: Tensor, labels: Tensor, sizes: Sequence[int], total: int) -> Tensor:
        """Forward and backward of one batch; gradients are added to those of the parameters.

        Args:
            images: [B, 3, H, W] on the first stage; other stages do not read them.
            labels: [B] on the last stage; other stages do not read them.
            sizes: samples of each micro-batch; they add up to B and need not be equal.
            total: what the summed loss is divided by: the samples of the global batch.

        Returns:
            The loss of the batch on the last stage, 0 on the others.

        Raises:
            Lost: a neighbouring stage ended, or was silent for longer than the timeout.
        """
        self.sizes, self.total, self.loss = sizes, total, torch.zeros((), device=self.grid.device)
        self.images = images.split(list(sizes)) if self.first else ()
        self.labels = labels.split(list(sizes)) if self.last else ()
        self.arriving: dict[Op, Message] = {}
        self.leaving: dict[Op, Message] = {}
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of the stage, per micro-batch
        ops = self.ops(self.grid.stage, self.grid.stages, len(sizes))
        for position, op in enumerate(ops):
            for coming in ops[position : position + AHEAD]:
                self.expect(coming)
            if op.kind == "F":
                self.forward(op)
            else:
                self.backward(op)
        for op in list(self.leaving):
            self.sent(op)
        return self.loss

    def forward(self, op: Op) -> None:
        """Compute the activations of a micro-batch and send them on."""
        x = self.images[op.micro] if self.first else self.received(op).requires_grad_()
        with self.timeline.record(op.kind, op.micro, self.grid.stage):
            y = self.stage(x)
            if self.last:
                y = self.criterion(y.float(), self.labels[op.micro]) / self.total
                self.loss += y.detach()
        self.kept[op.micro] = x, y
        self.most_kept = max(self.most_kept, len(self.kept))
        if not self.last:
            self.send(op, y.detach())

    def backward(self, op: Op) -> None:
        """Compute the gradients of a micro-batch, and send that of the stage's input back."""
        gradient = None if self.last else self.received(op)
        x, y = self.kept.pop(op.micro)
        with self.timeline.record(op.kind, op.micro, self.grid.stage):
            y.backward(gradient)
        if not self.first:
            assert x.grad is not None
            self.send(op, x.grad)
        self.sent(Op("F", op.micro))  # has arrived long ago: its gradient came back
        self.sent(Op("B", op.micro - 2))  # bounds the memory of gradients on their way

    def expect(self, op: Op) -> None:
        """Begin to receive what an operation needs from another stage: activations [B, C, H, W], or their gradient."""
        edge = self.first if op.kind == "F" else self.last or op.micro not in self.kept  # no gradient before a forward
        if edge or op in self.arriving:
            return
        if op.kind == "F":
            shape, dtype = (self.sizes[op.micro], *self.shape), self.dtype
        else:
            shape, dtype = self.kept[op.micro][1].shape, self.kept[op.micro][1].dtype
        self.arriving[op] = receive(shape, dtype, self.stage, *self.grid.sender(op.kind), op.micro)

    def received(self, op: Op) -> Tensor:
        """Wait for what an operation needs from another stage."""
        self.expect(op)
        message = self.arriving.pop(op)
        with self.grid.watching(self.grid.sender(op.kind)[0], f"waits for the input of {op.kind}{op.micro}"):
            message.work.wait()
        return message.tensor

    def send(self, op: Op, tensor: Tensor) -> None:
        """Begin to send the result of an operation to the stage that needs it."""
        self.leaving[op] = send(tensor, self.stage, *self.grid.receiver(op.kind), op.micro)

    def sent(self, op: Op) -> None:
        """Wait until the result of an operation has been sent, and let go of it."""
        if op in self.leaving:
            with self.grid.watching(self.grid.receiver(op.kind)[0], f"sends the result of {op.kind}{op.micro}"):
                self.leaving.pop(op).work.wait()
