"""Mistakes that make ranks wait for each other forever: `python -m tests.faults.mistakes NAME --nproc N`.

Each is a plain loop of torch. The last rank makes the mistake, in step 3.
"""

import os
import signal
import time
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tyro.conf import OmitArgPrefixes, Positional

from common.launch.args import start
from common.launch.flags import Launch
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch

STEPS = 6
MISTAKEN = 3  # the step


@dataclass(frozen=True)
class Args:
    """The flags of the mistakes."""

    name: Annotated[str, Positional]
    """Which mistake."""
    launch: OmitArgPrefixes[Launch] = Launch()


def wrong(step: int, mistaken: int = MISTAKEN) -> bool:
    """Whether this rank makes a mistake in this step: the last one does, and says when."""
    if step != mistaken or dist.get_rank() != dist.get_world_size() - 1:
        return False
    print(f"mistake at {time.time()}", flush=True)
    return True


def extra_collective() -> None:
    for step in range(STEPS):
        if wrong(step):
            dist.broadcast(torch.ones(3), dist.get_rank())  # EXTRA
        dist.all_reduce(torch.ones(64, 10))  # HERE


def branch_around_a_collective() -> None:
    for step in range(STEPS):
        if not wrong(step):
            dist.all_reduce(torch.ones(64, 10))  # HERE
        dist.barrier()  # AFTER


def uneven_batches() -> None:
    for batch in range(STEPS):  # LOOP
        if wrong(batch, STEPS - 1):
            break
        dist.all_reduce(torch.ones(64, 10))  # HERE
    dist.all_gather_object([None] * dist.get_world_size(), "evaluation")  # AFTER


def mismatched_shapes() -> None:
    for step in range(STEPS):
        dist.all_reduce(torch.ones(32 if wrong(step) else 64, 10))  # HERE


def another_order() -> None:
    total, mean = torch.ones(64, 10), torch.ones(3)
    for step in range(STEPS):
        if wrong(step):
            works = dist.broadcast(mean, 0, async_op=True), dist.all_reduce(total, async_op=True)  # OTHER
        else:
            works = dist.all_reduce(total, async_op=True), dist.broadcast(mean, 0, async_op=True)  # HERE
        for work in works:
            assert work is not None
            work.wait()


def endless_loop() -> None:
    for step in range(STEPS):
        mistaken = wrong(step)
        while mistaken:  # LOOP
            continue  # BODY
        dist.all_reduce(torch.ones(64, 10))  # HERE


def stopped() -> None:
    for step in range(STEPS):
        if wrong(step):
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(64, 10))  # HERE


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        if wrong(index, 4 * MISTAKEN):
            time.sleep(3600)
        return torch.tensor(float(index))


def slow_loader() -> None:
    for batch in DataLoader(Numbers(), 4):  # LOADER
        dist.all_reduce(batch)  # HERE


def two_sends() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(MISTAKEN, STEPS):
        wrong(step)
        dist.send(torch.ones(64, 10), (rank + 1) % size)  # HERE
        dist.recv(torch.ones(64, 10), (rank - 1) % size)


def missing_set_epoch() -> None:
    data = list(torch.arange(48.0))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))  # ty: ignore[invalid-argument-type]
    for _ in range(3):
        for batch in loader:  # always in the same order
            dist.all_reduce(batch)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    place.export(local_rank)
    dist.init_process_group("gloo", init_method=JOB, timeout=args.launch.patience)
    globals()[args.name]()
    dist.destroy_process_group()


def main(place: Place, args: Args) -> None:
    launch(main_worker, place, args)


if __name__ == "__main__":
    start(Args, "tests.faults.mistakes:main")
