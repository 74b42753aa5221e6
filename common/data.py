"""Grayscale images in memory (digits, MNIST, idx files), and a network that classifies them."""

import gzip
import importlib.util
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from common.checkpoint import describe
from common.launch import UserError

TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}  # torchvision's class names
CLOTHES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"]
CLOTHES += ["Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


@dataclass(frozen=True)
class ImageData:
    """Training and test sets: normalized float32 images [N, 1, S, S] and int64 labels [N]."""

    name: str
    train: TensorDataset
    test: TensorDataset
    class_names: list[str]
    mean: float  # mean of the training pixels, which are in [0, 1]; 0.1307 for MNIST
    std: float  # standard deviation of the training pixels; 0.3081 for MNIST

    def __str__(self) -> str:
        about = f"{self.name}, {len(self.train)} training images"
        absent = absent_classes(self.class_names, self.test.tensors[1].tolist())
        return f"{about}; {absent}" if absent else about

    @property
    def about(self) -> dict[str, Any]:
        """Metadata to save with the weights; tools/predict.py reads it."""
        about = {"model": "DigitNet", "classes": self.class_names, "size": self.size}
        return about | {"mean": self.mean, "std": self.std}

    @property
    def size(self) -> int:
        """Height and width of the images, in pixels."""
        return int(self.train.tensors[0].shape[-1])


def image_data(name: str, folder: Path) -> ImageData:
    """Return the dataset named by --dataset. Every rank calls this; one rank per node downloads it.

    The name is digits, mnist, fashion-mnist, or a folder with idx files (MNIST's format).
    torchvision downloads mnist and fashion-mnist to `folder`.

    Raises:
        UserError: a file is missing or damaged, there is only one class, or the download failed.
    """
    if name == "digits":
        return _digits()
    root = Path(name).expanduser()
    if name in TORCHVISION:
        root = folder / TORCHVISION[name] / "raw"
        # Rank 0 downloads first, because nodes may share the folder.
        for downloads in (os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")):
            if downloads == "0" and not _find(root, "t10k-labels"):  # the last file to download
                _download(name, folder)
            if dist.is_initialized():
                dist.barrier()
    return _normalized(name, _read_split(root, "train"), _read_split(root, "t10k"))


def _digits() -> ImageData:
    """Read scikit-learn's 1,797 digits of 8x8 pixels; every fifth digit is in the test set."""
    package: Any = importlib.util.find_spec("sklearn")  # an import would take seconds
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=","))  # 64 pixels in [0, 16], and a label
    images = (table[:, :-1] * (255 / 16)).round().view(-1, 8, 8)
    labels, test = table[:, -1], torch.arange(len(table)) % 5 == 0
    return _normalized("digits", (images[~test], labels[~test]), (images[test], labels[test]))


def _download(name: str, folder: Path) -> None:
    import torchvision  # takes 1 to 4 seconds; only a download needs it

    try:
        getattr(torchvision.datasets, TORCHVISION[name])(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        text = f"cannot download {name} to {folder} ({reason})"
        raise UserError(f"{text}; pass a folder with its four files to --dataset") from None


def _find(root: Path, stem: str) -> Path | None:
    """Return the path to an idx file, compressed or not, or None if it is missing."""
    name = f"{stem}?idx[13]?ubyte*"
    paths = [*sorted(root.glob(name)), *sorted(root.glob(f"{name}/{name}"))]
    return next((path for path in paths if path.is_file()), None)


def _read_split(root: Path, split: str) -> tuple[Tensor, Tensor]:
    """Read a split's images [N, S, S] and labels [N], both uint8."""
    images, labels = _read_idx(root, f"{split}-images"), _read_idx(root, f"{split}-labels")
    if images.shape != (len(labels), images.shape[-1], images.shape[-1]) or labels.dim() != 1:
        shapes = f"images {list(images.shape)} and labels {list(labels.shape)}"
        raise UserError(f"{root}: {split} {shapes}; expected [N, S, S] and [N]")
    return images, labels


def _read_idx(root: Path, stem: str) -> Tensor:
    path = _find(root, stem)
    if path is None:
        names = "digits, mnist, fashion-mnist, or a folder with four idx files"
        raise UserError(f"{root}/{stem}-idx*-ubyte is missing; use --dataset {names}")
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        if data[:3] != b"\0\0\x08":  # the magic number for unsigned bytes
            raise ValueError
        shape = np.frombuffer(data, ">u4", count=data[3], offset=4)  # of data[3] dimensions
        return torch.tensor(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape))
    except (gzip.BadGzipFile, EOFError, zlib.error, IndexError, ValueError):
        raise UserError(f"{path} is not an idx file of bytes: {describe(path)}") from None


def _normalized(name: str, *splits: tuple[Tensor, Tensor]) -> ImageData:
    """Normalize both splits with the mean and the standard deviation of the training pixels."""
    std, mean = (float(value) for value in torch.std_mean(splits[0][0].float().div_(255)))
    train, test = (
        TensorDataset(x.unsqueeze(1).float().div_(255).sub_(mean).div_(std), y.long())
        for x, y in splits
    )
    classes = 1 + max(int(labels.max()) for _, labels in splits)  # a split may lack the last class
    if classes < 2:
        raise UserError(f"{name} has only one class; use a dataset with at least two")
    class_names = CLOTHES if name == "fashion-mnist" else [str(label) for label in range(classes)]
    return ImageData(name, train, test, class_names, mean, std)


def absent_classes(names: Sequence[str], labels: Iterable[int]) -> str:
    """Return a warning about classes without test images, or an empty string."""
    present = set(labels)
    absent = [name for label, name in enumerate(names) if label not in present]
    words = ", ".join(absent[:5] + ["..."] * (len(absent) > 5))
    return f"no test images for {len(absent)} class(es): {words}" if absent else ""


class DigitNet(nn.Sequential):
    """A small convolutional network that maps images [N, 1, size, size] to logits [N, classes].

    GroupNorm with one group normalizes each sample separately, unlike BatchNorm, so the result
    does not depend on how a batch is split over ranks. GELU and strided convolutions are smooth,
    while the kinks of ReLU and MaxPool would amplify differences in the last bit.
    """

    def __init__(self, size: int, classes: int) -> None:
        # 28x28 images have an empty border and more pixels than needed: omitting the padding saves
        # 60% of the arithmetic, and stride 2 saves 75%. 8x8 digits need padding and all pixels.
        padding, stride = (2, 1) if size < 20 else (0, 2)
        stem = (size + 2 * padding - 5) // stride + 1  # 12 for 28 pixels, 8 for 8
        side = (stem + 2 * padding - 8) // 2 + 1  # 3 for both sizes
        super().__init__(
            nn.Conv2d(1, 16, 5, stride=stride, padding=padding, bias=False),  # [N, 16, stem, stem]
            nn.GroupNorm(1, 16),
            nn.GELU(),
            nn.Conv2d(16, 32, 5, padding=padding, bias=False),  # [N, 32, 8, 8] for both sizes
            nn.GroupNorm(1, 32),
            nn.GELU(),
            nn.Conv2d(32, 64, 4, stride=2, bias=False),  # [N, 64, side, side]
            nn.GroupNorm(1, 64),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64 * side * side, classes),
        )
        for layer in self:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
