"""Which rank gets which sample, in which epoch, and how predictions return to dataset order.

python -m examples.mnist_ddp_spawn.sampler              # 3 processes, 10 samples
python -m examples.mnist_ddp_spawn.sampler --nproc 2 --samples 7
"""

from dataclasses import dataclass

from tyro.conf import OmitArgPrefixes

from common.flags import at_least, begin, leave
from common.launcher import Launch, Place


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    samples: int = 10
    """Samples in the dataset."""
    epochs: int = 3
    """Epochs to show."""
    launch: OmitArgPrefixes[Launch] = Launch(nproc=3)

    def __post_init__(self) -> None:
        at_least(1, samples=self.samples, epochs=self.epochs)


if __name__ == "__main__":  # before the heavy imports
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset

from common.data import Shard
from common.distributed import World, launch, say, taking_part
from common.metrics import ordered_predictions


def show(world: World, title: str, mine: list[int]) -> None:
    """Print the samples of every rank, one line per rank."""
    everybody: list[list[int]] = [[] for _ in range(world.size)]
    dist.all_gather_object(everybody, mine)
    say(world, f"  {title}")
    for rank, indices in enumerate(everybody):
        say(world, f"    rank {rank}: " + " ".join(f"{index:2}" for index in indices))


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the demonstration."""
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        dataset = TensorDataset(torch.arange(args.samples))

        say(world, f"1. Training: DistributedSampler deals {args.samples} samples to {world.size} ranks")
        sampler = DistributedSampler(dataset, world.size, world.rank, shuffle=False)
        show(world, "not shuffled: rank r takes positions r, r + W, r + 2W, ...", list(sampler))
        padding = sampler.total_size - args.samples
        say(world, f"    ({padding} of them repeated at the end, so that all ranks get as many)\n")

        sampler = DistributedSampler(dataset, world.size, world.rank, shuffle=True, seed=0)
        for epoch in range(args.epochs):
            show(world, f"epoch {epoch} without set_epoch: always the same", list(sampler))
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            show(
                world, f"epoch {epoch} with set_epoch({epoch}): a new permutation, the same on all ranks", list(sampler)
            )

        say(world, "\n2. Evaluation: exact shards, nothing repeated, and the results back in dataset order")
        mine = list(Shard(args.samples, world.rank, world.size))
        show(world, "each rank predicts its positions (here the prediction is 10 * index):", mine)
        ordered = ordered_predictions(torch.tensor(mine, dtype=torch.long) * 10, args.samples, world)
        say(world, f"    in dataset order: {' '.join(map(str, ordered.tolist()))}")

        say(world, "\n3. A process group of some ranks only: dist.new_group, called by ALL ranks, used by its members")
        members = list(range(0, world.size, 2))
        group = dist.new_group(members)
        total = torch.tensor([float(world.rank)])
        if isinstance(group, dist.ProcessGroup):  # the others get a placeholder
            dist.all_reduce(total, group=group)
        sums: list[float] = [0.0] * world.size
        dist.all_gather_object(sums, total.item())
        for rank, value in enumerate(sums):
            say(
                world,
                f"    rank {rank}: {'sum of the ranks in the group' if rank in members else 'not a member'}: {value:g}",
            )


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
