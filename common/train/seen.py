"""The check that the ranks together train on each sample of an epoch exactly once.

A rank notes what it has trained on, and at the end of the epoch the notes are added up. Up to 2**24
samples a note is a count per sample; of more samples it is a few sums, of any number of samples
the same 32 bytes.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from common.train.checks import CheckError, check_seen_once

LARGE = 1 << 24  # samples; from here on sums, as the order is computed (common/data/samplers.py)
BLOCK = 1 << 16  # numbers that are hashed at once
Words = NDArray[np.uint64]
KEYS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)  # of the two hashes
WAITING = 1 << 12  # samples that are noted at once: those of one small batch would cost 50 µs
HALF = np.uint64(32)  # bits


class Seen(Protocol):
    """What this rank has trained on in an epoch."""

    def add(self, indices: Tensor, count: int | None = None) -> None:
        """Note that samples were trained on.

        Args:
            indices: their numbers in the dataset, int64, on the CPU.
            count: how many of them, from the first on; by default all. The others are padding.
        """

    def so_far(self, counted: bool) -> list[int]:
        """What a checkpoint has to keep, the same on all ranks. Every rank calls this.

        Args:
            counted: whether this rank's samples count; of ranks that train on the same samples,
                only those of one do.
        """

    def check(self, counted: bool) -> None:
        """Check that all ranks together have seen each sample once. Every rank calls this.

        Args:
            counted: as of `so_far`.

        Raises:
            CheckError: samples were lost, or trained on twice.
        """


def seen(samples: int, before: Sequence[int] = ()) -> Seen:
    """The notes of a rank for an epoch of so many samples.

    Args:
        samples: in the dataset.
        before: what `so_far` gave to the checkpoint from which the epoch goes on.
    """
    return Sums(samples, before) if samples >= LARGE else Counts(samples)


class _Collected(ABC):
    """Numbers of samples, collected until there are enough for `_add_up`."""

    def __init__(self) -> None:
        self._numbers, self._filled = np.empty(WAITING, np.int64), 0

    def add(self, indices: Tensor, count: int | None = None) -> None:
        """Note that samples were trained on."""
        numbers = indices.numpy()[:count]
        for start in range(0, len(numbers), WAITING):
            part = numbers[start : start + WAITING]
            if self._filled + len(part) > WAITING:
                self._add_up()
            self._numbers[self._filled : self._filled + len(part)] = part
            self._filled += len(part)

    def _collected(self) -> NDArray[np.int64]:
        """What has been collected, and will not be given out again."""
        filled, self._filled = self._filled, 0
        return self._numbers[:filled]

    @abstractmethod
    def _add_up(self) -> None: ...


class Counts(_Collected):
    """How often each sample was seen.

    A checkpoint keeps nothing of it: the resumed rank adds what its sampler gave before.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = torch.zeros(samples, dtype=torch.int32)

    def _add_up(self) -> None:
        numbers = torch.from_numpy(self._collected())
        self.counts.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.int32))

    def so_far(self, counted: bool) -> list[int]:
        """Nothing. Every rank may call this, or one alone."""
        return []

    def check(self, counted: bool) -> None:
        """Add the counts up and look for one that is not 1. Every rank calls this."""
        self._add_up()
        check_seen_once(self.counts * counted)


class Sums(_Collected):
    """How many samples were seen, and the sums of their numbers and of two hashes, modulo 2**64.

    Lost and doubled samples cannot make up for each other, but by a chance of 1 in 2**128: they
    would need the same hashes.
    """

    def __init__(self, samples: int, before: Sequence[int] = ()) -> None:
        super().__init__()
        self.samples, self.before = samples, before
        self.sums = np.zeros(2 + len(KEYS), np.uint64)

    def _add_up(self) -> None:
        self.sums += _sums(self._collected().view(np.uint64))

    def so_far(self, counted: bool) -> list[int]:
        """The sums over all ranks, with those before a resume. Every rank calls this."""
        return _over_ranks(self._own(counted)).tolist()

    def check(self, counted: bool) -> None:
        """Compare with the sums of all samples, of which each rank adds up a part.

        Every rank calls this.
        """
        expected = _expected(self.samples, dist.get_rank(), dist.get_world_size())
        over = _over_ranks(self._own(counted) - expected)
        if over.any():
            raise CheckError(f"of {self.samples} samples of the epoch, {_wrong(over)}")

    def _own(self, counted: bool) -> Words:
        self._add_up()
        before = self.before if dist.get_rank() == 0 else ()
        return self.sums * np.uint64(counted) + np.array(before or [0], np.uint64)


def _sums(numbers: Words) -> Words:
    """How many, and the sums of the numbers and of two hashes of each, modulo 2**64."""
    hashes = (_hash(numbers, key).sum() for key in KEYS)
    return np.array([len(numbers), numbers.sum(), *hashes], np.uint64)


def _hash(numbers: Words, key: int) -> Words:
    """64 bits of each number: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = (numbers + np.uint64(key)) * np.uint64(KEYS[0])
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@functools.cache  # the same in every epoch
def _expected(samples: int, rank: int, world_size: int) -> Words:
    """The sums of one rank's part of all samples."""
    first, end = (samples * part // world_size for part in (rank, rank + 1))
    total = np.zeros(2 + len(KEYS), np.uint64)
    for start in range(first, end, BLOCK):
        total += _sums(np.arange(start, min(end, start + BLOCK), dtype=np.uint64))
    return total


def _over_ranks(sums: Words) -> Words:
    """Add up over the ranks, modulo 2**64.

    In halves: a sum of int64 must not overflow.
    """
    halves = np.stack([sums & np.uint64(0xFFFFFFFF), sums >> HALF]).astype(np.int64)
    total = torch.from_numpy(halves)
    dist.all_reduce(total)
    low, high = total.numpy().astype(np.uint64)
    return low + (high << HALF)


def _wrong(over: Words) -> str:
    """What is wrong, from the sums of what was seen less those of all samples."""
    count = int(over[:1].view(np.int64)[0])
    what = "was lost" if count < 0 else "was trained on twice"
    one = over if count > 0 else np.uint64(0) - over
    if abs(count) == 1 and (_sums(one[1:2]) == one).all():
        return f"number {one[1]} {what}"
    if count == 0:
        return "as many were lost as were trained on more than once"
    many = "were lost" if count < 0 else "were trained on more than once"
    return f"{abs(count)} or more {many}"
