"""Data: embedded digits, MNIST-like files, exact shards for evaluation."""

import functools
import gc
import gzip
import math
import multiprocessing
import re
import signal
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import util
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from common.distributed import World, main_first
from common.errors import UserError
from common.precision import Numerics
from common.seed import seed_loader_worker

Item = TypeVar("Item")
# mean and standard deviation of the training pixels, scaled to 0..1
NORMALISATION = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels per channel, in the same way
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

    raw = directory / TORCHVISION[name] / "raw"
    before = set(raw.glob("*"))
    try:
        getattr(torchvision.datasets, TORCHVISION[name])(str(directory), download=True)
    except (OSError, RuntimeError) as error:
        for path in set(raw.glob("*")) - before:  # torchvision leaves a file with another checksum there
            path.unlink()
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name} is not in {directory} and cannot be downloaded ({reason}); "
            f"put its four idx files there, or use --dataset digits, which needs no file"
        ) from None


def indices_of(keys: Sequence[Any]) -> Tensor:
    """The indices [B] that a sampler's keys name: indices themselves, or pairs (epoch, index) as of `StepSampler`."""
    return torch.tensor([key[1] if isinstance(key, tuple) else key for key in keys], dtype=torch.long)


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


class StepSampler(Sampler[list[tuple[int, int]]]):
    """One rank's part of every global batch, from any step of any epoch on.

    A permutation of the samples, seeded by (seed, epoch), is cut into global batches; rank r gets the positions r,
    r + W, ... of each. The last batch is as large as what is left. Where the world size does not divide it, the ranks
    with one sample less get one from the batch again, as the last: DDP needs all ranks in every step. `dealt` counts
    a rank's samples without it.

    Args:
        length: samples in the dataset.
        batch_size: samples in a global batch.
        world: this process's world.
        seed: of the permutations.
    """

    def __init__(self, length: int, batch_size: int, world: World, seed: int) -> None:
        self._length, self._batch_size, self._world, self._seed = length, batch_size, world, seed
        self._epoch = self._start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the permutation of an epoch, and the step to begin with."""
        self._epoch, self._start = epoch, start

    def __len__(self) -> int:
        """Steps in an epoch."""
        return -(-self._length // self._batch_size)

    def order(self) -> Tensor:
        """The permutation of the epoch, [length], the same on all ranks."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self._epoch) % 2**63)
        return torch.randperm(self._length, generator=generator)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Pairs (epoch, index): the epoch travels with the index to workers that outlive epochs."""
        order = self.order()
        for step in range(self._start, len(self)):
            batch = order[step * self._batch_size : (step + 1) * self._batch_size]
            share = -(-len(batch) // self._world.size)
            positions = torch.arange(share) * self._world.size + self._world.rank
            yield [(self._epoch, index) for index in batch[positions % len(batch)].tolist()]

    def smallest(self, most: int) -> int:
        """The fewest samples that a rank has at once in an epoch, when it cuts its batches into parts of `most`."""
        share = -(-(self._length % self._batch_size or self._batch_size) // self._world.size)
        return min(share, share % most or most)

    def seen(self) -> Tensor:
        """How often this rank has trained on each sample in this epoch before the step to begin with: [N], int32."""
        counts = torch.zeros(self._length, dtype=torch.int32)
        for batch in self.order()[: self._start * self._batch_size].split(self._batch_size):
            counts[batch[self._world.rank :: self._world.size]] += 1
        return counts


@dataclass(frozen=True)
class Batches:
    """Batches of images, on the device and normalised.

    On CUDA a batch is copied and normalised on a stream of its own: the host is ahead of the device, so that happens
    while the device computes with the batch before.

    Args:
        loader: gives `images.Batch`.
        numerics: device and memory layout.
    """

    loader: "DataLoader[Any]"
    numerics: Numerics
    broken: set[str] = field(default_factory=set)
    """The replaced images and the reasons, so far, on this rank."""

    @property
    def dataset(self) -> Any:
        """What the loader loads."""
        return self.loader.dataset

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images [B, 3, H, W] and labels [B] on the device, indices [B] on the CPU.

        Raises:
            UserError: an image is broken.
        """
        device = self.numerics.device
        std, mean = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (STD, MEAN))
        scale, shift = 1 / (255 * std), -mean / std  # once per epoch: copying them would make the host wait
        side = torch.cuda.Stream(device) if device.type == "cuda" else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(device))  # for scale and shift
        for batch in unwrapped(self.loader):
            self.broken.update(batch.broken)
            with torch.cuda.stream(side):  # no stream: does nothing
                images = self.numerics.images(batch.images).float().mul_(scale).add_(shift)  # [B, 3, H, W]
                labels = batch.labels.to(device, non_blocking=True)
            if side is not None:
                computing = torch.cuda.current_stream(device)
                computing.wait_stream(side)
                for tensor in (images, labels):
                    tensor.record_stream(computing)  # the memory stays until it has computed
            yield images, labels, batch.indices


def unwrapped(batches: Iterable[Item]) -> Iterator[Item]:
    """The batches of a loader; a user's mistake that a worker process found is raised without the worker's traceback.

    Raises:
        UserError: that, or that no batch comes.
    """
    _end_loader_workers_at_exit()
    try:
        yield from batches
        return
    except UserError as error:
        mistake = UserError(str(error).strip().splitlines()[-1].partition("UserError: ")[2] or str(error))
    except RuntimeError as error:
        found = re.match(r"DataLoader timed out after ([\d.]+?)(\.0)? seconds", str(error))
        if not found:
            raise
        mistake = UserError(
            f"no batch came from the loader's workers within {found[1]} s: see what they printed above; in a "
            f"container, /dev/shm may be too small (--shm-size 1g), and --workers 0 needs none"
        )
    # Nothing may hold the loader's frames any more: when it is gone, so are its workers and its semaphores.
    gc.collect()  # an exception and the frame that raised it hold each other
    raise mistake


def train_loader(
    dataset: Any, batch_size: int, world: World, numerics: Numerics, seed: int, workers: int | None
) -> tuple[Batches, StepSampler]:
    """The training set: shuffled, in global batches of `batch_size`, resumable at any step (`set_epoch`).

    Args:
        dataset: gives `images.Batch`.
        batch_size: GLOBAL; the caller has checked that the world size divides it (`local_batch`).
        world: this process's world.
        numerics: device and memory layout.
        seed: of the order.
        workers: loader processes of this rank; None chooses (`default_workers`).
    """
    sampler = StepSampler(len(dataset), batch_size, world, seed)
    return Batches(_loader(dataset, world, workers, batch_sampler=sampler), numerics), sampler


def eval_batches(dataset: Any, batch_size: int, world: World, numerics: Numerics, workers: int | None) -> Batches:
    """The evaluation set in exact shards. `batch_size` is per rank: it changes the speed, not the result."""
    shard = Shard(len(dataset), world.rank, world.size)
    return Batches(_loader(dataset, world, workers, batch_size=batch_size, sampler=shard), numerics)


def _loader(dataset: Any, world: World, workers: int | None, **order: Any) -> "DataLoader[Any]":
    workers = default_workers(world) if workers is None else workers
    return DataLoader(
        dataset,
        **order,
        num_workers=workers,
        # A batch that a worker could not hand over would be waited for without end.
        timeout=world.timeout.total_seconds() if workers else 0,
        # Forked workers share the list of files, and start at once; spawned ranks would start them as they were.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        collate_fn=_as_it_is,
        worker_init_fn=_start_worker,
        pin_memory=world.device.type == "cuda",
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # the loader's own: drawing from the global one would make resuming inexact
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(number: int) -> None:
    """Loader workers leave signals to the rank that started them."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # both reach whole process groups: Ctrl-C, `timeout`, SLURM
    seed_loader_worker(number)


@functools.cache
def _end_loader_workers_at_exit() -> None:
    # Before `multiprocessing` ends a process, it asks its children with SIGTERM to end, and waits for them: but they
    # leave that signal to the rank, or have inherited its handler.
    util.Finalize(None, _end_loader_workers, exitpriority=1)


def _end_loader_workers() -> None:
    """End those that still wait for work: the loader of a rank that failed is not taken down in order."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader's handler would complain of killed workers
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def default_workers(world: World) -> int:
    """Loader processes per rank: beside a GPU all of its share of the cores but one, on a CPU one in eight."""
    if world.device.type == "cuda":
        return max(1, min(16, world.cores - 1))
    return world.cores // 8  # training needs the cores itself


def eval_loader(data: ImageData, world: World, batch_size: int = 1000) -> "DataLoader[tuple[Tensor, Tensor, Tensor]]":
    """The test set in exact shards. `batch_size` is per rank: it changes the speed, not the result."""
    shard = Shard(len(data.test), world.rank, world.size)
    return DataLoader(data.test, batch_size, sampler=shard, collate_fn=data.normalise)


def dealt(total: int, world: World) -> int:
    """How many of `total` samples this rank gets when they are dealt like cards: rank 0, 1, 2, ..., 0, 1, ..."""
    return len(range(world.rank, total, world.size))


def local_batch(batch_size: int, world: World, accumulate: int = 1) -> int:
    """The share of one rank, and of one of its backward passes, in a global batch.

    Raises:
        UserError: the world size, or its product with the number of backward passes, does not divide it.
    """
    parts = world.size * accumulate
    if batch_size < 1 or batch_size % parts:
        passes = f" x {accumulate} backward passes" if accumulate > 1 else ""
        nearest = max(1, round(batch_size / parts)) * parts
        raise UserError(
            f"--batch-size {batch_size} (global) cannot be divided by {world.size} ranks{passes}; "
            f"use {nearest}, for example"
        )
    return batch_size // parts
