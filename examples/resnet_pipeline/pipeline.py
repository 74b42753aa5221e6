"""Runs a schedule by hand: one process of a pipeline, over point-to-point messages.

Messages travel during the computation: each is expected a few operations before its turn, and sent
without waiting for its arrival.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.launch.messages import message_device
from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.model import Stage
from examples.resnet_pipeline.partition import Partition
from examples.resnet_pipeline.schedule import SCHEDULES, Op
from examples.resnet_pipeline.timeline import Timeline

AHEAD = 3  # operations whose messages are expected before their turn


class Message(NamedTuple):
    """A tensor on its way, on `message_device`; it must not change until `work` is done."""

    tensor: Tensor
    work: dist.Work


def send(tensor: Tensor, stage: Stage, rank: int, group: dist.ProcessGroup, tag: int) -> Message:
    """Begin to send a tensor that `stage` has computed to a global rank."""
    tensor = in_memory_order(tensor, stage).to(message_device(stage.amp.device))
    work = dist.isend(tensor, rank, group, tag)
    assert work is not None
    return Message(tensor, work)


def receive(
    shape: Sequence[int],
    dtype: torch.dtype,
    stage: Stage,
    rank: int,
    group: dist.ProcessGroup,
    tag: int,
) -> Message:
    """Begin to receive a tensor that `stage` needs from a global rank."""
    layout = torch.channels_last if stage.amp.channels_last else torch.contiguous_format
    device = message_device(stage.amp.device)
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=layout)
    work = dist.irecv(in_memory_order(tensor, stage), rank, group, tag)
    assert work is not None
    return Message(tensor, work)


def in_memory_order(tensor: Tensor, stage: Stage) -> Tensor:
    """The tensor with its dimensions in the order of its memory, as messages need it.

    This copies nothing if the tensor is laid out as the stage's precision says.
    """
    return (tensor.permute(0, 2, 3, 1) if stage.amp.channels_last else tensor).contiguous()


class Pipeline:
    """One process of a pipeline.

    Args:
        stages: this process's stages of the model, by their index.
        grid: this process's place.
        partition: says what a stage receives.
        criterion: sums the loss of logits [B, classes] and labels [B] over the samples.
        schedule: name of the schedule.
        timeline: records what is computed when.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        grid: Grid,
        partition: Partition,
        criterion: Callable[[Tensor, Tensor], Tensor],
        schedule: str,
        timeline: Timeline,
    ) -> None:
        self.stages, self.grid, self.partition = stages, grid, partition
        self.criterion, self.timeline = criterion, timeline
        self.ops = SCHEDULES[schedule]
        self.final = len(partition.stages) - 1  # computes the loss
        self.most_kept = 0  # micro-batches whose activations were kept at the same time

    def step(self, images: Tensor, labels: Tensor, sizes: Sequence[int], samples: float) -> Tensor:
        """Forward and backward of one batch; gradients are added to those of the parameters.

        Every rank of the pipeline calls this.

        Args:
            images: [B, 3, H, W] for the first stage; other processes do not read them.
            labels: [B] for the last stage; other processes do not read them.
            sizes: samples of each micro-batch; they add up to B and need not be equal.
            samples: what the summed loss is divided by.

        Returns:
            The loss on the process with the last stage, 0 on the others.

        Raises:
            Lost: a neighbouring process ended, or was silent for longer than the timeout.
        """
        self.sizes, self.samples = sizes, samples
        self.loss = torch.zeros((), device=self.grid.device)
        self.images = images.split(list(sizes)) if 0 in self.stages else ()
        self.labels = labels.split(list(sizes)) if self.final in self.stages else ()
        self.arriving: dict[Op, Message] = {}
        self.leaving: dict[Op, Message] = {}
        # A stage's input and output, by stage and micro-batch.
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        ops = self.ops(self.grid.pp_rank, self.grid.pp_size, len(sizes))
        # One autocast for the step: weights are cast once, not for each micro-batch.
        with self.stages[ops[0].stage].amp.autocast():
            for position, op in enumerate(ops):
                for coming in ops[position : position + AHEAD]:
                    self.expect(coming)
                if op.kind == "F":
                    self.forward(op)
                else:
                    self.backward(op)
        for op in list(self.leaving):
            self.finish_sending(op)
        return self.loss

    def forward(self, op: Op) -> None:
        """Compute the activations of a micro-batch and send them on."""
        x = self.received(op).requires_grad_() if op.stage else self.images[op.micro]
        with self.timeline.record(op.kind, op.micro, op.stage):
            y = self.stages[op.stage](x)
            if op.stage == self.final:
                y = self.criterion(y.float(), self.labels[op.micro]) / self.samples
                self.loss += y.detach()
        self.kept[op.stage, op.micro] = x, y
        self.most_kept = max(self.most_kept, len(self.kept))
        if op.stage < self.final:
            self.send(op, y.detach())

    def backward(self, op: Op) -> None:
        """Compute the gradients of a micro-batch, and send that of the stage's input back."""
        gradient = self.received(op) if op.stage < self.final else None
        x, y = self.kept.pop((op.stage, op.micro))
        autocast_off = torch.autocast(y.device.type, enabled=False)
        with self.timeline.record(op.kind, op.micro, op.stage), autocast_off:
            y.backward(gradient)
        if op.stage:
            assert x.grad is not None
            self.send(op, x.grad)
        # These activations have arrived long ago: their gradient has come back.
        self.finish_sending(op._replace(kind="F"))
        # This bounds the memory of gradients on their way.
        self.finish_sending(op._replace(micro=op.micro - 2))

    def expect(self, op: Op) -> None:
        """Begin to receive what an operation needs from another stage.

        For a forward these are activations [B, C, H, W], for a backward their gradient.
        """
        key = op.stage, op.micro
        at_the_edge = op.stage == (0 if op.kind == "F" else self.final)
        shape_unknown = op.kind == "B" and key not in self.kept  # its forward comes first
        if at_the_edge or shape_unknown or op in self.arriving:
            return
        if op.kind == "F":
            shape, dtype = self.partition.input(op.stage)
            shape = (self.sizes[op.micro], *shape)
        else:
            output = self.kept[key][1]
            shape, dtype = output.shape, output.dtype
        rank, group = self.grid.sender(op.kind, op.stage)
        tag = self.tag(op.micro, op.stage)
        self.arriving[op] = receive(shape, dtype, self.stages[op.stage], rank, group, tag)

    def received(self, op: Op) -> Tensor:
        """Wait for what an operation needs from another stage."""
        self.expect(op)
        message = self.arriving.pop(op)
        rank, _ = self.grid.sender(op.kind, op.stage)
        with self.grid.watching(rank, f"waits for the input of {op.kind}{op.micro}"):
            message.work.wait()
        return message.tensor.to(self.grid.device)

    def send(self, op: Op, tensor: Tensor) -> None:
        """Begin to send the result of an operation to the stage that needs it."""
        rank, group = self.grid.receiver(op.kind, op.stage)
        tag = self.tag(op.micro, op.stage + (1 if op.kind == "F" else -1))
        self.leaving[op] = send(tensor, self.stages[op.stage], rank, group, tag)

    def tag(self, micro: int, stage: int) -> int:
        """Tells apart what a process sends to the stages of another."""
        return micro * (self.final + 1) + stage

    def finish_sending(self, op: Op) -> None:
        """Wait until the result of an operation has been sent, and release it."""
        if op in self.leaving:
            rank, _ = self.grid.receiver(op.kind, op.stage)
            with self.grid.watching(rank, f"sends the result of {op.kind}{op.micro}"):
                self.leaving.pop(op).work.wait()
