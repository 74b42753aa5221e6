"""Pipeline parallelism: one process per stage, each working on a different micro-batch.

A model is cut into P stages and a batch into M micro-batches. A stage executes a list of actions:
F2 is the forward pass of micro-batch 2 and sends activations to the next stage; B2 is its
backward pass and sends a gradient to the previous stage. Each rank computes its list from
(stage, P, M), without messages. A column is a unit of time, and a dot is idle time. P = 3, M = 4:

    GPipe (https://arxiv.org/abs/1811.06965): all forward passes, then all backward passes

        stage 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    1F1B (https://arxiv.org/abs/1806.03377): each backward pass as soon as its gradient can arrive

        stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Time: in both schedules, a stage works for 2 M columns and waits for 2 (P - 1) columns. The idle
fraction, or bubble, is (P - 1) / (M + P - 1).

Memory: between F2 and B2 a stage keeps the activations of micro-batch 2. GPipe keeps the
activations of all M micro-batches. In 1F1B, stage s keeps at most P - s of them, because it runs
only P - s forward passes before B0. M can therefore grow without increasing the memory use.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Action(NamedTuple):
    """The forward (F) or backward (B) pass of a micro-batch."""

    kind: str
    micro: int


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the actions of a stage: all forward passes, then all backward passes."""
    return [Action(kind, micro) for kind in "FB" for micro in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the actions of a stage: one F per later stage, then alternating F and B."""
    ahead = min(stages - 1 - stage, micro_batches)
    actions = [Action("F", micro) for micro in range(ahead)]
    for micro in range(ahead, micro_batches):
        actions += [Action("F", micro), Action("B", micro - ahead)]
    return actions + [Action("B", micro) for micro in range(micro_batches - ahead, micro_batches)]


def make_mesh(device_type: str, stages: int, timeout: float) -> DeviceMesh:
    """Arrange the ranks as [dp, pp]: rank d * P + s has stage s of replica d. All ranks call this.

    `init_device_mesh(device_type, (D, P), mesh_dim_names=("dp", "pp"))` does the same, but its
    groups time out after 30 minutes instead of `timeout` seconds.
    """
    ranks = torch.arange(dist.get_world_size()).view(-1, stages)
    groups = [new_group(rows, timeout) for rows in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=("dp", "pp"))


def new_group(rows: Tensor, timeout: float) -> dist.ProcessGroup:
    """Create a process group per row of ranks; return this rank's group. All ranks call this."""
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group


class Pipeline(nn.Module):
    """One stage of a pipeline; it communicates with the previous and the next stage.

    `stage` has one input and one output tensor. Micro-batches differ in size by at most one sample.
    `timeout` is the maximum wait for a message, in seconds.
    """

    def __init__(
        self,
        stage: nn.Module,
        mesh: DeviceMesh,
        schedule: Callable[[int, int, int], list[Action]],
        micro_batches: int,
        timeout: float,
    ) -> None:
        super().__init__()
        self.stage, self.micro_batches = stage, micro_batches
        self.index, self.stages = mesh.get_local_rank("pp"), mesh.size(1)
        self.first, self.last = self.index == 0, self.index == self.stages - 1
        self.actions = schedule(self.index, self.stages, micro_batches)
        # Activations and gradients have separate groups, because NCCL executes a group's messages
        # in the order of the calls. In one group, two neighbors that both send first, one an
        # activation and one a gradient, would wait for each other forever.
        self.activations, self.gradients = mesh.get_group("pp"), new_group(mesh.mesh, timeout)
        self.device = next(stage.parameters()).device
        # gloo cannot send CUDA tensors. Without NCCL, messages are copied through host memory.
        nccl = "nccl" in dist.get_backend_config(self.activations)
        self.message_device = self.device if nccl else torch.device("cpu")
        self.announced = False  # True once the shape of the outputs has been sent
        self.announcement: list[Any] = []  # shape and type of the inputs, once received
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # inputs and outputs, kept from F to B
        self.sending: dict[Action, tuple[dist.Work, Tensor]] = {}

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run all forward and backward passes; add the gradients of the mean loss to `.grad`.

        Every rank in the pipeline calls this. The first stage reads the images [B, 3, H, W]. The
        last stage reads the labels [B] and returns the mean loss. Other stages use only the number
        of labels, and return 0.
        """
        self.images = images.tensor_split(self.micro_batches)  # 10 into 4: 3, 3, 2, 2
        self.labels, self.samples = labels.tensor_split(self.micro_batches), len(labels)
        self.loss = torch.zeros((), device=self.device)
        for action in self.actions:
            self.execute(action)
        self.finish_sending(*self.sending)
        return self.loss

    def execute(self, action: Action) -> None:
        """Receive an action's input, execute the action, and start sending its result."""
        kind, micro = action
        if kind == "F":
            x = self.images[micro] if self.first else self.receive(len(self.labels[micro]))
            y = self.compute_forward(micro, x)
            self.kept[micro] = x, y
            if not self.last:
                self.send(action, y.detach())
        else:
            x, y = self.kept.pop(micro)  # this backward pass frees the activations
            self.compute_backward(micro, x, y, None if self.last else self.receive_gradient(y))
            if not self.first:
                assert x.grad is not None
                self.send(action, x.grad)
            # The gradient has arrived, so the next stage has these activations. Waiting until an
            # earlier gradient is sent limits the memory held by pending messages.
            self.finish_sending(Action("F", micro), Action("B", micro - 2))

    def compute_forward(self, micro: int, x: Tensor) -> Tensor:
        """Return a micro-batch's activations, or its contribution to the loss on the last stage."""
        y = self.stage(x)
        if self.last:
            # Divide by the batch size, not by the micro-batch size, so that the micro-batches add
            # up to the mean over the batch, even if they have different sizes.
            y = F.cross_entropy(y.float(), self.labels[micro], reduction="sum") / self.samples
            self.loss += y.detach()
        return y

    def compute_backward(self, micro: int, x: Tensor, y: Tensor, gradient: Tensor | None) -> None:
        """Add a micro-batch's gradients to the parameters' gradients and to `x.grad`."""
        with torch.autocast(self.device.type, enabled=False):  # keeps the forward dtypes
            y.backward(gradient)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, classes] for images [B, 3, H, W] on every stage, for evaluation.

        Every rank in the pipeline calls this. Only the first stage reads the images.
        """
        logits = list[Tensor]()
        for micro, part in enumerate(images.tensor_split(min(self.micro_batches, len(images)))):
            y = self.stage(part if self.first else self.receive(len(part)))
            if self.last:
                logits.append(y)
            else:
                self.send(Action("F", micro), y)
        self.finish_sending(*self.sending)
        shared = [torch.cat(logits).cpu() if self.last else torch.empty(0)]
        dist.broadcast_object_list(shared, group=self.activations, group_src=self.stages - 1)
        return shared[0].to(self.device)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start sending an action's result while the next action computes."""
        forward = action.kind == "F"
        group, stage = (self.activations, 1) if forward else (self.gradients, -1)
        stage += self.index
        message = to_message(tensor).to(self.message_device)
        if forward and not self.announced:
            self.announced = True
            dist.send_object_list([message.shape[1:], message.dtype], group=group, group_dst=stage)
        work = dist.isend(message, group=group, group_dst=stage)
        assert work is not None
        self.sending[action] = work, message  # keeps the memory until the message is sent

    def finish_sending(self, *actions: Action) -> None:
        """Wait until the results of these actions are sent, and release their memory."""
        for action in actions:
            if action in self.sending:
                self.sending.pop(action)[0].wait()

    def receive(self, samples: int) -> Tensor:
        """Receive the activations [samples, ...] from the previous stage."""
        group, stage = self.activations, self.index - 1
        if not self.announcement:  # shape and type depend on the cuts and the precision
            self.announcement = [None, None]
            dist.recv_object_list(self.announcement, group=group, group_src=stage)
        shape, dtype = self.announcement
        message = torch.empty(samples, *shape, dtype=dtype, device=self.message_device)
        dist.recv(message, group=group, group_src=stage)
        # Make the tensor a leaf of the graph, so that its gradient is stored in `.grad`.
        return from_message(message.to(self.device)).requires_grad_(torch.is_grad_enabled())

    def receive_gradient(self, y: Tensor) -> Tensor:
        """Receive the gradient of the activations `y` from the next stage."""
        message = torch.empty_like(to_message(y.detach()), device=self.message_device)
        dist.recv(message, group=self.gradients, group_src=self.index + 1)
        return from_message(message.to(self.device))


def to_message(x: Tensor) -> Tensor:
    """Return channels_last images as a contiguous view; make other tensors contiguous."""
    return (x.permute(0, 2, 3, 1) if x.dim() == 4 else x).contiguous()


def from_message(message: Tensor) -> Tensor:
    """Return the tensor that `to_message` converted to a message."""
    return message.permute(0, 3, 1, 2) if message.dim() == 4 else message
