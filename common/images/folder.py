"""A folder of images as a dataset that loads a whole batch at once.

Three things make it fast: of a JPEG only the cropped region is decoded, it is resized once,
straight to its final size, and pixels stay bytes until the batch is on the device (`loader`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from common.data.samplers import indices_of
from common.images.cache import PixelCache
from common.images.crop import middle, random_crop, resize
from common.images.decode import Box, BrokenImageError, Pixels, decode, dimensions
from common.images.find import readable
from common.images.index import listed_images
from common.launch.errors import UserError


@dataclass(frozen=True)
class Batch:
    """What a loader worker sends: bytes, which are a quarter of floats."""

    images: Tensor
    """[B, 3, size, size], uint8, in channels-last order."""
    labels: Tensor
    """[B], int64."""
    indices: Tensor
    """[B], int64: which samples of the dataset."""
    broken: list[str]
    """Why a sample was replaced by its successor, if any was."""

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory, from which a GPU copies by itself (for DataLoader)."""
        images, labels = self.images.pin_memory(), self.labels.pin_memory()
        return Batch(images, labels, self.indices, self.broken)


class ImageFolder(Dataset[Batch]):
    """The images of `root/<class>/**`, in torchvision's order (`find_images`).

    Attributes:
        labels: numbers of the classes, [N], ascending.
        classes: their names.
        files: the paths of all images, relative to the root.
        digest: of the names and classes of all images.
        unused: what lies there and is not used, in words.
        cache: decoded pixels, if any.

    Args:
        root: the folder.
        size: height and width of the images in a batch, in pixels.
        training: random crops and flips; otherwise the middle.
        seed: of everything random.
        skip_broken: replace a broken image by the next one of its class, instead of raising.
        cache: decoded pixels.
        classes: the names in the order of their numbers; by default those of the folders, sorted.
        index: folders to keep the list of files in (`index_places`), so that it is made once.

    Raises:
        UserError: as `find_images`.
    """

    def __init__(
        self,
        root: Path,
        size: int,
        training: bool,
        seed: int = 0,
        skip_broken: bool = False,
        cache: PixelCache | None = None,
        classes: Sequence[str] = (),
        index: Sequence[Path] = (),
    ) -> None:
        self.root, self.size, self.training, self.seed = root, size, training, seed
        self.skip_broken, self.cache = skip_broken, cache
        found = listed_images(root, classes, index)
        self.classes, self.unused, self.digest = found.classes, found.unused, found.digest
        self.labels, self.files = found.labels, found.files

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def file(self, index: int) -> Path:
        """The path of an image."""
        return self.root / self.files[index]

    @property
    def names(self) -> list[str]:
        """The paths of all images, relative to the root."""
        return list(self.files)

    def mistake(self, index: int, error: Exception) -> UserError:
        """What to tell the user about a broken image."""
        return UserError(
            f"{readable(self.file(index))} cannot be used ({error}): "
            f"remove or replace it, or give --skip-broken"
        )

    def pixels(self, index: int) -> Pixels:
        """A whole image, decoded: [H, W, 3].

        Raises:
            BrokenImageError: it is broken.
        """
        content = self.file(index).read_bytes()
        return decode(content, (0, 0, *dimensions(content)))

    def __getitems__(self, keys: Sequence[Any]) -> Batch:
        """A batch at once.

        Args:
            keys: B indices, or for training B pairs (epoch, index).

        Raises:
            UserError: an image is broken; with `skip_broken`, all of its class are.
        """
        images = np.empty((len(keys), self.size, self.size, 3), np.uint8)  # [B, size, size, 3]
        labels = np.empty(len(keys), np.int64)
        broken: list[str] = []
        for row, key in enumerate(keys):
            epoch, index = key if isinstance(key, tuple) else (0, key)
            images[row], labels[row] = self._load_or_next(epoch, index, broken), self.labels[index]
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
        return Batch(pixels, torch.from_numpy(labels), indices_of(keys), broken)

    def _load_or_next(self, epoch: int, index: int, broken: list[str]) -> Pixels:
        """An image, or the first after it in its class that is not broken."""
        first, end = np.searchsorted(self.labels, self.labels[index] + np.array([0, 1])).tolist()
        for successor in range(end - first):
            chosen = first + (index - first + successor) % (end - first)
            try:
                return self._load(epoch, chosen)
            except (BrokenImageError, OSError) as error:
                if not self.skip_broken:
                    raise self.mistake(chosen, error) from None
                broken.append(f"{readable(self.file(chosen))} ({error})")
        where = readable(self.root / self.classes[self.labels[index]])
        raise UserError(f"{where}: no image can be read, the last one because of {broken[-1]}")

    def _load(self, epoch: int, index: int) -> Pixels:
        """One image, cropped, resized and flipped: [size, size, 3]."""
        if self.cache:
            whole = self.cache.pixels(index)  # [H, W, 3]
            if whole is None:
                raise BrokenImageError("broken when the cache was built")
            box, flip = self._crop(epoch, index, *whole.shape[:2])
            top, left, rows, columns = box
            region = whole[top : top + rows, left : left + columns]
        else:
            content = self.file(index).read_bytes()
            box, flip = self._crop(epoch, index, *dimensions(content))
            region = decode(content, box)
        return resize(region, self.size, flip)

    def _crop(self, epoch: int, index: int, height: int, width: int) -> tuple[Box, bool]:
        """Which part of an image to load, and whether to flip it."""
        if self.training:
            return random_crop(self.seed, epoch, index, height, width)
        return middle(height, width), False


class Labelled(Protocol):
    """A dataset that knows its labels without loading an image."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """[N]."""


@dataclass(frozen=True)
class LabelsOnly(Dataset[Batch]):
    """The samples of a dataset without their pixels, for the stages of a pipeline that see none."""

    images: Labelled

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.images.labels)

    def __getitems__(self, keys: Sequence[Any]) -> Batch:
        """A batch with images of no pixels, [B, 3, 0, 0]; nothing is read for it."""
        indices = indices_of(keys)
        labels = torch.from_numpy(self.images.labels)[indices]
        return Batch(torch.empty(len(keys), 3, 0, 0, dtype=torch.uint8), labels, indices, [])
