"""Gradients side by side in one tensor: few large messages instead of many small ones."""

from abc import abstractmethod
from datetime import timedelta

import torch
from torch import Tensor, nn

from common.launch.errors import UserError
from examples.manual_allreduce_sgd.allreduce import Algorithm, all_reduce
from examples.manual_allreduce_sgd.averaging import Averaging
from examples.manual_allreduce_sgd.shared_memory import SharedMemory


class FlatGradients(Averaging):
    """Copies all gradients into one flat tensor, which `reduce` sums over the ranks.

    Hooks copy each gradient, already divided by the world size, as soon as backward has computed it
    and it is still in the cache. `average` makes each `parameter.grad` a view of the mean: nothing
    is copied back.

    Args:
        model: the same on all ranks.
        wire: the dtype in which gradients are sent and added; bfloat16 halves the bytes, and rounds
            each gradient and each partial sum by up to 2^-8 of its size.
        flat: where the gradients are to live, [n], of dtype `wire`; by default a new tensor.
    """

    def __init__(
        self, model: nn.Module, wire: torch.dtype = torch.float32, flat: Tensor | None = None
    ) -> None:
        super().__init__(model)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        if flat is None:
            device = self.parameters[0].device
            flat = torch.zeros(sum(self.sizes), dtype=wire, device=device)
        self.flat = flat
        self._views = self._shaped(flat)
        self._missing = set(self.parameters)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.collect)

    def _shaped(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Views of `flat` with the shapes and strides (see --channels-last) of the parameters."""
        views = {}
        for parameter, part in zip(self.parameters, flat.split(self.sizes), strict=True):
            offset = part.storage_offset()
            views[parameter] = part.as_strided(parameter.shape, parameter.stride(), offset)
        return views

    def collect(self, parameter: nn.Parameter) -> None:
        """A hook: the gradient of this parameter is complete."""
        assert parameter.grad is not None
        torch.mul(parameter.grad, 1 / self.world_size, out=self._views[parameter])
        parameter.grad = None  # frees its memory for the next one
        self._missing.discard(parameter)

    @abstractmethod
    def reduce(self) -> Tensor:
        """Sum `flat` over the ranks; returns the sum, [n]. Every rank calls this."""

    def average(self) -> None:
        """Make the gradient of each parameter the mean over the ranks. Every rank calls this."""
        for parameter in self._missing:  # not used in this forward, but maybe on another rank
            self._views[parameter].zero_()
        self._missing = set(self.parameters)
        mean = self.reduce().to(torch.float32)  # the tensor itself if it is float32
        views = self._views if mean is self.flat else self._shaped(mean)
        for parameter, view in views.items():
            parameter.grad = view


class Flat(FlatGradients):
    """One all-reduce after backward.

    Args:
        model: the same on all ranks.
        wire: as in `FlatGradients`.
        algorithm: of allreduce.py or fast_ring.py.
    """

    def __init__(self, model: nn.Module, wire: torch.dtype, algorithm: Algorithm) -> None:
        super().__init__(model, wire)
        self._algorithm = algorithm

    def reduce(self) -> Tensor:
        """Sum `flat` over the ranks, in place. Every rank calls this."""
        self.bytes_sent += all_reduce(self.flat, self._algorithm)
        return self.flat


class Shared(FlatGradients):
    """The gradients live in memory that the ranks of a node share: nothing is sent within a node.

    With `wire` float32 each `parameter.grad` is a view of it, the same for all ranks: to be read
    only. Clipping, or a `GradScaler`, would change the gradients of every rank.

    Args:
        model: the same on all ranks, on the CPU.
        wire: as in `FlatGradients`: half the bytes to write, add and read.
        timeout: the longest wait for another rank.

    Raises:
        UserError: the model is on a CUDA device, or as `SharedMemory`.
    """

    def __init__(self, model: nn.Module, wire: torch.dtype, timeout: timedelta) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if parameters[0].is_cuda:
            raise UserError(
                "--algorithm shared-memory adds on the CPU; on GPUs nccl uses shared memory "
                "within a node: use flat or ddp"
            )
        length = sum(parameter.numel() for parameter in parameters)
        self._memory = SharedMemory(wire.itemsize * length, timeout)
        super().__init__(model, flat=self._memory.local_tensor(length, wire))

    def reduce(self) -> Tensor:
        """Sum over the ranks; returns the sum, [n], which the node's ranks share."""
        total = self._memory.sum(len(self.flat), self.flat.dtype)
        self.bytes_sent = self._memory.bytes_sent
        return total
