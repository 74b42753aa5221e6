"""Show which rank gets which sample, and how to restore the dataset order.

    python -m examples.mnist_ddp_spawn.further.sampler              # 3 processes, 10 samples

This program imports nothing from this repository, and starts its ranks with `mp.spawn`.
"""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch.utils.data import DistributedSampler, TensorDataset


def main(nproc: int = 3, samples: int = 10) -> None:
    """Show DistributedSampler, exact evaluation and process groups."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no socket that other machines can reach
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/rendezvous"  # or tcp://127.0.0.1:PORT with a free port
        mp.spawn(main_worker, (nproc, init_method, samples), nproc)  # prepends the rank


def main_worker(rank: int, world_size: int, init_method: str, samples: int) -> None:
    """Run the demonstration on one rank."""
    dist.init_process_group("gloo", init_method, world_size=world_size, rank=rank)
    training(samples)
    evaluation(samples)
    groups()
    dist.destroy_process_group()


def show(title: str, indices: list[int]) -> None:
    """Print every rank's samples, one line per rank. Every rank calls this."""
    of_ranks: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, indices)
    lines = [f"    rank {r}: " + " ".join(f"{i:2}" for i in own) for r, own in enumerate(of_ranks)]
    if dist.get_rank() == 0:
        print("\n".join([f"  {title}", *lines]), flush=True)


def training(samples: int) -> None:
    """Show DistributedSampler, and what `set_epoch` changes. Every rank calls this."""
    dataset = TensorDataset(torch.arange(samples))
    sampler = DistributedSampler(dataset, shuffle=False)
    show("not shuffled: rank r gets r, r + W, ...; the first samples are repeated", list(sampler))
    sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)
    show("drop_last: the remaining samples are left out", list(sampler))
    sampler = DistributedSampler(dataset, seed=0)
    for epoch in range(2):
        show(f"epoch {epoch} without set_epoch: always the same order, with repeats", list(sampler))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        show(f"epoch {epoch} with set_epoch({epoch}): a new permutation", list(sampler))


def evaluation(samples: int) -> None:
    """Restore the dataset order of predictions. Every rank calls this."""
    dataset, world_size = TensorDataset(torch.arange(samples)), dist.get_world_size()
    indices = list(DistributedSampler(dataset, shuffle=False))
    show("evaluation: each rank predicts 10 * index for its samples", indices)
    predictions = 10 * torch.tensor(indices)
    shards = [torch.empty_like(predictions) for _ in range(world_size)]
    dist.all_gather(shards, predictions)  # equal lengths, because samples are repeated
    ordered = torch.stack(shards, dim=1).flatten()[:samples]  # row k of rank r is sample k * W + r
    show("in dataset order, without duplicates, on every rank", ordered.tolist())


def groups() -> None:
    """Sum the numbers of the ranks 0, 2, 4, ... in a group of their own. Every rank calls this."""
    members = list(range(0, dist.get_world_size(), 2))
    group: Any = dist.new_group(members)  # ALL ranks call new_group; only members use the group
    total = torch.tensor([dist.get_rank()])
    if dist.get_rank() in members:
        dist.all_reduce(total, group=group)
    show(f"new_group({members}): members get the sum, other ranks keep their value", total.tolist())


if __name__ == "__main__":
    tyro.cli(main)
