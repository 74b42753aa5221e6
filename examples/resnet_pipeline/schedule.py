"""Pipeline schedules over point-to-point messages, by hand: GPipe, 1F1B and interleaved 1F1B.

A process runs a list of operations: F3 is the forward of micro-batch 3, B3 its backward. The list depends only on the
process's place and on the number of micro-batches, so nobody has to tell anybody what comes next.

    GPipe (https://arxiv.org/abs/1811.06965), 3 stages, 4 micro-batches: all activations are kept until the middle

        stage 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    1F1B (https://arxiv.org/abs/1806.03377, with a flush after each batch): as long, but stage s keeps the activations
    of at most `stages - s` micro-batches

        stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Interleaved (https://arxiv.org/abs/2104.04473, section 2.2): two stages of half the size on each process, stages p
    and P + p on process p, so that the next process gets its first work sooner: half the bubble, twice the messages.
    2 processes, 4 micro-batches; f and b are those of a process's second stage

        process 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
        process 1   .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
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
    """One operation: forward or backward of one micro-batch in one stage."""

    kind: Literal["F", "B"]
    micro: int
    stage: int


def gpipe(process: int, processes: int, count: int) -> list[Op]:
    """All forwards, then all backwards."""
    return [Op(kind, i, process) for kind in ("F", "B") for i in range(count)]


def one_forward_one_backward(process: int, processes: int, count: int) -> list[Op]:
    """As many forwards as there are stages behind this one, then forward and backward in turn, then the backwards."""
    forwards, backwards = ([Op(kind, i, process) for i in range(count)] for kind in ("F", "B"))
    return in_turn(forwards, backwards, processes - process - 1)


def interleaved(process: int, processes: int, count: int) -> list[Op]:
    """1F1B with two stages per process, which take turns after each round of (at least) P micro-batches."""
    rounds = max(1, count // processes)
    ends = [0, *((number + 1) * count // rounds for number in range(rounds))]
    both = (process, processes + process) if processes > 1 else (process,)
    forwards, backwards = (
        [Op(kind, i, stage) for a, b in pairwise(ends) for stage in order for i in range(a, b)]
        for kind, order in (("F", both), ("B", both[::-1]))
    )
    longest = max(b - a for a, b in pairwise(ends))  # the first stage's, before the second has its first input
    return in_turn(forwards, backwards, (len(both) - 1) * longest + 2 * (processes - process - 1))


def in_turn(forwards: list[Op], backwards: list[Op], warm_up: int) -> list[Op]:
    """Some forwards, then forward and backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return [*forwards[:warm_up], *chain.from_iterable(pairs), *backwards[len(forwards) - warm_up :]]


SCHEDULES: dict[str, Callable[[int, int, int], list[Op]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


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
    """One process of a pipeline.

    Args:
        stages: this process's parts of the model, by their index.
        grid: this process's place.
        plan: says what a stage receives.
        criterion: sums the loss of logits [B, classes] and labels [B] over the samples.
        schedule: name of the schedule.
        timeline: records what is computed when.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        grid: Grid,
        plan: "Plan",
        criterion: Callable[[Tensor, Tensor], Tensor],
        schedule: str,
        timeline: Timeline,
    ) -> None:
        self.stages, self.grid, self.plan, self.criterion, self.timeline = stages, grid, plan, criterion, timeline
        self.ops = SCHEDULES[schedule]
        self.final = len(plan.stages) - 1  # computes the loss
        self.most_kept = 0  # micro-batches whose activations were kept at the same time, in whichever stage

    def step(self, images: Tensor, labels: Tensor, sizes: Sequence[int], total: int) -> Tensor:
        """Forward and backward of one batch; gradients are added to those of the parameters.

        Args:
            images: [B, 3, H, W] for the first stage; other processes do not read them.
            labels: [B] for the last stage; other processes do not read them.
            sizes: samples of each micro-batch; they add up to B and need not be equal.
            total: what the summed loss is divided by: the samples of the global batch.

        Returns:
            The loss of the batch on the process with the last stage, 0 on the others.

        Raises:
            Lost: a neighbouring process ended, or was silent for longer than the timeout.
        """
        self.sizes, self.total, self.loss = sizes, total, torch.zeros((), device=self.grid.device)
        self.images = images.split(list(sizes)) if 0 in self.stages else ()
        self.labels = labels.split(list(sizes)) if self.final in self.stages else ()
        self.arriving: dict[Op, Message] = {}
        self.leaving: dict[Op, Message] = {}
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # a stage's input and output, per micro-batch
        ops = self.ops(self.grid.stage, self.grid.stages, len(sizes))
        with self.stages[ops[0].stage].numerics.autocast():  # weights are cast once, not for each micro-batch
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
        x = self.received(op).requires_grad_() if op.stage else self.images[op.micro]
        with self.timeline.record(op.kind, op.micro, op.stage):
            y = self.stages[op.stage](x)
            if op.stage == self.final:
                y = self.criterion(y.float(), self.labels[op.micro]) / self.total
                self.loss += y.detach()
        self.kept[op.stage, op.micro] = x, y
        self.most_kept = max(self.most_kept, len(self.kept))
        if op.stage < self.final:
            self.send(op, y.detach())

    def backward(self, op: Op) -> None:
        """Compute the gradients of a micro-batch, and send that of the stage's input back."""
        gradient = self.received(op) if op.stage < self.final else None
        x, y = self.kept.pop((op.stage, op.micro))
        with self.timeline.record(op.kind, op.micro, op.stage), torch.autocast(y.device.type, enabled=False):
            y.backward(gradient)
        if op.stage:
            assert x.grad is not None
            self.send(op, x.grad)
        self.sent(op._replace(kind="F"))  # has arrived long ago: its gradient came back
        self.sent(op._replace(micro=op.micro - 2))  # bounds the memory of gradients on their way

    def expect(self, op: Op) -> None:
        """Begin to receive what an operation needs from another stage: activations [B, C, H, W], or their gradient."""
        key = op.stage, op.micro
        edge = op.stage == 0 if op.kind == "F" else op.stage == self.final or key not in self.kept  # forward first
        if edge or op in self.arriving:
            return
        if op.kind == "F":
            shape, dtype = self.plan.input(op.stage)
            shape = (self.sizes[op.micro], *shape)
        else:
            shape, dtype = self.kept[key][1].shape, self.kept[key][1].dtype
        rank, group = self.grid.sender(op.kind, op.stage)
        self.arriving[op] = receive(shape, dtype, self.stages[op.stage], rank, group, self.tag(op.micro, op.stage))

    def received(self, op: Op) -> Tensor:
        """Wait for what an operation needs from another stage."""
        self.expect(op)
        message = self.arriving.pop(op)
        with self.grid.watching(self.grid.sender(op.kind, op.stage)[0], f"waits for the input of {op.kind}{op.micro}"):
            message.work.wait()
        return message.tensor

    def send(self, op: Op, tensor: Tensor) -> None:
        """Begin to send the result of an operation to the stage that needs it."""
        rank, group = self.grid.receiver(op.kind, op.stage)
        tag = self.tag(op.micro, op.stage + (1 if op.kind == "F" else -1))
        self.leaving[op] = send(tensor, self.stages[op.stage], rank, group, tag)

    def tag(self, micro: int, stage: int) -> int:
        """Tells apart what a process sends to the stages of another."""
        return micro * (self.final + 1) + stage

    def sent(self, op: Op) -> None:
        """Wait until the result of an operation has been sent, and let go of it."""
        if op in self.leaving:
            rank, _ = self.grid.receiver(op.kind, op.stage)
            with self.grid.watching(rank, f"sends the result of {op.kind}{op.micro}"):
                self.leaving.pop(op).work.wait()
