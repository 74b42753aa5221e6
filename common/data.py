"""Data: embedded digits, MNIST-like files, exact shards for evaluation."""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from common.distributed import World, main_first
from common.errors import UserError

# mean and standard deviation of the training pixels, scaled to 0..1
NORMALISATION = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}


@dataclass(frozen=True)
class Images(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Images held in memory as bytes: no transform per sample, a batch is one indexing operation.

    Attributes:
        pixels: [N, 1, H, W], uint8.
        labels: [N], int64.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """A batch at once: pixels [B, 1, H, W] uint8, labels [B], indices [B]."""
        chosen = torch.tensor(indices, dtype=torch.long)  # a batch may be empty
        return self.pixels[chosen], self.labels[chosen], chosen


@dataclass(frozen=True)
class ImageData:
    """A dataset with its training and test part."""

    name: str
    train: Images
    test: Images
    classes: int
    mean: float
    """Mean of the pixels, scaled to 0..1."""
    std: float
    """Standard deviation of the pixels, scaled to 0..1."""

    @property
    def facts(self) -> dict[str, Any]:
        """What result.json says about the data."""
        return {"dataset": self.name, "train_samples": len(self.train), "eval_samples": len(self.test)}

    @property
    def size(self) -> int:
        """Height and width of the images, in pixels."""
        return int(self.train.pixels.shape[-1])

    def normalise(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """A `collate_fn`: ToTensor and Normalize for a whole batch, as `Images` hands it over.

        Returns:
            Images [B, 1, H, W] float32, labels [B], indices [B].
        """
        pixels, labels, indices = batch
        return pixels.float().sub_(255 * self.mean).div_(255 * self.std), labels, indices


def image_data(name: str, directory: Path, world: World) -> ImageData:
    """The dataset that `--dataset` names: digits, mnist, fashion-mnist, or a folder with idx files.

    Args:
        name: the value of `--dataset`.
        directory: where the files of mnist and fashion-mnist are, or are downloaded to.
        world: this process's world.

    Raises:
        UserError: no such dataset; its files are missing or damaged.
    """
    if name == "digits":
        return digits()
    if name in TORCHVISION:
        return mnist(world, directory, name)
    if Path(name).is_dir():
        return idx_folder(Path(name))
    raise UserError(f"--dataset {name}: give digits, {', '.join(TORCHVISION)}, or a folder with idx files")


def digits() -> ImageData:
    """The 1,797 real 8x8 digits that come with scikit-learn: 1,436 to train on, 361 to test, fixed and stratified."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels.reshape(-1, 1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    train, test = train_test_split(np.arange(len(labels)), test_size=361, stratify=labels, random_state=0)
    parts = [Images(torch.from_numpy(pixels[part]), torch.from_numpy(labels[part]).long()) for part in (train, test)]
    return _data("digits", parts[0], parts[1])


def mnist(world: World, directory: Path, name: str = "mnist") -> ImageData:
    """MNIST or Fashion-MNIST from its four idx files; downloaded by torchvision when they are not there.

    One process per node downloads while the others wait.

    Args:
        world: this process's world.
        directory: holds the files (.gz or not) itself, or in the folders that torchvision makes.
        name: `mnist` or `fashion-mnist`.

    Raises:
        UserError: the files are damaged, or cannot be had.
    """
    with main_first(world, f"download of {name}"):
        folder = _find(directory, name)
        if folder is None:
            _download(directory, name)
            folder = _find(directory, name)
            assert folder is not None
    return idx_folder(folder, name)


def idx_folder(folder: Path, name: str | None = None) -> ImageData:
    """Any dataset in MNIST's format: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-… (.gz or not).

    Raises:
        UserError: a file is missing, truncated, of another format, or images and labels differ in number.
    """
    train, test = (_part(folder, prefix) for prefix in ("train", "t10k"))
    return _data(name or str(folder), train, test)


def _data(name: str, train: Images, test: Images) -> ImageData:
    if name in NORMALISATION:
        mean, std = NORMALISATION[name]
    else:
        scaled = train.pixels.double() / 255
        mean, std = float(scaled.mean()), float(scaled.std()) or 1.0
    return ImageData(name, train, test, int(max(train.labels.max(), test.labels.max())) + 1, mean, std)


def _part(folder: Path, prefix: str) -> Images:
    images_file, pixels = read_idx(folder, f"{prefix}-images-idx3-ubyte", 3)
    labels_file, labels = read_idx(folder, f"{prefix}-labels-idx1-ubyte", 1)
    if len(pixels) != len(labels):
        raise UserError(f"{labels_file} has {len(labels)} labels for the {len(pixels)} images of {images_file}")
    if len(pixels) == 0:
        raise UserError(f"{images_file} holds no image")
    if pixels.shape[1] != pixels.shape[2] or pixels.shape[1] < 8:
        raise UserError(f"{images_file}: images of {pixels.shape[1]}x{pixels.shape[2]}; expected squares from 8x8 up")
    return Images(pixels.unsqueeze(1), labels.long())


def read_idx(folder: Path, name: str, dimensions: int) -> tuple[Path, Tensor]:
    """Read an idx file of unsigned bytes (http://yann.lecun.com/exdb/mnist/), packed by gzip or not.

    Returns:
        The path that was read, and a uint8 tensor with the given number of dimensions.

    Raises:
        UserError: it is missing, truncated, or something else than an idx file.
    """
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise UserError(f"{folder / name}(.gz) is missing; --data-dir or --dataset must name a folder that holds it")
    try:
        content = path.read_bytes()
        data = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): it is damaged; delete it and get it again") from None
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes([0, 0, 8, dimensions]):
        raise UserError(
            f"{path} is no idx file of bytes with {dimensions} dimension(s): it starts with {data[:4].hex()}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    if len(data) - header != math.prod(shape):
        raise UserError(
            f"{path} is damaged: it announces {math.prod(shape)} bytes and holds {len(data) - header}; get it again"
        )
    return path, torch.from_numpy(np.frombuffer(bytearray(data), np.uint8, offset=header).reshape(shape))


def _find(directory: Path, name: str) -> Path | None:
    candidates = (directory, directory / TORCHVISION[name] / "raw", directory / "raw")
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    complete = (all(any(folder.glob(f"{name}*")) for name in names) for folder in candidates)
    return next((folder for folder, whole in zip(candidates, complete, strict=True) if whole), None)


def _download(directory: Path, name: str) -> None:
    import torchvision  # 1 to 4 seconds, which only a download has to pay

    try:
        getattr(torchvision.datasets, TORCHVISION[name])(str(directory), download=True)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name} is not in {directory} and cannot be downloaded ({reason}); "
            f"put its four idx files there, or use --dataset digits, which needs no file"
        ) from None


class Shard(Sampler[int]):
    """The positions rank, rank + world size, ... of a dataset: each exactly once over all ranks, no padding."""

    def __init__(self, length: int, rank: int, size: int) -> None:
        self._positions = range(rank, length, size)

    def __iter__(self) -> Iterator[int]:
        """The positions, ascending."""
        return iter(self._positions)

    def __len__(self) -> int:
        """Number of positions of this rank: ranks may differ by one."""
        return len(self._positions)


def eval_loader(data: ImageData, world: World, batch_size: int = 1000) -> "DataLoader[tuple[Tensor, Tensor, Tensor]]":
    """The test set in exact shards. `batch_size` is per rank: it changes the speed, not the result."""
    shard = Shard(len(data.test), world.rank, world.size)
    return DataLoader(data.test, batch_size, sampler=shard, collate_fn=data.normalise)


def dealt(total: int, world: World) -> int:
    """How many of `total` samples this rank gets when they are dealt like cards: rank 0, 1, 2, ..., 0, 1, ..."""
    return len(range(world.rank, total, world.size))


def local_batch(batch_size: int, world: World) -> int:
    """The share of one rank in a global batch.

    Raises:
        UserError: the world size does not divide it.
    """
    if batch_size < 1 or batch_size % world.size:
        nearest = max(1, round(batch_size / world.size)) * world.size
        raise UserError(
            f"--batch-size {batch_size} (global) cannot be divided by {world.size} ranks; use {nearest}, for example"
        )
    return batch_size // world.size
