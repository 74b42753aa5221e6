"""A ResNet on two devices in one process, as textbooks write it: a module, and one backward.

`ModelParallelResNet` uses one device at a time: the second waits for the first one's output, and
the first for the gradient. `PipelineParallelResNet` cuts the batch: while the second device works
on one micro-batch, the first works on the next. That needs no threads on GPUs, where a call returns
before the device has computed. On a CPU, where a call computes at once, nothing overlaps: there the
threads of `two_halves.py` help.
"""

import torch
from torch import Tensor, nn


class ModelParallelResNet(nn.Module):
    """The first half on one device, the second half and the last layer on another.

    Args:
        model: a ResNet of torchvision, which is taken apart.
        first: device of the stem, layer1 and layer2.
        second: device of layer3, layer4 and the last layer; labels must be there, too.
    """

    def __init__(self, model: nn.Module, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        modules = dict(model.named_children())
        stem = [modules[name] for name in ("conv1", "bn1", "relu", "maxpool")]
        self.half1 = nn.Sequential(*stem, modules["layer1"], modules["layer2"]).to(first)
        self.half2 = nn.Sequential(modules["layer3"], modules["layer4"], modules["avgpool"])
        self.half2.to(second)
        self.fc = modules["fc"].to(second)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W] on the first device to logits [B, classes] on the second."""
        return self.head(self.half1(x).to(self.second))

    def head(self, activations: Tensor) -> Tensor:
        """Activations [b, C, H', W'] to logits [b, classes], on the second device."""
        return self.fc(self.half2(activations).flatten(1))


class PipelineParallelResNet(ModelParallelResNet):
    """Both devices at work: the forward cuts the batch, and autograd runs the cut graph backward.

    Args:
        model: a ResNet of torchvision, which is taken apart.
        first: device of the first half.
        second: device of the second half.
        split_size: samples of a micro-batch; the last one may be smaller.
    """

    def __init__(
        self, model: nn.Module, first: torch.device, second: torch.device, split_size: int = 20
    ) -> None:
        super().__init__(model, first, second)
        self.split_size = split_size

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W] on the first device to logits [B, classes] on the second."""
        splits = iter(x.split(self.split_size))
        activations = self.half1(next(splits)).to(self.second)
        logits = []
        for split in splits:
            # Queued on the second device, which computes it ...
            logits.append(self.head(activations))
            # ... while the first one computes the next micro-batch.
            activations = self.half1(split).to(self.second)
        logits.append(self.head(activations))
        return torch.cat(logits)
