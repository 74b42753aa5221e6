"""The simplest way to average gradients over the ranks, which the other files improve on."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.train.ddp import warm_up_buckets


class Averaging(ABC):
    """A model to train, and what makes its gradients the means over the ranks.

    Every rank constructs it with the same model, calls `zero_grad()` (which sets gradients to None)
    before each backward of `model`, and `average()` after it.

    Args:
        model: the same on all ranks.

    Attributes:
        model: what to call in the training step.
        parameters: those to train, about in the order in which backward computes their gradients.
        bytes_sent: what this rank has sent by the algorithms that are written by hand.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.world_size = model, dist.get_world_size()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parameters = trained[::-1]
        self.bytes_sent = 0

    @abstractmethod
    def average(self) -> None:
        """Make the gradient of each parameter the mean over the ranks. Every rank calls this."""

    def after_step(self) -> None:  # noqa: B027 - of use to local.py only
        """Called by every rank after each step of the optimizer."""

    def end_epoch(self) -> None:  # noqa: B027
        """Called by every rank before the model is evaluated."""

    def gather_state(self) -> None:  # noqa: B027
        """Called by every rank before a checkpoint is written, which rank 0 does."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on with what a checkpoint holds. Every rank calls this."""


class PerParameter(Averaging):
    """Sum over the ranks and divide, one parameter after the other.

    Each call costs its latency, and nothing is sent while backward computes.
    """

    def average(self) -> None:
        """One all-reduce for each parameter. Every rank calls this."""
        for parameter in self.parameters:
            if parameter.grad is None:  # not used in this forward, but maybe on another rank
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            parameter.grad /= self.world_size


class Ddp(Averaging):
    """Torch's DistributedDataParallel, which the others are compared with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        device = self.parameters[0].device
        devices = [device] if device.type == "cuda" else None
        ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        warm_up_buckets(ddp)  # a resumed run then adds gradients in the same order
        self.model = ddp

    def average(self) -> None:
        """Nothing to do: DDP has averaged during backward."""
