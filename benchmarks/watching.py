"""What it costs that every rank can be asked what it does (`python -m common.who`).

    python -m benchmarks.watching             # two minutes, quiet, please
    python -m benchmarks.watching --rounds 1 --steps 20

A step is forward, backward, an all-reduce of the gradients by a ring of messages, SGD, and an
all-reduce of the loss, on as many processes as `--nproc` says, with a thread each. Three kinds of
processes take turns:

* not watched: no thread that answers, no notes of messages, torch's flight recorder off;
* watched: as every run is;
* asked every second: watched, and `python -m common.top` reads all ranks.

The processor's time is that of all threads of a rank, so that other programs of the machine change
it little. The time of a step is that of the slowest rank.
"""

import json
import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import RanksMeasurement, compare, facts, medians, ratios, save
from benchmarks.ranks import training_step
from common.launch.args import start
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import hosted, launch
from common.launch.who import ask, watcher
from examples.manual_allreduce_sgd.gradients import averaging

WITHOUT, WATCHED, ASKED = "not watched", "watched", "asked every second"
WIDTH = 512
WARM_UP = 50  # steps


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    steps: int = 1500
    """Steps of each sample."""
    batch: int = 64
    """Samples per rank and step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, steps=self.steps, batch=self.batch)
        if self.launch.nproc is not None and self.launch.nproc < 2:
            raise UserError("--nproc: give at least 2, which exchange gradients")


@dataclass(frozen=True)
class Sample:
    """What a rank is to do, and the folder in which rank 0 leaves what it found."""

    kind: str
    args: Args
    folder: Path


@record
def main_worker(local_rank: int, place: Place, sample: Sample) -> None:
    """One rank: train, and let rank 0 write the seconds of a step."""
    place.export(local_rank)
    if sample.kind == WITHOUT:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
        watcher.watch = lambda *_: None  # ty: ignore[invalid-assignment]
    dist.init_process_group("gloo", init_method=JOB, timeout=place.flags.patience)
    if dist.get_rank() == 0:
        watcher.publish(sample.folder)
    figures = measure(sample.args)
    if dist.get_rank() == 0:
        (sample.folder / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def measure(args: Args) -> dict[str, float]:
    """Milliseconds of a step of the slowest rank, and of its processor. Every rank calls this."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH), nn.ReLU()) * 2
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    step = training_step(model, torch.randn(args.batch, WIDTH), averaging("ring", model))
    loss = torch.zeros(1)
    spent = torch.zeros(2, dtype=torch.float64)
    for number in range(WARM_UP + args.steps):
        if number == WARM_UP:
            dist.barrier()
            spent -= torch.tensor([time.perf_counter(), time.process_time()])
        step()
        dist.all_reduce(loss)
    spent += torch.tensor([time.perf_counter(), time.process_time()])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    wall, processor = (1e3 * spent / args.steps).tolist()
    return {"step": wall, "processor": processor}


def sample(kind: str, place: Place, args: Args) -> dict[str, float]:
    """Train once with new processes of this kind; milliseconds per step."""
    with tempfile.TemporaryDirectory() as name, hosted(place) as here:
        folder, over = Path(name), threading.Event()
        asking = threading.Thread(target=ask_every_second, args=(folder, over))
        if kind == ASKED:
            asking.start()
        try:
            launch(main_worker, here, Sample(kind, args, folder))
        finally:
            over.set()
            if kind == ASKED:
                asking.join()
        return json.loads((folder / "figures.json").read_text())


def ask_every_second(folder: Path, over: threading.Event) -> None:
    """Ask all ranks what they do, as long as they do anything."""
    while not over.wait(1.0):
        with suppress(UserError):  # they have not met yet
            ask.Job.of(folder).everybody()


def main(place: Place, args: Args) -> None:
    """Compare, and write the result."""
    group = replace(place, port=0)
    programs = {kind: partial(sample, kind, group, args) for kind in (WITHOUT, WATCHED, ASKED)}
    before = facts("torch")
    found = compare(
        programs,
        args.rounds,
        show=lambda kind, of: f"{kind}: {of['step']:.2f} ms, processor {of['processor']:.2f} ms",
    )
    result: dict[str, Any] = before | {
        "ranks": place.world_size,
        "rounds": args.rounds,
        "steps": args.steps,
        "batch_per_rank": args.batch,
    }
    for figure in ("step", "processor"):
        values = {kind: [one[figure] for one in each] for kind, each in found.items()}
        beside = ratios(values, WITHOUT)
        more = {kind: [100 * (one - 1) for one in each] for kind, each in beside.items()}
        result[figure] = {
            "milliseconds": values,
            "medians": medians(values),
            "percent_more": medians(more, 2),
        }
    save("watching", result, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.watching:main")
