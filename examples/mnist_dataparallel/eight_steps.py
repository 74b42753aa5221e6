"""`nn.DataParallel` by hand: the eight steps of one iteration, on GPUs or CPUs.

    1 copy       the batch goes to the first device
    2 scatter    chunk 0         chunk 1         ...    one chunk per device
    3 replicate  the model  -->  a copy     -->  ...
    4 forward    outputs 0       outputs 1       ...    one thread per device
    5 gather     outputs    <--  <--  <--        ...    the program computes the loss from them
    6 backward   gradient   -->  -->  -->        ...    one thread per device
    7 reduce     sum        <--  <--  <--        ...    of the gradients of all parameters
    8 update     optimizer.step() changes the model on the first device

Steps 1 to 5 are `EightSteps.forward`. Steps 6 and 7 are `EightSteps._backward`, which
`loss.backward()` calls. In `nn.DataParallel`, autograd derives steps 6 and 7. It has one thread
per CUDA device but only one for all CPU replicas, so on CPUs `EightSteps` starts its own threads.
"""

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

EXPLAINED = 3  # the iteration to print; the first two also start threads and choose kernels


class EightSteps(nn.Module):
    """Splits each batch over the devices. A device, such as the CPU, may occur several times.

    The module returns one tensor; its parameters and buffers are on the first device. With fewer
    than two devices, the module is called directly. `log` prints each step of the third iteration.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        log: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if devices and tensor.device != devices[0]:
                raise RuntimeError(f"{name} is on {tensor.device} instead of {devices[0]}")
        self.module, self.devices, self.log = module, list(devices), log
        # All replica threads share the process's cores.
        count = max(1, len(devices))
        cores = max(1, torch.get_num_threads() // count)
        self._threads = ThreadPoolExecutor(count, "replica", torch.set_num_threads, (cores,))
        self._iteration, self._clock = 0, 0.0

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the outputs [N, ...] for inputs [N, ...], on the first device."""
        if len(self.devices) < 2:
            return self.module(*inputs)
        first = self.devices[0]
        self._iteration, self._clock = self._iteration + 1, time.perf_counter()

        inputs = tuple(x.to(first, non_blocking=True) for x in inputs)
        self.show("1 copy the batch to the first device", inputs)

        chunks = list(zip(*(scatter(x, self.devices) for x in inputs), strict=True)) or [()]
        self.show("2 scatter a chunk to each device", (x for chunk in chunks for x in chunk))

        replicas = replicate(self.module, self.devices[: len(chunks)])
        self.show("3 replicate the model", (flat_state(replica) for replica in replicas))

        outputs = self._in_threads(lambda replica, chunk: replica(*chunk), replicas, chunks)
        self.show("4 forward, one thread per device", outputs)

        gathered = torch.cat([output.detach().to(first) for output in outputs])
        self.show("5 gather the outputs on the first device", [gathered])

        if torch.is_grad_enabled():
            gathered.requires_grad_()
            gathered.register_hook(lambda gradient: self._backward(gradient, outputs, replicas))
        return gathered

    def _backward(
        self, gradient: Tensor, outputs: Sequence[Tensor], replicas: Sequence[nn.Module]
    ) -> None:
        """Continue `loss.backward()` in the replicas, from the outputs' gradient [N, ...]."""
        chunks = gradient.split([len(output) for output in outputs])
        chunks = [chunk.to(x.device) for chunk, x in zip(chunks, outputs, strict=True)]
        if self.devices[0].type == "cpu":
            self._in_threads(torch.autograd.backward, outputs, chunks)
        else:  # this hook occupies autograd's thread for device 0, which other threads would need
            torch.autograd.backward(outputs, chunks)
        self.show("6 loss, scatter its gradient, backward, one thread per device", chunks)

        reduce_gradients(replicas)
        self.show("7 add the gradients on the first device", [flat_state(replicas[0])])

    def _in_threads(self, work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Call `work` in a separate thread for each replica, and return the results in order."""
        enabled = torch.is_grad_enabled()  # threads do not inherit this setting

        def on_device(device: torch.device, *own: Any) -> Any:
            current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
            with torch.set_grad_enabled(enabled), current:
                return work(*own)

        return list(self._threads.map(on_device, self.devices, *arguments))

    def show(self, step: str, tensors: Iterable[Tensor]) -> None:
        """Log the shapes, devices and duration of a step, in the third iteration only."""
        if self.log is None or self._iteration != EXPLAINED:
            return
        for device in {device for device in self.devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)  # kernels run asynchronously
        milliseconds = 1e3 * (time.perf_counter() - self._clock)
        shapes = ", ".join(f"{list(tensor.shape)} on {tensor.device}" for tensor in tensors)
        self.log(f"{step:61} {milliseconds:7.2f} ms  {shapes}")
        self._clock = time.perf_counter()


def scatter(batch: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Split a batch [N, ...] into chunks of ceil(N / devices) samples, one per device.

    Chunks can be unequal, and there can be fewer chunks than devices: 5 samples on 4 devices are
    split into 2, 2 and 1. An empty batch is one empty chunk.
    """
    chunks = [chunk for chunk in batch.chunk(len(devices)) if len(chunk)] or [batch]
    return [x.to(device, non_blocking=True) for x, device in zip(chunks, devices, strict=False)]


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return the module itself for the first device, and copies for the other devices.

    Parameters and buffers are copied in each iteration. Changes to a copy are lost, so BatchNorm
    keeps only the first chunk's statistics.
    """
    return [module, *(copy.deepcopy(module).to(device) for device in devices[1:])]


@torch.no_grad()
def reduce_gradients(replicas: Sequence[nn.Module]) -> None:
    """Add the other replicas' gradients to the first replica's gradients, in order."""
    for parameter, *copies in zip(*(replica.parameters() for replica in replicas), strict=True):
        for gradient in (each.grad for each in copies if each.grad is not None):
            moved = gradient.to(parameter.device)
            parameter.grad = moved if parameter.grad is None else parameter.grad.add_(moved)


def flat_state(module: nn.Module) -> Tensor:
    """Return a tensor with as many elements as all parameters and buffers, without copying."""
    state = [*module.parameters(), *module.buffers()]
    return state[0].detach().flatten()[:1].expand(sum(tensor.numel() for tensor in state))
