"""DataLoaders for an image folder, 8x8 digits or random pixels. Batches are bytes on the CPU."""

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from joblib import cpu_count
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms.v2 import functional as F

from common.data import absent_classes, image_data
from common.image_folder import ImageFolder, readable
from common.launch import UserError
from common.rank import print0

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's statistics; pixels in [0, 1]
DUMMY_STEPS = 100  # steps per epoch with --dummy


class InMemoryImages(Dataset[tuple[Tensor, Tensor]]):
    """Images as bytes [P, 3, size, size], repeated if P < N, and labels [N]; no random crops."""

    def __init__(self, pixels: Tensor, labels: Tensor, classes: Sequence[str]) -> None:
        self.pixels, self.labels, self.classes = pixels, labels, list(classes)
        self.columns = dict[str, list[str]]()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        """Return an image and its label; the key is an index or (epoch, index)."""
        index = index[1] if isinstance(index, tuple) else index
        return self.pixels[index % len(self.pixels)], self.labels[index]


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that can skip samples and yields (epoch, index) pairs.

    The pairs contain the epoch because persistent loader workers keep a copy of the dataset from
    the first epoch. `set_epoch` does not reach them, but random crops must differ between epochs.
    """

    skip = 0  # number of this rank's samples that the next iteration skips

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (epoch, index) for each of this rank's samples."""
        epoch, skip, self.skip = self.epoch, self.skip, 0
        return ((epoch, index) for index in islice(super().__iter__(), skip, None))


def image_loaders(
    data: Path | None,
    batch_size: int,
    image_size: int,
    seed: int,
    workers: int,
    *,
    rank: int | None = None,
    replicas: int | None = None,
    dummy: bool = False,
    pin_memory: bool = False,
    timeout: float = 120.0,
) -> tuple[Any, Any]:
    """Return the DataLoaders for the training and the test set. Every rank calls this.

    Batches are bytes [B, 3, image_size, image_size] and labels [B]. The training loader drops the
    last, smaller batch. The test loader yields samples rank, rank + replicas, ... in order. The
    class names are `loader.dataset.classes`.

    Args:
        data: folder with train/CLASS/* and val/CLASS/*; default: enlarged digits.
        batch_size: samples per replica and step.
        image_size: height and width of the images, in pixels.
        seed: seed of the sample order and the crops.
        workers: this rank's loader processes; -1 means its number of cores minus 1, up to 16.
        rank: index of this data-parallel replica; default: the global rank.
        replicas: number of data-parallel replicas; default: the world size.
        dummy: use random pixels instead of files, to measure the training speed.
        pin_memory: use page-locked memory, so that copies to a GPU do not block the host.
        timeout: maximum wait for a loader worker, in seconds.

    Raises:
        UserError: nodes have different files, or there is only one class; see also `ImageFolder`.
    """
    if workers < 0:
        share = cpu_count() // int(os.environ["LOCAL_WORLD_SIZE"])
        cores = max(share, torch.get_num_threads())  # under srun, a rank may see only its share
        workers = max(0, min(16, cores - 1)) if data else 0
    if dummy:
        train, test = _dummy_images(batch_size * (replicas or dist.get_world_size()), image_size)
    elif data is None:
        train, test = _enlarged_digits(image_size)
    else:
        train = ImageFolder(data / "train", image_size, seed)
        test = ImageFolder(data / "val", image_size, classes=train.classes)
        _check_same_on_all_ranks(data, train.samples + test.samples)
        if len(train.classes) < 2:
            raise UserError(f"{readable(data)}/train has only one class folder; add another class")
        if absent := absent_classes(train.classes, test.targets):
            print0(f"{readable(data)}/val has {absent}")
    loader: Any = functools.partial(
        DataLoader,
        batch_size=batch_size,
        num_workers=workers,  # forked, so that they share the list of files
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        timeout=timeout if workers else 0,
        generator=torch.Generator(),  # leaves the global generator to the model's dropout
    )
    sampler = ResumableSampler(train, replicas, rank, seed=seed, drop_last=True)
    shard = DistributedSampler(test, replicas, rank, shuffle=False)
    return loader(train, sampler=sampler, drop_last=True), loader(test, sampler=shard)


def normalize(
    pixels: Tensor,
    device: torch.device,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Copy bytes [B, 3, H, W] to the device, and normalize them there as float32.

    Bytes take a quarter of the memory of floats. Copies from pinned memory do not block the host.
    """
    images = pixels.to(device, non_blocking=True).to(torch.float32, memory_format=memory_format)
    mean, std = _statistics(device)
    return images.sub_(mean).div_(std)


@functools.cache  # creating a GPU tensor in every step would block the host
def _statistics(device: torch.device) -> list[Tensor]:
    """Return the channels' means and standard deviations [3, 1, 1], scaled to [0, 255]."""
    return [255 * torch.tensor(value, device=device).view(3, 1, 1) for value in (MEAN, STD)]


def _dummy_images(batch_size: int, size: int) -> list[InMemoryImages]:
    """Return a training and a test set of 64 repeated random images, with 1,000 classes."""
    pixels = torch.randint(256, (64, 3, size, size), dtype=torch.uint8)
    labels = torch.arange(DUMMY_STEPS * batch_size) % 1000
    names = [str(label) for label in range(1000)]
    return [InMemoryImages(pixels, part, names) for part in (labels, labels[: len(labels) // 10])]


def _enlarged_digits(size: int) -> list[InMemoryImages]:
    """Return a training and a test set of scikit-learn's digits, resized to `size` pixels."""
    digits, sets = image_data("digits", Path()), []
    for images, labels in (digits.train.tensors, digits.test.tensors):
        gray = (255 * (images * digits.std + digits.mean)).round().to(torch.uint8)
        pixels = F.resize(gray, [size, size]).expand(-1, 3, -1, -1)
        sets.append(InMemoryImages(pixels, labels, digits.class_names))
    return sets


def _check_same_on_all_ranks(data: Path, samples: Sequence[tuple[str, int]]) -> None:
    """Check that all nodes have the same files: paths determine labels and sample order."""
    files = repr([(path[len(str(data)) :], label) for path, label in samples])
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(files.encode()).digest())
    if len(set(digests)) > 1:
        raise UserError(f"{readable(data)} differs between nodes; copy the same files to all nodes")
