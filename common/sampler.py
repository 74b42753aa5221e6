"""A DistributedSampler for runs that resume in the middle of an epoch."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DistributedSampler


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that can skip samples and yields (epoch, index) pairs.

    The epoch is part of the key because persistent loader workers keep a copy of the dataset from
    the first epoch. `set_epoch` does not reach them, but random crops must differ between epochs.
    """

    _skipped = 0

    def skip(self, samples: int) -> None:
        """Skip this rank's first `samples` samples in the next iteration.

        Later iterations start at the first sample.
        """
        self._skipped = samples

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (epoch, index) for each of this rank's samples."""
        epoch, skipped, self._skipped = self.epoch, self._skipped, 0
        return ((epoch, index) for index in islice(super().__iter__(), skipped, None))
