"""Measurements in several processes on this machine: their start, and the time of the slowest."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.launch.args import fail
from common.launch.device import choose_device
from common.launch.errors import UserError
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import hosted, launch

Step = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """What every rank does.

    Args:
        measure: called with the arguments and the rank's device; a function of a module. What it
            returns on rank 0 is the result, and becomes JSON.
        args: its first argument.
        file: for the result.
    """

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


def seconds(
    step: Step, repeats: int = 1, meet: Step = dist.barrier, takes_part: bool = True
) -> Callable[[], float]:
    """A call that measures a step: the seconds of the slowest rank. Every rank calls it.

    Args:
        step: what is measured.
        repeats: steps in a row in one measurement.
        meet: all ranks start when they have met; out of gloo's barrier, some come milliseconds
            after others.
        takes_part: whether this rank does the step; otherwise it waits for the others.
    """

    def measured() -> float:
        meet()
        started = time.perf_counter()
        for _ in range(repeats if takes_part else 0):
            step()
        wait_for_devices()
        spent = (time.perf_counter() - started) / repeats if takes_part else 0.0
        slowest = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    return measured


def wait_for_devices() -> None:
    """Wait until all GPUs have done what was queued: they work behind the host's back."""
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)
