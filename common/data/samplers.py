"""Which rank gets which sample.

Nothing here communicates: every rank computes its own part from its rank and the world size, which
are by default those of the process group. A program in which several ranks read the same
samples (the stages of a pipeline) passes the number of its shard, and that of all shards, instead.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

LARGE = 1 << 24  # samples; from here on the order of an epoch is computed, and not kept
BLOCK = 1 << 16  # positions that are computed at once: 2 MB with what comes in between
ROUNDS = 8
BITS = 0xFFFFFFFF  # of a hash: 32


class Shard(Sampler[int]):
    """Positions rank, rank + W, rank + 2W, ... of a dataset: over all W ranks, each exactly once.

    Args:
        length: samples in the dataset.
        rank: number of the shard; by default this process's rank.
        world_size: number of shards W; by default that of the process group.
    """

    def __init__(self, length: int, rank: int | None = None, world_size: int | None = None) -> None:
        rank, world_size = shard(rank, world_size)
        self._positions = range(rank, length, world_size)

    def __iter__(self) -> Iterator[int]:
        """The positions, ascending."""
        return iter(self._positions)

    def __len__(self) -> int:
        """Number of positions of this rank: ranks may differ by one."""
        return len(self._positions)


class Permutation:
    """A random order of 0 to length - 1 in no memory: any part of it is computed.

    A Feistel network on numbers that are written with two digits, of as many values each as make up
    little more than `length`: in turns a hash of one digit is added to the other. What falls
    outside is sent through again until it falls inside. (Black and Rogaway, "Ciphers with arbitrary
    finite domains", CT-RSA 2002.) As random as `torch.randperm`, and not a secret.

    Args:
        length: of the permutation, below 2**62.
        generator: draws the keys of the hashes.
    """

    def __init__(self, length: int, generator: torch.Generator) -> None:
        self.length = length
        self._rows = math.isqrt(max(0, length - 1)) + 1
        self._columns = max(1, -(-length // self._rows))
        self._keys = torch.randint(1 << 32, (ROUNDS,), generator=generator).tolist()

    def __len__(self) -> int:
        """Number of samples."""
        return self.length

    def __getitem__(self, positions: Tensor) -> Tensor:
        """The samples at some positions, [N], int64."""
        found = self._shuffled(positions)
        while (outside := (found >= self.length).nonzero().squeeze(1)).numel():
            found[outside] = self._shuffled(found[outside])
        return found

    def _shuffled(self, numbers: Tensor) -> Tensor:
        """A permutation of 0 to rows x columns - 1."""
        row, column = numbers // self._columns, numbers % self._columns
        for number, key in enumerate(self._keys):
            if number % 2:
                column = _turned(column, row, key, self._columns)
            else:
                row = _turned(row, column, key, self._rows)
        return row * self._columns + column


def _turned(digit: Tensor, other: Tensor, key: int, values: int) -> Tensor:
    """A digit of so many values, plus a hash of the other. No product reaches 2**63."""
    mixed = other ^ key  # multipliers and shifts: lowbias32 and MurmurHash2
    mixed = mixed.mul_(0x7FEB352D).bitwise_and_(BITS)
    mixed ^= mixed >> 15
    mixed = mixed.mul_(0x5BD1E995).bitwise_and_(BITS)
    mixed ^= mixed >> 16
    turned = mixed.mul_(values).bitwise_right_shift_(32).add_(digit)
    return turned.sub_((turned >= values) * values)


class GlobalBatchSampler(Sampler[list[tuple[int, int]]]):
    """One rank's part of every global batch; an epoch can begin at any of its batches.

    A permutation of the samples, seeded by (seed, epoch), is cut into global batches; of each, rank
    r gets the positions r, r + W, r + 2W, ... The last batch is as large as what is left. Where W
    does not divide it, the ranks with one sample less get one of the batch again, at the end: DDP
    needs all ranks in every step. (`local_samples` counts without this padding.)

    The permutation is `torch.randperm`'s; from 2**24 samples on, for which that would take 128 MB
    and more on each rank, a `Permutation`.

    Args:
        length: samples in the dataset.
        batch_size: samples in a global batch.
        seed: of the permutations.
        rank: which part of each batch; by default this process's rank.
        world_size: into how many parts W a batch is cut; by default that of the process group.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world_size = shard(rank, world_size)
        self.epoch = self._skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of an epoch; without this, every epoch has the same order."""
        self.epoch = epoch

    def skip(self, batches: int) -> None:
        """Begin the next iteration, and only that one, after this many batches of its epoch."""
        self._skipped = batches

    def __len__(self) -> int:
        """Global batches in an epoch, those that are skipped included."""
        return -(-self.length // self.batch_size)

    def order(self) -> Tensor | Permutation:
        """The permutation of the epoch, [length], the same on all ranks."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        if self.length >= LARGE:
            return Permutation(self.length, generator)
        return torch.randperm(self.length, generator=generator)

    def _own(self, first: int, end: int) -> Iterator[Tensor]:
        """This rank's part, with the padding, of each global batch from one to before another."""
        order, size = self.order(), self.batch_size
        whole = min(end, self.length // size)
        own = self._positions(size)
        block = max(1, BLOCK // len(own))
        for start in range(first, whole, block):
            starts = torch.arange(start, min(whole, start + block)) * size
            yield from order[(starts.unsqueeze(1) + own).flatten()].split(len(own))
        if first <= whole < end:
            yield order[whole * size + self._positions(self.length - whole * size)]

    def _positions(self, samples: int) -> Tensor:
        """This rank's positions in a global batch of so many samples."""
        share = -(-samples // self.world_size)
        return (torch.arange(share) * self.world_size + self.rank) % samples

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Pairs (epoch, index): the epoch reaches loader workers, which outlive epochs, with it."""
        # A generator: a DataLoader with workers makes two iterators and uses the second, so what is
        # skipped must not be forgotten before the first batch is drawn.
        first, self._skipped = self._skipped, 0
        for samples in self._own(first, len(self)):
            yield [(self.epoch, index) for index in samples.tolist()]

    def smallest(self, most: int) -> int:
        """The fewest samples that a rank passes to the model at once, of all batches of an epoch.

        Args:
            most: the most samples that it passes at once; it cuts its part of a batch into these.
        """
        share = -(-(self.length % self.batch_size or self.batch_size) // self.world_size)
        return min(share, share % most or most)

    def seen(self) -> Tensor:
        """How often this rank has each sample in the batches to skip next: [length], int32."""
        counts = torch.zeros(self.length, dtype=torch.int32)
        for number, samples in enumerate(self._own(0, self._skipped)):
            left = min(self.batch_size, self.length - number * self.batch_size)
            counts[samples[: len(range(self.rank, left, self.world_size))]] += 1
        return counts


def shard(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The given rank and world size, or those of the process group."""
    return (
        dist.get_rank() if rank is None else rank,
        dist.get_world_size() if world_size is None else world_size,
    )


def indices_of(keys: Sequence[Any]) -> Tensor:
    """The indices [B] that a sampler's keys name.

    Args:
        keys: B indices, or B pairs (epoch, index) as `GlobalBatchSampler` gives them.
    """
    indices = [key[1] if isinstance(key, tuple) else key for key in keys]
    return torch.tensor(indices, dtype=torch.long)
