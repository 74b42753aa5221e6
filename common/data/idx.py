"""Grey images held in memory: the embedded digits, MNIST, or a folder with files in its format."""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common.data.digits import load_digits, stratified_split
from common.data.download import TORCHVISION, mnist_folder
from common.data.samplers import Shard, indices_of
from common.launch.errors import UserError

# mean and standard deviation of the training pixels, scaled to 0..1
NORMALISATION = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}

CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


@dataclass(frozen=True)
class Images(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Images held in memory as bytes: a batch is one indexing operation, samples need none.

    Attributes:
        pixels: [N, 1, H, W], uint8.
        labels: [N], int64.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """A batch at once: pixels [B, 1, H, W] uint8, labels [B], indices [B]."""
        chosen = indices_of(keys)
        return self.pixels[chosen], self.labels[chosen], chosen


@dataclass(frozen=True)
class ImageData:
    """A dataset with its training and test part."""

    name: str
    train: Images
    test: Images
    classes: int
    """Number of classes."""
    mean: float
    """Mean of the pixels, scaled to 0..1."""
    std: float
    """Standard deviation of the pixels, scaled to 0..1."""

    def __str__(self) -> str:
        """The name and the numbers of images, for the line that says what a run uses."""
        return f"{self.name} ({len(self.train)} train, {len(self.test)} test)"

    @property
    def facts(self) -> dict[str, Any]:
        """What result.json says about the data."""
        return {
            "dataset": self.name,
            "train_samples": len(self.train),
            "eval_samples": len(self.test),
            "image_size": self.size,
            "mean": self.mean,
            "std": self.std,
        }

    @property
    def class_names(self) -> list[str]:
        """Of clothes their names, else the numbers."""
        if self.name == "fashion-mnist":
            return list(CLOTHES)
        return [str(number) for number in range(self.classes)]

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed, besides the flags."""
        return {"train_samples": len(self.train), "classes": self.classes}

    @property
    def size(self) -> int:
        """Height and width of the images, in pixels."""
        return int(self.train.pixels.shape[-1])

    def normalise(self, pixels: Tensor) -> Tensor:
        """ToTensor and Normalize of torchvision, for a whole batch: [B, 1, H, W] float32."""
        return pixels.float().sub_(255 * self.mean).div_(255 * self.std)

    def collate(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """A `collate_fn`: images [B, 1, H, W] float32, labels [B], indices [B]."""
        pixels, labels, indices = batch
        return self.normalise(pixels), labels, indices

    def eval_loader(self, batch_size: int = 1000) -> "DataLoader[tuple[Tensor, Tensor, Tensor]]":
        """This rank's shard of the test set, in batches as `collate` returns them.

        Args:
            batch_size: per rank; it changes the speed, not the result.
        """
        shard = Shard(len(self.test))
        return DataLoader(self.test, batch_size, sampler=shard, collate_fn=self.collate)


def image_data(name: str, directory: Path, most: int | None = None) -> ImageData:
    """The dataset that `--dataset` names: digits, mnist, fashion-mnist, or a folder with idx files.

    Every rank calls this: one process per node downloads while the others wait.

    Args:
        name: the value of `--dataset`.
        directory: where the files of mnist and fashion-mnist are, or are downloaded to.
        most: the first of how many samples to train on; by default all.

    Raises:
        UserError: there is no such dataset, or its files are missing or damaged.
    """
    if name == "digits":
        found = digits()
    elif name in TORCHVISION:
        found = mnist(directory, name)
    elif Path(name).is_dir():
        found = idx_folder(Path(name))
    else:
        raise UserError(
            f"--dataset {name}: give digits, {', '.join(TORCHVISION)}, or a folder with idx files"
        )
    return replace(found, train=Images(found.train.pixels[:most], found.train.labels[:most]))


def digits() -> ImageData:
    """The 1,797 real 8x8 digits that come with scikit-learn.

    1,436 to train on, 361 to test, fixed and stratified.
    """
    pixels, labels = load_digits()
    pixels = (pixels.reshape(-1, 1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    train, test = (
        Images(torch.from_numpy(pixels[part]), torch.from_numpy(labels[part]))
        for part in stratified_split(labels, test_samples=361, seed=0)
    )
    return _data("digits", train, test)


def mnist(directory: Path, name: str = "mnist") -> ImageData:
    """MNIST or Fashion-MNIST from its four idx files; torchvision downloads them if need be.

    Every rank calls this: one process per node downloads while the others wait.

    Args:
        directory: holds the files (.gz or not) itself, or in the folders that torchvision makes.
        name: `mnist` or `fashion-mnist`.

    Raises:
        UserError: the files are damaged, or missing and the download fails.
    """
    return idx_folder(mnist_folder(directory, name), name)


def idx_folder(folder: Path, name: str | None = None) -> ImageData:
    """Any dataset in MNIST's format: train-images-idx3-ubyte, ..., t10k-labels-idx1-ubyte.

    Args:
        folder: holds the four files, packed by gzip (.gz) or not.
        name: of the dataset; by default the folder's.

    Raises:
        UserError: a file is missing, truncated or of another format, or images and labels differ
            in number.
    """
    return _data(name or str(folder), _part(folder, "train"), _part(folder, "t10k"))


def _data(name: str, train: Images, test: Images) -> ImageData:
    if name in NORMALISATION:
        mean, std = NORMALISATION[name]
    else:
        scaled = train.pixels.double() / 255
        mean, std = float(scaled.mean()), float(scaled.std()) or 1.0
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    return ImageData(name, train, test, classes, mean, std)


def _part(folder: Path, prefix: str) -> Images:
    images_file, pixels = read_idx(folder, f"{prefix}-images-idx3-ubyte", 3)
    labels_file, labels = read_idx(folder, f"{prefix}-labels-idx1-ubyte", 1)
    if len(pixels) != len(labels):
        raise UserError(
            f"{labels_file} has {len(labels)} labels for the {len(pixels)} images of {images_file}"
        )
    if len(pixels) == 0:
        raise UserError(f"{images_file} holds no image")
    height, width = pixels.shape[1:]
    if height != width or height < 8:
        raise UserError(f"{images_file}: images of {height}x{width}; expected squares from 8x8 up")
    return Images(pixels.unsqueeze(1), labels.long())


def read_idx(folder: Path, name: str, dimensions: int) -> tuple[Path, Tensor]:
    """Read an idx file of unsigned bytes (http://yann.lecun.com/exdb/mnist/), packed or not.

    Returns:
        The path that was read, and a uint8 tensor with the given number of dimensions.

    Raises:
        UserError: it is missing or truncated, or not an idx file.
    """
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise UserError(
            f"{folder / name}(.gz) is missing; --data-dir or --dataset must name a folder that "
            f"holds it"
        )
    try:
        content = path.read_bytes()
        data = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it is damaged; delete it and get it again"
        ) from None
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes([0, 0, 8, dimensions]):
        raise UserError(
            f"{path} is not an idx file of bytes with {dimensions} dimension(s): "
            f"it starts with {data[:4].hex()}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    if len(data) - header != math.prod(shape):
        raise UserError(
            f"{path} is damaged: it announces {math.prod(shape)} bytes and holds "
            f"{len(data) - header}; get it again"
        )
    values = np.frombuffer(bytearray(data), np.uint8, offset=header)
    return path, torch.from_numpy(values.reshape(shape))
