"""Data of this example: images drawn in memory, or a folder of images by path."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.data import ImageData, Images, indices_of
from common.errors import UserError

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder

CLASSES = ("disc", "ring", "square", "frame", "triangle", "plus", "diamond", "stripes", "checks", "spokes")


def image_data(name: str, size: int, train: int, test: int, seed: int) -> ImageData:
    """The dataset that `--dataset` names: `shapes`, which are drawn, or a folder with the subfolders train and val.

    Args:
        name: the value of `--dataset`.
        size: height and width, in pixels.
        train: images to draw for training.
        test: images to draw for the test.
        seed: of the crops of a folder's images.

    Raises:
        UserError: no such dataset.
    """
    if name == "shapes":
        parts = [draw(train, size, seed=0), draw(test, size, seed=1)]
        scaled = parts[0].pixels.double() / 255
        return ImageData(name, parts[0], parts[1], len(CLASSES), float(scaled.mean()), float(scaled.std()))
    if (Path(name) / "train").is_dir() and (Path(name) / "val").is_dir():
        return image_folder(Path(name), size, seed)
    raise UserError(f"--dataset {name}: give shapes, or a folder that holds train/CLASS/*.jpg and val/CLASS/*.jpg")


def draw(count: int, size: int, seed: int) -> Images:
    """Draw shapes of random colour, place, size and angle on noise: only the shape tells the class.

    Args:
        count: images; image i belongs to class i modulo 10.
        size: height and width, in pixels.
        seed: what differs between the training and the test set.
    """
    generator = torch.Generator().manual_seed(seed)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(count, *shape).uniform_(low, high, generator=generator)

    labels = torch.arange(count) % len(CLASSES)
    axis = torch.linspace(-1, 1, size)
    y = axis[:, None] + between(-0.12, 0.12, 1, 1)  # [N, S, 1]
    x = axis + between(-0.12, 0.12, 1, 1)  # [N, 1, S]
    angle, scale = between(-0.2, 0.2, 1, 1), between(0.6, 0.8, 1, 1)
    u = (x * angle.cos() - y * angle.sin()) / scale  # [N, S, S], coordinates in which the shape has the size 1
    v = (x * angle.sin() + y * angle.cos()) / scale
    radius, largest = (u * u + v * v).sqrt(), torch.maximum(u.abs(), v.abs())
    inside = largest < 1
    masks = torch.stack([
        radius < 1,
        (radius < 1) & (radius > 0.6),
        largest < 0.9,
        inside & (largest > 0.6),
        (v < 0.8) & (v > 2 * u.abs() - 0.9),
        inside & (torch.minimum(u.abs(), v.abs()) < 0.28),
        u.abs() + v.abs() < 1.1,
        inside & (torch.sin(3 * math.pi * v) > 0),
        inside & (torch.sin(2 * math.pi * u) * torch.sin(2 * math.pi * v) > 0),
        (radius < 1) & (torch.sin(6 * torch.atan2(v, u)) > 0),
    ])  # [10, N, S, S]  # fmt: skip
    mask = masks[labels, torch.arange(count)].unsqueeze(1)  # [N, 1, S, S]
    foreground, background = between(110, 255, 3, 1, 1), between(0, 100, 3, 1, 1)
    noise = torch.empty(count, 3, size, size).normal_(0, 12, generator=generator)
    pixels = torch.where(mask, foreground, background) + noise  # [N, 3, S, S]
    return Images(pixels.clamp_(0, 255).to(torch.uint8), labels)


@dataclass(frozen=True)
class LabelsOnly(Images):
    """What stages after the first need of the data: no pixel is read for them."""

    def __getitems__(self, keys: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """No pixels [B, 0, 1, 1], labels [B], indices [B]."""
        chosen = indices_of(keys)
        return torch.empty(len(chosen), 0, 1, 1), self.labels[chosen], chosen


def only_labels(images: Images) -> Images:
    """The same samples without pixels."""
    return LabelsOnly(images.pixels, images.labels)


@dataclass(frozen=True)
class Files(Images):
    """Images of a folder, decoded when they are read; `pixels` is empty and has their shape."""

    folder: "ImageFolder"
    seed: int = 0

    def __getitems__(self, keys: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """A batch: pixels [B, 3, S, S] uint8, labels [B], indices [B]."""
        chosen = indices_of(keys)
        epochs = [key[0] if isinstance(key, tuple) else 0 for key in keys]
        rows = [self.decoded(index, epoch) for index, epoch in zip(chosen.tolist(), epochs, strict=True)]
        return torch.stack(rows), self.labels[chosen], chosen

    def decoded(self, index: int, epoch: int) -> Tensor:
        """An image [3, S, S] uint8; how it is cropped follows from seed, epoch and index, whoever loads it.

        Raises:
            UserError: the file is broken.
        """
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(hash((self.seed, epoch, index)))
                return self.folder[index][0]
        except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: what Pillow says of a broken PNG
            file = self.folder.samples[index][0]
            raise UserError(f"{file} cannot be used ({error}): remove or replace it") from None


def image_folder(folder: Path, size: int, seed: int) -> ImageData:
    """Images in `train/CLASS/` and `val/CLASS/`: random crops and flips to train on, centre crops to test.

    Raises:
        UserError: a folder without images, or with other classes in val than in train.
    """
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    training = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    testing = [v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size)]
    parts, classes = [], []
    for name, transforms in (("train", training), ("val", testing)):
        try:
            files = ImageFolder(str(folder / name), v2.Compose([v2.PILToTensor(), *transforms]))
        except FileNotFoundError as error:
            raise UserError(f"--dataset {folder}: {str(error).splitlines()[0]}") from None
        parts.append(Files(torch.empty(0, 3, size, size), torch.tensor(files.targets), files, seed))
        classes.append(files.classes)
    if classes[0] != classes[1]:
        raise UserError(f"--dataset {folder}: train and val must hold folders of the same names, one per class")
    return ImageData(str(folder), parts[0], parts[1], len(classes[0]), 0.449, 0.226)  # of ImageNet, over its channels
