"""How the gradients of a model become their means over all ranks: what DistributedDataParallel does, by hand.

| `--algorithm` | who adds up | when |
|---|---|---|
| per-parameter | the backend, one blocking call for each parameter | after backward |
| flat | the backend, one call for all gradients side by side (*) | after backward |
| bucketed | the backend, one call for each bucket of some megabytes (*) | while backward computes the rest |
| ring, recursive-doubling | allreduce.py | after backward |
| shared-memory | shared_memory.py | after backward |
| ddp | torch's DistributedDataParallel | while backward computes the rest |

(*) over connections with bounded buffers: `connected` in allreduce.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed import World, settle
from common.errors import UserError
from examples.manual_allreduce_sgd.allreduce import ALGORITHMS, Circle, all_reduce, connected
from examples.manual_allreduce_sgd.shared_memory import SharedMemory


class Averaging:
    """The model to train, and what makes its gradients the means over the ranks.

    The simplest way, on which the others improve: sum over the ranks and divide, one parameter after the other. Each
    call costs its latency, and nothing is sent while backward computes.

    Args:
        model: the same on all ranks.
        world: this process's world.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.circle = Circle(range(world.size), world.rank)
        # Backward computes the gradients about in the reverse order of the parameters.
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]

    def average(self) -> None:
        """After backward: make the gradient of each parameter the mean over the ranks."""
        for parameter in self.parameters:
            if parameter.grad is None:  # not used in this forward, but maybe on another rank
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            parameter.grad /= self.world.size


class Gradients(Averaging):
    """Gradients side by side in one flat tensor, and so few large messages in place of many small ones.

    Hooks copy each gradient there, already divided by the world size, as soon as backward has computed it and it is
    still in the cache. `average` makes each `parameter.grad` a view of the mean: nothing is copied back.
    Call `zero_grad()` (which sets gradients to None) before each backward.

    Args:
        model: the same on all ranks.
        world: this process's world.
        wire: the dtype in which gradients are sent and added up; bfloat16 halves the bytes, and rounds each gradient
            and each partial sum by up to 2^-8 of its size.
    """

    def __init__(self, model: nn.Module, world: World, wire: torch.dtype = torch.float32) -> None:
        super().__init__(model, world)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.wire = wire
        self.flat = self.place(sum(self.sizes))
        self._views = self._shaped(self.flat)
        self._missing = set(self.parameters)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.collect)

    def place(self, length: int) -> Tensor:
        """Where the gradients are to live, [length]."""
        return torch.zeros(length, dtype=self.wire, device=self.world.device)

    def _shaped(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Views of a flat tensor with the parameters' shapes and strides (which --channels-last changes)."""
        parts = zip(flat.split(self.sizes), self.parameters, strict=True)
        return {p: part.as_strided(p.shape, p.stride(), part.storage_offset()) for part, p in parts}

    def collect(self, parameter: nn.Parameter) -> None:
        """A hook: the gradient of this parameter is there."""
        assert parameter.grad is not None
        torch.mul(parameter.grad, 1 / self.world.size, out=self._views[parameter])
        parameter.grad = None  # frees its memory for the next one
        self._missing.discard(parameter)

    def reduce(self) -> Tensor:
        """Sum over the ranks; returns the sum, [n]."""
        raise NotImplementedError

    def average(self) -> None:
        """After backward: make the gradient of each parameter the mean over the ranks."""
        for parameter in self._missing:  # not used in this forward, but maybe on another rank
            self._views[parameter].zero_()
        self._missing = set(self.parameters)
        mean = self.reduce().to(torch.float32)  # the tensor itself, if it is float32
        for parameter, view in (self._views if mean is self.flat else self._shaped(mean)).items():
            parameter.grad = view


class Flat(Gradients):
    """One message after backward: by an algorithm of allreduce.py, or by the backend."""

    def __init__(self, model: nn.Module, world: World, wire: torch.dtype, algorithm: str = "backend") -> None:
        super().__init__(model, world, wire)
        self.circle = Circle.of(world)
        self._algorithm = ALGORITHMS[algorithm]

    def reduce(self) -> Tensor:
        """Sum over the ranks; returns the sum, [n]."""
        return all_reduce(self.flat, self.circle, self._algorithm)


class Bucketed(Averaging):
    """A message for each bucket, started from the hooks while backward still computes the rest.

    A gradient as large as a bucket is sent from where it is; smaller ones are gathered in a bucket first. None has to
    be read again to be divided: the gradient of the model's output is, and with it all that backward makes of it.
    Call `zero_grad()` (which sets gradients to None) before each backward.

    Source: Li et al., 2020, PyTorch Distributed, section 3.2 (https://arxiv.org/abs/2006.15704).

    Args:
        model: the same on all ranks; its output is a tensor.
        world: this process's world.
        wire: as `Gradients`.
        megabytes: size of a bucket.
    """

    def __init__(self, model: nn.Module, world: World, wire: torch.dtype, megabytes: float) -> None:
        super().__init__(model, world)
        self.wire = wire
        self._group = connected(world, range(world.size))
        self._buckets: list[list[nn.Parameter]] = []
        small: list[nn.Parameter] = []
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.collect)
            if parameter.numel() * wire.itemsize >= megabytes * 1e6:
                self._buckets.append([parameter])
                continue
            small.append(parameter)
            if sum(each.numel() for each in small) * wire.itemsize >= megabytes * 1e6:
                self._buckets.append(small)
                small = []
        self._buckets += [small] if small else []
        self._bucket_of = {parameter: number for number, bucket in enumerate(self._buckets) for parameter in bucket}
        model.register_forward_hook(self._divide)
        self._forget()

    def _forget(self) -> None:
        self._awaited = [len(bucket) for bucket in self._buckets]
        self._messages: list[Tensor] = []
        self._works: list[dist.Work] = []

    def _divide(self, _: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / self.world.size)

    def collect(self, parameter: nn.Parameter) -> None:
        """A hook: start the buckets that are complete, in their order, which must be the same on all ranks."""
        self._awaited[self._bucket_of[parameter]] -= 1
        while len(self._works) < len(self._buckets) and self._awaited[len(self._works)] == 0:
            self._start()

    def _start(self) -> None:
        flat: list[Tensor] = []
        for parameter in self._buckets[len(self._works)]:
            if parameter.grad is None:  # not used in this forward, but maybe on another rank
                parameter.grad = torch.zeros_like(parameter)
            flat.append(parameter.grad.as_strided((parameter.numel(),), (1,)))  # the memory itself, in any layout
        message = (flat[0] if len(flat) == 1 else torch.cat(flat)).to(self.wire)
        work = dist.all_reduce(message, group=self._group, async_op=True)
        assert work is not None
        self._messages.append(message)
        self._works.append(work)

    def average(self) -> None:
        """Start what waits for gradients that never came, wait for all, and make each gradient a view of a message."""
        while len(self._works) < len(self._buckets):
            self._start()
        for bucket, message, work in zip(self._buckets, self._messages, self._works, strict=True):
            work.wait()
            parts = message.to(torch.float32).split([parameter.numel() for parameter in bucket])
            for p, part in zip(bucket, parts, strict=True):
                p.grad = part.as_strided(p.shape, p.stride(), part.storage_offset())
        self._forget()


class Shared(Gradients):
    """The gradients live in memory that the processes of a node share; nothing is sent within the node."""

    def place(self, length: int) -> Tensor:
        """This rank's part of the shared memory, [length]."""
        if self.world.device.type != "cpu":
            raise UserError("--algorithm shared-memory adds on the CPU; GPUs of a node do so by nccl: use flat or ddp")
        self._memory = SharedMemory(self.world, length * self.wire.itemsize)
        self.circle = self._memory.leaders
        return self._memory.mine(length, self.wire)

    def reduce(self) -> Tensor:
        """Sum over the ranks; returns the sum, [n], shared by the node's processes."""
        return self._memory.sum(len(self.flat), self.wire)


class Ddp(Averaging):
    """What all this is compared with.

    Args:
        model: the same on all ranks.
        world: this process's world.
        example: images as in training, to settle DDP's buckets (without it, resuming is not exact).
    """

    def __init__(self, model: nn.Module, world: World, example: Tensor) -> None:
        devices = [world.device] if world.device.type == "cuda" else None
        super().__init__(DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True), world)
        settle(self.model, example)

    def average(self) -> None:
        """It is done: DDP averages while backward computes."""


def averaging(
    algorithm: str, model: nn.Module, world: World, wire: torch.dtype, megabytes: float, example: Tensor
) -> Averaging:
    """The way that `--algorithm` names; the arguments are those of the classes above."""
    match algorithm:
        case "per-parameter":
            return Averaging(model, world)
        case "flat":
            return Flat(model, world, wire)
        case "bucketed":
            return Bucketed(model, world, wire, megabytes)
        case "shared-memory":
            return Shared(model, world, wire)
        case "ddp":
            return Ddp(model, world, example)
        case _:
            return Flat(model, world, wire, algorithm)
