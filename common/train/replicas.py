"""Replicas of a model in one process, each in a thread of its own, on a CPU, too: DataParallel.

On a CPU `nn.DataParallel` is the bare module, and does not report it. Here any device may be named
any number of times. mnist_dataparallel shows the steps one by one; `Replicas` is all of them as a
module. Nothing between devices is left to autograd, which would run the backward of all replicas on
a CPU in one thread.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


def scatter_batch(batch: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Cut a batch [N, ...] into chunks of ceil(N / devices) and send each to its device.

    5 samples on 4 devices are 2, 2, 1: there can be fewer chunks than devices. An empty batch is
    one empty chunk: the first device still takes part.
    """
    chunks = [chunk for chunk in batch.chunk(len(devices)) if len(chunk)] or [batch]
    return [
        chunk.to(device, non_blocking=True) for chunk, device in zip(chunks, devices, strict=False)
    ]


@torch.no_grad()
def replicate(replicas: Sequence[nn.Module]) -> None:
    """Copy parameters and buffers of the first replica, which is the model itself, to the others.

    What a forward changed in a copy, like BatchNorm's statistics, is overwritten: only those of the
    first chunk stay.
    """
    source = [*replicas[0].parameters(), *replicas[0].buffers()]
    for replica in replicas[1:]:
        replica.train(replicas[0].training)
        target = [*replica.parameters(), *replica.buffers()]
        torch._foreach_copy_(target, source, non_blocking=True)


def gather_outputs(outputs: Sequence[Tensor], device: torch.device) -> Tensor:
    """The replicas' outputs [n, ...] as one tensor [N, ...] on one device.

    `scatter_gradient` is the way back.
    """
    return torch.cat([output.detach().to(device, non_blocking=True) for output in outputs])


def scatter_gradient(gradient: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Cut the gradient of the gathered outputs, and send each device the part of its own output."""
    parts = gradient.split([len(output) for output in outputs])
    return [
        part.to(output.device, non_blocking=True)
        for part, output in zip(parts, outputs, strict=True)
    ]


@torch.no_grad()
def reduce_gradients(replicas: Sequence[nn.Module]) -> None:
    """Add the gradients of all replicas to those of the first, and drop them elsewhere.

    The order is always the same, so the sums are, bit for bit.
    """
    for parameter, *copies in zip(*(replica.parameters() for replica in replicas), strict=True):
        for each in copies:
            if each.grad is not None:  # None: not used in this forward
                gradient = each.grad.to(parameter.device, non_blocking=True)
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )
                each.grad = None


class Replicas(nn.Module):
    """On a CPU what `nn.DataParallel` is on CUDA devices.

    Dropout draws its numbers in the order in which the threads ask: on a CPU, which has one
    generator, two runs with it differ.

    Args:
        module: all its parameters and buffers are on the first device.
        devices: one per replica. With one device there is no thread, and no copy of the model.

    Raises:
        RuntimeError: a parameter or buffer is on another device.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device != devices[0]:
                raise RuntimeError(
                    f"{name} lies on {tensor.device}; the model belongs on the first of {devices}"
                )
        self.module, self.devices = module, devices
        # The copies are made as Python objects once (torch makes them in every forward); they are
        # no submodules, so that the parameters are those of the model.
        self.replicas = [module, *(copy.deepcopy(module).to(device) for device in devices[1:])]
        # The replicas on a CPU share its cores; this thread keeps all of them, for the evaluation.
        share = max(1, torch.get_num_threads() // len(devices))
        self._threads = ThreadPoolExecutor(len(devices), "replica", torch.set_num_threads, (share,))

    def forward(self, *inputs: Tensor) -> Tensor:
        """The outputs of the replicas for their chunks, one after the other, [N, ...].

        Args:
            inputs: [N, ...] each, on the CPU; all are cut alike.
        """
        # On CUDA autograd calls the hook in the thread that its replicas' backward waits for.
        assert all(device.type == "cpu" for device in self.devices)
        cut = (scatter_batch(each, self.devices) for each in inputs)
        chunks = list(zip(*cut, strict=True))
        replicas = self.replicas[: len(chunks)]
        replicate(replicas)
        outputs = self.each(len(chunks), lambda number: replicas[number](*chunks[number]))
        gathered = gather_outputs(outputs, self.devices[0])
        if torch.is_grad_enabled():
            gathered.requires_grad_().register_hook(partial(self._backward, outputs))
        return gathered

    def _backward(self, outputs: Sequence[Tensor], gradient: Tensor) -> None:
        parts = scatter_gradient(gradient, outputs)
        self.each(len(outputs), lambda number: outputs[number].backward(parts[number]))
        reduce_gradients(self.replicas[: len(outputs)])

    def each(self, count: int, work: Callable[[int], Result]) -> list[Result]:
        """Do the work for the first replicas, on their devices and in their threads.

        One needs no thread.
        """
        enabled = torch.is_grad_enabled()  # it belongs to a thread, too

        def on_device(number: int) -> Result:
            device = self.devices[number]
            with (
                torch.set_grad_enabled(enabled),
                torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
            ):
                return work(number)

        if count == 1:
            return [on_device(0)]
        tasks = [self._threads.submit(on_device, number) for number in range(count)]
        wait(tasks)
        return [task.result() for task in tasks]
