"""A ResNet on two devices in one process, both at work forward and backward, on a CPU, too.

On GPUs the host only queues work, and the devices run it asynchronously. On a CPU, where a call
computes at once, each half has a thread (and a core). The textbook form is in `two_devices.py`.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.train.amp import MixedPrecision
from common.train.precision import Precision
from examples.resnet_pipeline.model import Stage, blocks
from examples.resnet_pipeline.timeline import Event, Timeline, merged


class TwoHalves:
    """A ResNet on two devices, each with a thread that gives it work.

    Args:
        model: the un-split model, which is taken apart.
        start: with which of its blocks the second half begins.
        devices: of the halves.
    """

    def __init__(
        self, model: nn.Module, start: int, devices: tuple[torch.device, torch.device]
    ) -> None:
        row, self.devices = blocks(model), devices
        amps = [MixedPrecision(Precision(precision="fp32"), device) for device in devices]
        self.half1 = Stage(row[:start], amps[0]).to(devices[0])  # stem .. some block
        self.half2 = Stage(row[start:], amps[1]).to(devices[1])  # the other blocks, head
        self.timelines = [Timeline(row, device, range(0)) for row, device in enumerate(devices)]
        # On a CPU each thread computes with one core; on GPUs it only queues work.
        self.threads = [
            ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) for _ in devices
        ]

    def step(self, images: Tensor, labels: Tensor, split_size: int) -> None:
        """Forward and backward of a batch in micro-batches; gradients add up.

        The halves are joined by hand at the cut: the input of the second half is a leaf, and with
        its gradient the first half's backward begins. So the first micro-batch can go backward
        while later ones go forward.

        Args:
            images: [B, 3, H, W].
            labels: [B].
            split_size: samples of a micro-batch (the last one may be smaller); with B, one device
                works at a time.
        """
        targets = labels.to(self.devices[1], non_blocking=True)  # labels where the output is
        first, second = self.threads
        forwards, gradients = list[Future[Tensor]](), list[Future[Tensor]]()
        backwards = list[Future[None]]()
        for micro, x in enumerate(images.split(split_size)):
            forwards.append(first.submit(self.forward1, x, micro))
        for micro, y in enumerate(targets.split(split_size)):
            gradients.append(
                second.submit(self.forward_backward2, forwards[micro], y, len(labels), micro)
            )
        for micro, gradient in enumerate(gradients):
            backwards.append(first.submit(self.backward1, forwards[micro], gradient, micro))
        for done in backwards:
            done.result()
        for device in {device for device in self.devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def forward1(self, x: Tensor, micro: int) -> Tensor:
        """Images [b, 3, H, W] to activations [b, C, H', W']."""
        with self.timelines[0].record("F", micro, 0):
            return self.half1(x.to(self.devices[0], non_blocking=True))

    def forward_backward2(
        self, activations: "Future[Tensor]", y: Tensor, total: int, micro: int
    ) -> Tensor:
        """Activations [b, C, H', W'], as soon as they are there, to the gradient of the loss."""
        x = activations.result().detach().to(self.devices[1], non_blocking=True).requires_grad_()
        with self.timelines[1].record("F", micro, 1):
            loss = F.cross_entropy(self.half2(x), y, reduction="sum") / total
        with self.timelines[1].record("B", micro, 1):
            loss.backward()
        assert x.grad is not None
        return x.grad

    def backward1(
        self, activations: "Future[Tensor]", gradient: "Future[Tensor]", micro: int
    ) -> None:
        """The rest of the backward pass, on the first device."""
        arrived = gradient.result().to(self.devices[0], non_blocking=True)
        with self.timelines[0].record("B", micro, 0):
            activations.result().backward(arrived)

    def traced(self, images: Tensor, labels: Tensor, split_size: int) -> list[Event]:
        """The events of one step."""
        for timeline in self.timelines:
            timeline.traced = range(timeline.count, timeline.count + 1)
            timeline.begin()
        self.step(images, labels, split_size)
        for timeline in self.timelines:
            timeline.recording = False
        return merged([timeline.steps[-1:] for timeline in self.timelines])[0]
