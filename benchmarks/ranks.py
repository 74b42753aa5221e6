"""Measurements in several processes on this machine: their start, and the time of the slowest."""

import json
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.harness import compare
from common.launch.args import fail
from common.launch.collectives import print0
from common.launch.device import choose_device
from common.launch.errors import UserError
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import hosted, launch
from examples.manual_allreduce_sgd.averaging import Averaging

Step = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """What every rank does: `measure(args, device)`; rank 0 writes what it returns to the file."""

    measure: Callable[[Any, torch.device], Any]
    args: Any
    file: Path


def on_ranks(ranks: int, place: Place, measure: Callable[..., Any], args: Any) -> Any:
    """What `measure(args, device)` returns on rank 0 of a new group of processes, as JSON.

    Raises:
        SystemExit: a rank failed, or a launcher has started this program.
    """
    if place.num_nodes > 1 or place.launcher in ("torchrun", "slurm"):
        fail(UserError("this benchmark starts its processes itself, on one machine"))
    group = replace(place, local_world_size=ranks, world_size=ranks, port=0)  # 0: a new store
    with tempfile.TemporaryDirectory() as folder, hosted(group) as here:
        job = Job(measure, args, Path(folder, "found.json"))
        launch(main_worker, here, job)
        return json.loads(job.file.read_text())


@record
def main_worker(local_rank: int, place: Place, job: Job) -> None:
    """One rank: join, measure, and let rank 0 write what was found."""
    place.export(local_rank)
    device, backend = choose_device(place.flags, local_rank)
    dist.init_process_group(backend, init_method=JOB, timeout=place.flags.patience)
    found = job.measure(job.args, device)
    if dist.get_rank() == 0:
        job.file.write_text(json.dumps(found))
    dist.destroy_process_group()


def time_steps(
    what: str,
    steps: Mapping[str, Step],
    rounds: int,
    repeats: int = 1,
    meet: Step = dist.barrier,
    alone: Collection[str] = (),
) -> dict[str, list[float]]:
    """Seconds of each step in each round, those of the slowest rank. Every rank calls this.

    Args:
        what: is measured, for a line with the medians.
        steps: by name; one round before the others does not count.
        rounds: samples of each step.
        repeats: steps in a row in one sample.
        meet: all ranks start when they have met; out of gloo's barrier, some come milliseconds
            after others.
        alone: the steps of rank 0 for which the others wait.
    """

    def measured(name: str) -> float:
        takes_part = dist.get_rank() == 0 or name not in alone
        meet()
        started = time.perf_counter()
        for _ in range(repeats if takes_part else 0):
            steps[name]()
        wait_for_devices()
        spent = (time.perf_counter() - started) / repeats if takes_part else 0.0
        slowest = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    samples = compare({name: partial(measured, name) for name in steps}, rounds, warm_up=1)
    line = ", ".join(f"{name} {1e3 * median(each):.2f}" for name, each in samples.items())
    print0(f"{what}, {dist.get_world_size()} rank(s), ms: {line}")
    return samples


def wait_for_devices() -> None:
    """Wait until all GPUs have done what was queued: they work behind the host's back."""
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)


def training_step(model: nn.Module, images: Tensor, way: Averaging | None = None) -> Step:
    """A step of SGD, whose gradients become the means over the ranks in some way, or stay apart."""
    labels, trained = torch.arange(len(images)) % 10, way.model if way else model
    optimizer = SGD(model.parameters(), 1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(trained(images), labels).backward()
        if way:
            way.average()
        optimizer.step()

    return step
