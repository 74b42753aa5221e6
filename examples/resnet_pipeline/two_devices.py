"""Split a model over two devices in one process: naively, then as a pipeline of micro-batches.

    python -m examples.resnet_pipeline.two_devices
    python -m examples.resnet_pipeline.two_devices --batch-size 120 --split-size 20 --image-size 128

In the naive form, one device waits while the other computes. `PipelineParallelResNet50` splits the
batch. CUDA calls return before the device has finished, so a plain loop keeps two GPUs busy. CPU
calls return only when they have finished; pipeline.py therefore uses a process per stage.
"""

import timeit
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet


class ToyModel(nn.Module):
    """A minimal model on two devices that maps rows [B, 10] to outputs [B, 5]."""

    def __init__(self, devices: tuple[str, str]) -> None:
        super().__init__()
        self.devices = devices
        self.layer1 = nn.Linear(10, 10).to(devices[0])
        self.layer2 = nn.Linear(10, 5).to(devices[1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, on the second device."""
        x = torch.relu(self.layer1(x.to(self.devices[0])))
        return self.layer2(x.to(self.devices[1]))  # autograd copies the gradient back


class ModelParallelResNet50(ResNet):
    """ResNet-50 split into two halves: one device computes while the other waits."""

    def __init__(self, devices: tuple[str, str]) -> None:
        norm = partial(nn.GroupNorm, 32)  # per sample; BatchNorm would depend on the micro-batches
        super().__init__(Bottleneck, [3, 4, 6, 3], num_classes=10, norm_layer=norm)
        self.devices = devices
        stem = (self.conv1, self.bn1, self.relu, self.maxpool)
        head = (self.avgpool, nn.Flatten(1), self.fc)
        self.seq1 = nn.Sequential(*stem, self.layer1, self.layer2).to(devices[0])
        self.seq2 = nn.Sequential(self.layer3, self.layer4, *head).to(devices[1])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 10] for images [B, 3, H, W] on the first device."""
        return self.seq2(self.seq1(x).to(self.devices[1]))


class PipelineParallelResNet50(ModelParallelResNet50):
    """The same model with the same gradients; both devices compute at the same time."""

    def __init__(self, devices: tuple[str, str], split_size: int = 20) -> None:
        super().__init__(devices)
        self.split_size = split_size  # samples in a micro-batch; the last one may be smaller

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 10] for images [B, 3, H, W] on the first device."""
        splits = iter(x.split(self.split_size))
        activations, logits = self.seq1(next(splits)).to(self.devices[1]), []
        for split in splits:
            logits.append(self.seq2(activations))  # queued on the second device ...
            activations = self.seq1(split).to(self.devices[1])  # ... while the first computes this
        logits.append(self.seq2(activations))
        return torch.cat(logits)  # for one loss and one backward pass


def seconds(step: Callable[[], object], devices: tuple[str, str]) -> float:
    """Return the shortest time of three calls, each measured until the devices are idle."""

    def synchronized() -> None:
        step()
        for device in set(devices) - {"cpu"}:
            torch.cuda.synchronize(device)

    return min(timeit.repeat(synchronized, number=1, repeat=3))


def main(batch_size: int = 24, split_size: int = 6, image_size: int = 64) -> None:
    """Run the toy model, then time each half alone and both forms of ResNet-50."""
    gpus = torch.cuda.device_count()
    devices = ("cuda:0", f"cuda:{min(gpus, 2) - 1}") if gpus else ("cpu", "cpu")
    output, labels = ToyModel(devices)(torch.randn(20, 10)), torch.randn(20, 5).to(devices[1])
    F.mse_loss(output, labels).backward()  # labels and output must be on the same device
    print(f"toy: layer1 on {devices[0]}; layer2, output and labels on {output.device}")
    if devices[0] == devices[1]:
        print(f"both devices are {devices[0]}, so micro-batches cannot overlap")

    images = torch.randn(batch_size, 3, image_size, image_size, device=devices[0])
    labels = torch.arange(batch_size, device=devices[1]) % 10
    naive = ModelParallelResNet50(devices)
    half = naive.seq1(images).detach().to(devices[1]).requires_grad_()
    busy = (
        seconds(lambda: naive.seq1(images).sum().backward(), devices),
        seconds(lambda: F.cross_entropy(naive.seq2(half), labels).backward(), devices),
    )
    for model in (naive, PipelineParallelResNet50(devices, split_size)):
        step = seconds(lambda m=model: F.cross_entropy(m(images), labels).backward(), devices)
        first, second = (max(0.0, 1 - own / step) for own in busy)
        print(f"{type(model).__name__}: {step:.3f} s per step; idle: {first:.0%} and {second:.0%}")


if __name__ == "__main__":
    tyro.cli(main)
