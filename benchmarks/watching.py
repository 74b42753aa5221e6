"""What it costs that every rank can be asked what it does (`python -m common.who`).

    python -m benchmarks.watching             # two minutes; a busy machine does little harm
    python -m benchmarks.watching --rounds 1 --steps 20

A step is forward, backward, an all-reduce of the gradients by a ring of messages, SGD, and an
all-reduce of the loss, on as many processes as `--nproc` says, with a thread each. Runs of two
kinds take turns: watched, as every run is; and asked every second, as `python -m common.top` does.
What is ours costs so little that the time of a step does not show it. So it is measured by itself:

* the thread that answers: its processor time by the kernel's count, per step;
* the notes of messages: the time of one, without the message, by the number per step.

Collectives are recorded by torch's flight recorder, which is on in any training with torch.
"""

import json
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import RanksMeasurement, compare, facts, medians, save
from benchmarks.ranks import training_step
from common.launch.args import start
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import hosted, launch
from common.launch.who import ask, calls, watcher
from examples.manual_allreduce_sgd.gradients import averaging

WATCHED, ASKED = "watched", "asked every second"
WIDTH = 256
WARM_UP = 50  # steps


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    steps: int = 1500
    """Steps of each sample."""
    batch: int = 32
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
    dist.init_process_group("gloo", init_method=JOB, timeout=place.flags.patience)
    if dist.get_rank() == 0:
        watcher.publish(sample.folder)
    figures = measure(sample.args)
    if dist.get_rank() == 0:
        (sample.folder / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def measure(args: Args) -> dict[str, float]:
    """Microseconds per step, those of the slowest rank. Every rank calls this."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH), nn.ReLU()) * 2
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    step = training_step(model, torch.randn(args.batch, WIDTH), averaging("ring", model))
    loss = torch.zeros(1)
    for _ in range(WARM_UP):
        step()
    dist.barrier()
    began, answered, noted = time.perf_counter(), answering(), messages()
    for _ in range(args.steps):
        step()
        dist.all_reduce(loss)
    spent = [time.perf_counter() - began, answering() - answered]
    per_step = [1e6 * seconds / args.steps for seconds in spent]
    per_step.append((messages() - noted) / args.steps * note_microseconds())
    slowest = torch.tensor(per_step, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(("step", "thread", "notes"), slowest.tolist(), strict=True))


def answering() -> float:
    """Seconds of the processor that the thread which answers has used."""
    (thread,) = (one for one in threading.enumerate() if one.name == "who")
    file = Path(f"/proc/self/task/{thread.native_id}/schedstat")
    return int(file.read_text().split()[0]) / 1e9


def messages() -> int:
    """Messages that this rank has sent and received."""
    return sum(calls.counts.values())


class Nothing:
    """Stands for a message's work."""


def note_microseconds(repeats: int = 20_000) -> float:
    """What a note costs a message: the median of ten measurements, which leave no notes behind."""
    work, tensors = Nothing(), [torch.zeros(1)]
    plain = lambda *_: work  # noqa: E731
    ways = (plain, calls.noted("measured", plain))
    found = []
    for _ in range(10):
        spent = []
        for way in ways:
            began = time.perf_counter()
            for _ in range(repeats // 10):
                way(None, tensors, 0, 0)
            spent.append(time.perf_counter() - began)
        found.append(1e6 * (spent[1] - spent[0]) / (repeats // 10))
    return median(found)


def sample(kind: str, place: Place, args: Args) -> dict[str, float]:
    """Train once with new processes of this kind; microseconds per step."""
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
    programs = {kind: partial(sample, kind, group, args) for kind in (WATCHED, ASKED)}
    before = facts("torch")
    found = compare(
        programs,
        args.rounds,
        show=lambda kind, of: (
            f"{kind}: {of['step']:.0f} us, thread {of['thread']:.2f} us, notes {of['notes']:.2f} us"
        ),
    )
    result: dict[str, Any] = before | {
        "ranks": place.world_size,
        "rounds": args.rounds,
        "steps": args.steps,
        "batch_per_rank": args.batch,
        "kinds": {},
    }
    for kind, samples in found.items():
        of = {figure: [round(one[figure], 3) for one in samples] for figure in samples[0]}
        middle = medians(of)
        share = 100 * (middle["thread"] + middle["notes"]) / middle["step"]
        result["kinds"][kind] = {
            "microseconds": of,
            "medians": middle | {"percent_of_the_step": round(share, 3)},
        }
    save("watching", result, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.watching:main", ["benchmarks.harness"])
