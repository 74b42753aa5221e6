"""Runs a schedule by hand: one process of a pipeline, over point-to-point messages.

Messages travel during the computation: each is expected a few operations before its turn, and sent
without waiting for its arrival. Between two stages of one process nothing is sent.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.messages import Message, receive, send
from examples.resnet_pipeline.model import Stage
from examples.resnet_pipeline.operations import operations
from examples.resnet_pipeline.partition import Partition
from examples.resnet_pipeline.schedule import Op
from examples.resnet_pipeline.split_backward import (
    Call,
    Half,
    backward_of_inputs,
    backward_of_weights,
    recorded,
)
from examples.resnet_pipeline.timeline import Timeline

AHEAD = 3  # operations whose messages are expected before their turn


class Pipeline:
    """One process of a pipeline.

    Args:
        stages: this process's stages of the model, by their index.
        grid: this process's place.
        partition: says what a stage receives, and how long each takes.
        owners: the process of the pipeline that holds each stage.
        criterion: sums the loss of logits [B, classes] and labels [B] over the samples.
        schedule: name of the schedule.
        timeline: records what is computed when.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        grid: Grid,
        partition: Partition,
        owners: Sequence[int],
        criterion: Callable[[Tensor, Tensor], Tensor],
        schedule: str,
        timeline: Timeline,
    ) -> None:
        self.stages, self.grid, self.partition = stages, grid, partition
        self.owners, self.criterion, self.timeline = owners, criterion, timeline
        self.schedule = schedule
        self.seconds = tuple(stage.seconds for stage in partition.stages)
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
        self.here: dict[Op, Tensor] = {}  # what needs no message
        # By stage and micro-batch: its input, its output and the layers between; then what the
        # second half of a split backward pass needs.
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor, list[Call]]] = {}
        self.halves: dict[tuple[int, int], list[Half]] = {}
        everywhere = operations(self.schedule, self.grid.pp_size, len(sizes), self.seconds)
        ops = everywhere[self.grid.pp_rank]
        self.split = any(op.kind == "W" for op in ops)
        # One autocast for the step: weights are cast once, not for each micro-batch.
        with self.stages[ops[0].stage].amp.autocast():
            for position, op in enumerate(ops):
                for coming in ops[position : position + AHEAD]:
                    self.expect(coming)
                if op.kind == "F":
                    self.forward(op)
                elif op.kind == "W":
                    self.backward_weights(op)
                else:
                    self.backward(op)
        for op in list(self.leaving):
            self.finish_sending(op)
        return self.loss

    def forward(self, op: Op) -> None:
        """Compute the activations of a micro-batch and send them on."""
        x = self.received(op).requires_grad_() if op.stage else self.images[op.micro]
        stage = self.stages[op.stage]
        noting = recorded(stage) if self.split else contextlib.nullcontext([])
        with self.timeline.record(op.kind, op.micro, op.stage), noting as calls:
            y = stage(x)
            if op.stage == self.final:
                y = self.criterion(y.float(), self.labels[op.micro]) / self.samples
                self.loss += y.detach()
        self.kept[op.stage, op.micro] = x, y, calls
        self.most_kept = max(self.most_kept, len(self.kept) + len(self.halves))
        if op.stage < self.final:
            self.send(op, y.detach())

    def backward(self, op: Op) -> None:
        """Compute the gradients of a micro-batch, and send that of the stage's input back.

        In a split backward pass (I), those of the weights wait for `backward_weights`.
        """
        gradient = self.received(op) if op.stage < self.final else None
        key = op.stage, op.micro
        x, y, calls = self.kept.pop(key)
        with self.timeline.record(op.kind, op.micro, op.stage), self.autocast_off():
            if op.kind == "B":
                y.backward(gradient)
            else:
                self.halves[key] = backward_of_inputs(self.stages[op.stage], calls, x, y, gradient)
        if op.stage:
            assert x.grad is not None
            self.send(op, x.grad)
        # These activations have arrived long ago: their gradient has come back.
        self.finish_sending(op._replace(kind="F"))
        # This bounds the memory of gradients on their way.
        self.finish_sending(op._replace(micro=op.micro - 2))

    def backward_weights(self, op: Op) -> None:
        """Compute the gradients that `backward` has left for later."""
        halves = self.halves.pop((op.stage, op.micro))
        with self.timeline.record(op.kind, op.micro, op.stage), self.autocast_off():
            backward_of_weights(halves)

    def autocast_off(self) -> torch.autocast:
        """Backward passes compute in the types of their forward pass."""
        return torch.autocast(self.grid.device.type, enabled=False)

    def expect(self, op: Op) -> None:
        """Begin to receive what an operation needs from another stage.

        For a forward these are activations [B, C, H, W], for a backward their gradient.
        """
        key = op.stage, op.micro
        at_the_edge = op.kind == "W" or not 0 <= op.source <= self.final
        shape_unknown = op.kind != "F" and key not in self.kept  # its forward comes first
        if at_the_edge or op.source in self.stages or shape_unknown or op in self.arriving:
            return
        if op.kind == "F":
            shape, dtype = self.partition.input(op.stage)
            shape = (self.sizes[op.micro], *shape)
        else:
            output = self.kept[key][1]
            shape, dtype = output.shape, output.dtype
        rank, group = self.link(op, op.source)
        tag = self.tag(op.micro, op.stage)
        self.arriving[op] = receive(shape, dtype, self.stages[op.stage], rank, group, tag)

    def received(self, op: Op) -> Tensor:
        """Wait for what an operation needs from another stage."""
        if op in self.here:
            return self.here.pop(op)
        self.expect(op)
        message = self.arriving.pop(op)
        rank, _ = self.link(op, op.source)
        with self.grid.watching(rank, f"waits for the input of {op.kind}{op.micro}"):
            message.work.wait()
        return message.tensor.to(self.grid.device)

    def send(self, op: Op, tensor: Tensor) -> None:
        """Begin to send the result of an operation to the stage that needs it."""
        if op.target in self.stages:
            self.here[op._replace(stage=op.target)] = tensor
            return
        rank, group = self.link(op, op.target)
        tag = self.tag(op.micro, op.target)
        self.leaving[op] = send(tensor, self.stages[op.stage], rank, group, tag)

    def link(self, op: Op, other: int) -> tuple[int, dist.ProcessGroup]:
        """The process of another stage as a global rank, and the group for messages to or from it.

        Args:
            op: what sends or receives.
            other: the stage before its own, or the one after it.
        """
        first, second = (self.owners[stage] for stage in sorted((op.stage, other)))
        return self.grid.link("F" if op.kind == "F" else "B", first, second)

    def tag(self, micro: int, stage: int) -> int:
        """Tells apart what a process sends to the stages of another."""
        return micro * (self.final + 1) + stage

    def finish_sending(self, op: Op) -> None:
        """Wait until the result of an operation has been sent, and release it."""
        if op in self.leaving:
            rank, _ = self.link(op, op.target)
            with self.grid.watching(rank, f"sends the result of {op.kind}{op.micro}"):
                self.leaving.pop(op).work.wait()
