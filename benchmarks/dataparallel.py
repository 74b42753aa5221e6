"""Compare nn.DataParallel's eight steps and DDP on two cores with training on one core.

    python -m benchmarks.dataparallel

Each CPU core acts as a device. The program times three variants: a single-threaded replica, the
manual eight steps with one thread per replica, and DDP with one process per core. It reports the
time of the slowest process.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness
from benchmarks.harness import Claim, Measurement, Result, Table, compare, on_ranks, ratio, timed
from common.data import DigitNet
from examples.mnist_dataparallel.eight_steps import EightSteps

ONE, EIGHT, DDP = "one replica, one core", "eight steps, two threads", "DDP, two processes"
BATCHES = (8, 32, 128, 512)
FASTER = 1.4  # minimum speed relative to one core, with the largest batch


def make_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return a function that performs one training step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step() -> None:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def compare_steps(batch: int, rounds: int) -> dict[str, list[float]]:
    """Time one core, the eight steps and DDP for a batch size, in seconds. Both ranks call this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = torch.randn(batch, 1, 28, 28), torch.arange(batch) % 10
    torch.set_num_threads(world_size)  # EightSteps divides this number by its thread count
    eight = EightSteps(DigitNet(28, 10), [torch.device("cpu")] * world_size)
    torch.set_num_threads(1)
    chunk = slice(rank, None, world_size)
    steps: dict[str, Callable[[], None]] = {
        ONE: make_step(DigitNet(28, 10), images, labels),
        EIGHT: make_step(eight, images, labels),
    }
    if rank > 0:  # rank 0's second thread uses this rank's core
        steps = dict.fromkeys(steps, lambda: None)
    steps[DDP] = make_step(DistributedDataParallel(DigitNet(28, 10)), images[chunk], labels[chunk])
    repeats = max(4, 2048 // batch)
    return compare({n: partial(timed, s, repeats, 2) for n, s in steps.items()}, rounds)


def measure(args: Measurement) -> Result:
    """Compare the speed of one core, the eight steps and DDP for each batch size."""
    tables, claims = dict[str, Table](), []
    batches = BATCHES[-1:] if args.quick else BATCHES
    for batch in batches:
        seconds = on_ranks(2, compare_steps, batch, 1 if args.quick else args.rounds)
        speeds = {
            n: [o / v for v, o in zip(s, seconds[ONE], strict=True)] for n, s in seconds.items()
        }
        tables[f"Speed of a step, batch {batch}"] = Table("times one core", speeds)
        if batch == BATCHES[-1]:
            claims = [
                Claim(
                    f"a step of {batch} images, {name}, faster than one core",
                    ratio(seconds, ONE, name),
                    FASTER,
                )
                for name in (EIGHT, DDP)
            ]
    return Result({"model": "DigitNet, 28x28 pixels", "batches": batches}, tables, claims)


if __name__ == "__main__":
    harness.main("dataparallel", measure)
