"""Data parallelism within one process, by hand: `nn.DataParallel` in eight steps to be watched.

The steps are those of https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html and
of the backward that autograd derives from them:

    1 images and labels --> first device
    2 scatter               chunk 0         chunk 1         ...
    3 replicate             the model  -->  a copy     -->  ...
    4 forward               logits 0        logits 1        ...   one thread per device
    5 gather                logits     <--  <--  <--        then the loss, on the first device
    6 backward              gradient 0 -->  gradient 1 -->  ...   one thread per device
    7 reduce                sum        <--  <--  <--        of the gradients of all parameters
    8 optimizer.step()      the model is updated, on the first device

Here nothing between devices is left to autograd: every copy is written in
common/train/replicas.py, and both passes run in one thread per device. (Autograd alone would run
the backward of all CPU replicas in one thread.)

A "device" may also be the CPU, any number of times: each replica is then a copy of the model, with
its own thread.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from common.train.amp import MixedPrecision
from common.train.replicas import (
    Replicas,
    gather_outputs,
    reduce_gradients,
    replicate,
    scatter_batch,
    scatter_gradient,
)
from examples.mnist_dataparallel.explain import Explanation

Result = TypeVar("Result")


class Net(nn.Module):
    """What runs on every device: the model and, if it gets labels, the loss.

    Autocast is entered here, because it belongs to a thread: entered outside, it would not reach
    the replicas' threads (or, with `nn.DataParallel`, reach them as float16, whatever type was
    chosen).

    Args:
        model: images [N, C, H, W] to logits [N, classes].
        criterion: logits and labels to the SUM of the losses: sums of chunks add up to that of the
            batch, whatever the sizes of the chunks.
        amp: the precision.
    """

    def __init__(self, model: nn.Module, criterion: nn.Module, amp: MixedPrecision) -> None:
        super().__init__()
        self.model, self.criterion, self.amp = model, criterion, amp

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [N, classes]; with labels [N], the sum of the losses [1].

        (Not a scalar: gathering scalars would warn.)
        """
        with self.amp.autocast():
            logits = self.model(images)
        if labels is None:
            return logits.float()
        return self.criterion(logits.float(), labels).unsqueeze(0)


class EightSteps:
    """A model that trains on several devices at once, in one process.

    Args:
        net: all its parameters and buffers are on the first device.
        devices: one per replica. With one device there is no thread, and no copy of the model.
        loss_inside: compute the loss in the replicas, so that numbers are gathered, not logits.
        explanation: is told what each step did.

    Raises:
        RuntimeError: a parameter or buffer is on another device.
    """

    name = "eight steps by hand"

    def __init__(
        self,
        net: Net,
        devices: Sequence[torch.device],
        loss_inside: bool,
        explanation: Explanation | None = None,
    ) -> None:
        self.devices, self.loss_inside = devices, loss_inside
        self.explanation = explanation or Explanation()
        self.net, self.parallel = net, Replicas(net, devices)
        self.samples = [0] * len(devices)
        """Samples that each device has trained on."""

    def gradients(self, images: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Add the gradients of `scale` times the sum of the losses to the model's: steps 1 to 7.

        Args:
            images: [N, C, H, W], on any device; N may be 0.
            labels: [N].
            scale: 1 / N for the mean of the batch.

        Returns:
            `scale` times the sum of the losses, a scalar without gradient.
        """
        net, first, did = self.net, self.devices[0], self.explanation.did
        images, labels = net.amp.to_device(images), labels.to(first, non_blocking=True)
        did(1, "the batch goes to the first device", images, labels)

        inputs, targets = scatter_batch(images, self.devices), scatter_batch(labels, self.devices)
        for number, chunk in enumerate(inputs):
            self.samples[number] += len(chunk)
        did(2, "it is cut, a chunk for each device", *inputs)

        replicas = self.parallel.replicas[: len(inputs)]
        replicate(replicas)
        did(3, "the model is copied to the others", *(parameters(r) for r in replicas[1:]))

        def forward(number: int) -> Tensor:
            given = [inputs[number], targets[number]] if self.loss_inside else [inputs[number]]
            return replicas[number](*given)

        outputs = self._in_parallel(forward, len(inputs))  # [n, classes] each, or [1] (loss inside)
        did(4, "forward, one thread per device", *outputs)

        gathered = gather_outputs(outputs, first).requires_grad_()  # [N, classes], or [chunks]
        loss = scale * (gathered.sum() if self.loss_inside else net.criterion(gathered, labels))
        did(5, "outputs are gathered, the loss computed", gathered, loss)

        loss.backward()  # up to the gathered outputs
        assert gathered.grad is not None
        gradients = scatter_gradient(gathered.grad, outputs)

        def backward(number: int) -> None:
            outputs[number].backward(gradients[number])

        self._in_parallel(backward, len(inputs))
        did(6, "its gradient is cut, backward, one thread per device", *gradients)

        reduce_gradients(replicas)
        did(7, "the replicas' gradients are added up on the first", parameters(net))
        return loss.detach()

    def _in_parallel(self, work: Callable[[int], Result], count: int) -> list[Result]:
        """Do the work for each replica, on its device and in its thread, and watch it."""

        def watched(number: int) -> Result:
            started = time.perf_counter()
            result = work(number)
            self.explanation.worked(number, started)
            return result

        return self.parallel.each(count, watched)


def parameters(module: nn.Module) -> Tensor:
    """A tensor as large as all parameters, without memory: it says what was moved."""
    first = next(module.parameters())
    count = sum(parameter.numel() for parameter in module.parameters())
    return torch.empty(1, device=first.device, dtype=first.dtype).expand(count)
