"""Torch's `nn.DataParallel` behind the same method as the hand-written eight steps, and the choice between them."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.errors import UserError
from examples.mnist_dataparallel.eight_steps import EightSteps, Net
from examples.mnist_dataparallel.explain import Explanation


class Engine(Protocol):
    """Computes gradients on several devices."""

    name: str
    samples: list[int]
    """Samples that each device has trained on."""

    def gradients(self, images: Tensor, labels: Tensor, scale: float) -> Tensor:
        """As `EightSteps.gradients`."""


class TorchDataParallel:
    """torch's own: steps 2 to 5 in the forward of `nn.DataParallel`, 6 and 7 in the backward that autograd makes of it.

    Args:
        net: all its parameters and buffers lie on the first device.
        devices: CUDA devices, each once. (Without any, `nn.DataParallel` is the bare module, and says nothing.)
        loss_inside: compute the loss in the replicas, so that numbers are gathered in place of logits.
    """

    name = "nn.DataParallel"

    def __init__(self, net: Net, devices: Sequence[torch.device], loss_inside: bool) -> None:
        self.net, self.devices, self.loss_inside = net, devices, loss_inside
        self.parallel = nn.DataParallel(net, device_ids=[device.index for device in devices])
        self.samples = [0] * len(devices)

    def gradients(self, images: Tensor, labels: Tensor, scale: float) -> Tensor:
        """As `EightSteps.gradients`."""
        images, labels = self.net.numerics.images(images), labels.to(self.devices[0], non_blocking=True)
        outputs: Any = self.parallel(images, *([labels] if self.loss_inside else []))  # [N, classes], or [devices]
        loss = scale * (outputs.sum() if self.loss_inside else self.net.criterion(outputs, labels))
        loss.backward()
        for number, chunk in enumerate(images.chunk(len(self.devices))):
            self.samples[number] += len(chunk)
        return loss.detach()


def engine(name: str, net: Net, devices: Sequence[torch.device], loss_inside: bool, explanation: Explanation) -> Engine:
    """The engine that `--engine` names.

    Raises:
        UserError: it cannot do what is asked for.
    """
    usable = devices[0].type == "cuda" and len(set(devices)) == len(devices)
    if name == "eight-steps" or (name == "auto" and (explanation.iteration or not usable)):
        return EightSteps(net, devices, loss_inside, explanation)
    if not usable:
        raise UserError(
            "--engine torch: nn.DataParallel needs different CUDA devices (on the CPU it runs one replica, "
            "and does not say so); use --engine eight-steps"
        )
    if explanation.iteration:
        raise UserError("--explain shows the hand-written steps: add --engine eight-steps, or leave --engine out")
    return TorchDataParallel(net, devices, loss_inside)
