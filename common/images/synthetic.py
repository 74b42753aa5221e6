"""Synthetic images, generated in memory, to measure training without the reading of files."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from common.images.decode import Pixels
from common.images.folder import Batch


@dataclass(frozen=True)
class SyntheticImages(Dataset[Batch]):
    """A coloured pattern per class, and noise: so cheap to make that training does not notice it.

    Args:
        count: number of images.
        size: height and width, in pixels.
        number_of_classes: image i has class i modulo this.
        seed: of the patterns and the noise.
    """

    count: int
    size: int
    number_of_classes: int
    seed: int = 0
    cache: None = None

    @cached_property
    def _patterns(self) -> Pixels:
        random = np.random.default_rng(self.seed)
        return random.integers(0, 128, (self.number_of_classes, 7, 7, 3), np.uint8)

    @cached_property
    def _noise(self) -> Pixels:
        random = np.random.default_rng(self.seed + 1)
        return random.integers(0, 128, (8, self.size, self.size, 3), np.uint8)

    @property
    def digest(self) -> str:
        """Of what makes the images."""
        return f"synthetic {self.count} {self.number_of_classes} {self.seed}"

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return [f"pattern-{number}" for number in range(self.number_of_classes)]

    @property
    def labels(self) -> NDArray[np.int64]:
        """Numbers of the classes, [N]."""
        return np.arange(self.count) % self.number_of_classes

    @property
    def names(self) -> list[str]:
        """The names of the images."""
        return [f"synthetic-{index}" for index in range(self.count)]

    def __len__(self) -> int:
        """Number of images."""
        return self.count

    def __getitems__(self, keys: Sequence[Any]) -> Batch:
        """A batch at once; keys as those of `ImageFolder`."""
        pairs = np.array([key if isinstance(key, tuple) else (0, key) for key in keys])  # [B, 2]
        labels = pairs[:, 1] % self.number_of_classes
        repeats = -(-self.size // 7)
        images = self._patterns[labels].repeat(repeats, 1).repeat(repeats, 2)
        images = images[:, : self.size, : self.size]
        images = images + self._noise[pairs.sum(axis=1) % 8]  # [B, size, size, 3]
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
        indices = torch.from_numpy(pairs[:, 1].copy())
        return Batch(pixels, torch.from_numpy(labels.copy()), indices, [])
