"""Which rank gets which sample.

Nothing here communicates: every rank computes its own part from its rank and the world size, which
are by default those of the process group. A program in which several ranks read the same
samples (the stages of a pipeline) passes the number of its shard, and that of all shards, instead.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler


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


class GlobalBatchSampler(Sampler[list[tuple[int, int]]]):
    """One rank's part of every global batch; an epoch can begin at any of its batches.

    A permutation of the samples, seeded by (seed, epoch), is cut into global batches; of each, rank
    r gets the positions r, r + W, r + 2W, ... The last batch is as large as what is left. Where W
    does not divide it, the ranks with one sample less get one of the batch again, at the end: DDP
    needs all ranks in every step. (`local_samples` counts without this padding.)

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

    def order(self) -> Tensor:
        """The permutation of the epoch, [length], the same on all ranks."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.length, generator=generator)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Pairs (epoch, index): the epoch reaches loader workers, which outlive epochs, with it."""
        # A generator: a DataLoader with workers makes two iterators and uses the second, so what is
        # skipped must not be forgotten before the first batch is drawn.
        first, self._skipped = self._skipped, 0
        for batch in self.order().split(self.batch_size)[first:]:
            share = -(-len(batch) // self.world_size)
            positions = torch.arange(share) * self.world_size + self.rank
            yield [(self.epoch, index) for index in batch[positions % len(batch)].tolist()]

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
        for batch in self.order().split(self.batch_size)[: self._skipped]:
            counts[batch[self.rank :: self.world_size]] += 1
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
