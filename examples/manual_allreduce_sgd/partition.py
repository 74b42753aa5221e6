"""A dataset cut into parts, one for each rank, without losing a sample."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from common.data import ImageData, local_batch
from common.distributed import World
from common.errors import UserError


@dataclass(frozen=True)
class DataPartitioner:
    """Parts of a dataset: every sample is in exactly one, in an order drawn at random.

    `int(size * samples)` samples for each part would lose the remainder: 7 ranks lose 3 of 60,000. Here the largest
    remainders get it. Samples are dealt like cards, in proportion to the sizes: with equal sizes part r has positions
    r, r + W, r + 2W, ... of the permutation, so that the ranks' batches together are the batches of one process.

    Args:
        samples: in the dataset.
        sizes: shares of the parts; they add up to 1.
        seed: of the permutation; the same on all ranks, another in each epoch.
    """

    samples: int
    sizes: Sequence[float]
    seed: int = 1234

    def __post_init__(self) -> None:
        if min(self.sizes, default=-1) < 0 or abs(sum(self.sizes) - 1) > 1e-6:
            raise UserError(f"the sizes of the parts, {list(self.sizes)}, are no shares that add up to 1")

    def use(self, rank: int) -> list[int]:
        """The indices of the samples of one part, in the order of the permutation."""
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed)).numpy()
        shares = np.array(self.sizes) * self.samples
        lengths = np.floor(shares + 1e-9).astype(int)
        lengths[np.argsort(lengths - shares, kind="stable")[: self.samples - lengths.sum()]] += 1
        owner = np.repeat(np.arange(len(lengths)), lengths)
        card = np.concatenate([np.arange(length) for length in lengths])  # its number within the part
        with np.errstate(divide="ignore"):
            due = (card + 1) / np.array(self.sizes)[owner]
        return order[owner[np.lexsort((owner, due))] == rank].tolist()


def partition_dataset(
    data: ImageData, batch_size: int, epoch: int, world: World
) -> tuple[list[list[int]], "DataLoader[tuple[Tensor, Tensor, Tensor]]"]:
    """This rank's part of an epoch, in batches that together with the other ranks' have `batch_size` samples.

    All ranks get the same number of batches. The last ones may differ in length by one sample, and one may be empty.

    Returns:
        The indices of each batch, and the loader of the batches.

    Raises:
        UserError: the world size does not divide the batch size. (`128 / float(size)` would give DataLoader a float,
            which it refuses.)
    """
    share = local_batch(batch_size, world)
    mine = DataPartitioner(len(data.train), [1 / world.size] * world.size, 1234 + epoch).use(world.rank)
    steps = -(-len(data.train) // batch_size)
    batches = [mine[step * share : (step + 1) * share] for step in range(steps)]
    return batches, DataLoader(data.train, batch_sampler=batches, collate_fn=data.normalise)
