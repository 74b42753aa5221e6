"""The choice between the eight steps by hand and torch's `nn.DataParallel`, with one interface."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.launch.errors import UserError
from examples.mnist_dataparallel.eight_steps import EightSteps, Net
from examples.mnist_dataparallel.explain import Explanation


class TorchDataParallel:
    """torch's own: steps 2 to 5 in the forward of `nn.DataParallel`, 6 and 7 in its backward.

    Args:
        net: all its parameters and buffers are on the first device.
        devices: CUDA devices, each any number of times: its replicas then share it, and torch adds
            their gradients up without nccl. (On a CPU, `nn.DataParallel` is the bare module, and
            does not report it.)
        loss_inside: compute the loss in the replicas, so that numbers are gathered, not logits.
        explanation: not used: torch's steps cannot be watched one by one.
    """

    name = "nn.DataParallel"

    def __init__(
        self,
        net: Net,
        devices: Sequence[torch.device],
        loss_inside: bool,
        explanation: Explanation | None = None,
    ) -> None:
        self.net, self.devices, self.loss_inside = net, devices, loss_inside
        self.parallel = nn.DataParallel(net, device_ids=[device.index for device in devices])
        self.samples = [0] * len(devices)
        """Samples that each device has trained on."""

    def gradients(self, images: Tensor, labels: Tensor, scale: float) -> Tensor:
        """As `EightSteps.gradients`."""
        first = self.devices[0]
        images, labels = self.net.amp.to_device(images), labels.to(first, non_blocking=True)
        given = [images, labels] if self.loss_inside else [images]
        outputs: Any = self.parallel(*given)  # [N, classes], or [chunks]
        loss_sum = outputs.sum() if self.loss_inside else self.net.criterion(outputs, labels)
        loss = scale * loss_sum
        loss.backward()
        for number, chunk in enumerate(images.chunk(len(self.devices))):
            self.samples[number] += len(chunk)
        return loss.detach()


def choose_engine(
    name: str, devices: Sequence[torch.device], explain: bool
) -> type[EightSteps | TorchDataParallel]:
    """The engine that `--engine` names.

    Raises:
        UserError: it cannot do what is asked for.
    """
    usable = devices[0].type == "cuda"
    if name == "eight-steps" or (name == "auto" and (explain or not usable)):
        return EightSteps
    if not usable:
        raise UserError(
            "--engine torch: nn.DataParallel needs CUDA devices (on the CPU it runs one replica, "
            "and does not report it); use --engine eight-steps"
        )
    if explain:
        raise UserError(
            "--explain shows the hand-written steps: add --engine eight-steps, or leave --engine "
            "out"
        )
    return TorchDataParallel
