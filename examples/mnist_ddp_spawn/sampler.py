"""Show which rank gets which sample, and how predictions return to dataset order.

    python -m examples.mnist_ddp_spawn.sampler              # 3 processes, 10 samples
    python -m examples.mnist_ddp_spawn.sampler --nproc 2 --samples 7

Every process prints its part.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset
from tyro.conf import OmitArgPrefixes

from common.data.samplers import Shard
from common.launch.args import start
from common.launch.collectives import print0
from common.launch.flags import Launch, at_least, check_cpu_only
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.evaluate import ordered_predictions


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
        check_cpu_only(self.launch)


def main(place: Place, args: Args) -> None:
    """Start the processes of this node."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the demonstration."""
    place.export(local_rank)
    dist.init_process_group("gloo", init_method=JOB, timeout=args.launch.patience)
    training(args)
    evaluation(args)
    groups(args)
    dist.destroy_process_group()


def show(title: str, local_indices: list[int]) -> None:
    """Print the samples of every rank, one line per rank. Every rank calls this."""
    everybody: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, local_indices)
    print0(f"  {title}")
    for rank, indices in enumerate(everybody):
        print0(f"    rank {rank}: " + " ".join(f"{index:2}" for index in indices))


def training(args: Args) -> None:
    """Part 1: DistributedSampler, and what `set_epoch` changes. Every rank calls this."""
    dataset, world_size = TensorDataset(torch.arange(args.samples)), dist.get_world_size()
    print0(f"1. Training: DistributedSampler deals {args.samples} samples to {world_size} ranks")
    sampler = DistributedSampler(dataset, shuffle=False)
    show("not shuffled: rank r takes positions r, r + W, r + 2W, ...", list(sampler))
    padding = sampler.total_size - args.samples
    print0(f"    ({padding} of them repeated at the end, so that all ranks get as many)\n")

    sampler = DistributedSampler(dataset, seed=0)
    for epoch in range(args.epochs):
        show(f"epoch {epoch} without set_epoch: always the same", list(sampler))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        title = f"epoch {epoch} with set_epoch({epoch}): a new permutation, the same on all ranks"
        show(title, list(sampler))


def evaluation(args: Args) -> None:
    """Part 2: exact shards. Every rank calls this."""
    print0("\n2. Evaluation: exact shards, nothing repeated, and the results back in dataset order")
    indices = list(Shard(args.samples))
    show("each rank predicts its positions (here the prediction is 10 * index):", indices)
    ordered = ordered_predictions(10 * torch.tensor(indices, dtype=torch.long), args.samples)
    print0(f"    in dataset order: {' '.join(map(str, ordered.tolist()))}")


def groups(args: Args) -> None:
    """Part 3: a group of some ranks. Every rank calls this."""
    print0(
        "\n3. A process group of some ranks only: dist.new_group, called by ALL ranks, "
        "used by its members"
    )
    members = list(range(0, dist.get_world_size(), 2))
    # Its time-out is torch's 30 minutes, not that of init_process_group, unless it is given.
    group = dist.new_group(members, timeout=args.launch.patience)
    total = torch.tensor([float(dist.get_rank())])
    if isinstance(group, dist.ProcessGroup):  # the others get a placeholder
        dist.all_reduce(total, group=group)
    sums: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(sums, total.item())
    for rank, value in enumerate(sums):
        role = "sum of the ranks in the group" if rank in members else "not a member"
        print0(f"    rank {rank}: {role}: {value:g}")


if __name__ == "__main__":
    start(Args, "examples.mnist_ddp_spawn.sampler:main")
