"""What `Run` adds to a training step, by the number of ranks.

    python -m benchmarks.bookkeeping              # 1, 2, 4 and 8 processes on this machine
    python -m benchmarks.bookkeeping --ranks 2 --rounds 1 --steps 20

A step here is forward and backward of a small model, again and again, until 5 ms of the processor's
time have passed. Loops of two kinds take turns in the same processes: over the batches alone; and
over `run.steps`, with `run.log`, which count the samples, keep the loss, note the step for
`python -m common.who`, and agree with the other ranks on when to stop. Measured is what passes
between one step's computing and the next one's: the processor's time of the thread that trains; the
seconds, in which waiting shows as well; and, over all steps, the processor's time of all other
threads, gloo's among them. Of the ranks, the one that needs most counts.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import RanksMeasurement, compare, facts, medians, save
from benchmarks.ranks import on_ranks
from common.launch.args import start
from common.launch.flags import at_least
from common.launch.place import Place
from common.train.run import Run
from examples.your_model.args import Args as Flags

ALONE, OURS = "batches alone", "Run"
STEP = 0.005  # seconds of the processor: what a small model computes in a step
SHARE = 32  # samples of a rank in a step
WARM_UP = 100  # steps, in which the ranks find out how often to agree


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    steps: int = 400
    """Steps of each sample."""
    ranks: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, steps=self.steps, ranks=min(self.ranks, default=0))


class Batches:
    """Batches of samples' numbers, ready: a loader that costs next to nothing."""

    def __init__(self, steps: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.dataset = range(steps * SHARE * world_size)
        self.batches = torch.arange(rank, len(self.dataset), world_size).split(SHARE)

    def __len__(self) -> int:
        """Steps."""
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Each batch is its numbers, twice: what is trained on, and what is counted."""
        return ([numbers, numbers] for numbers in self.batches)


def measure(job: tuple[Args, Path], device: torch.device) -> dict[str, list[dict[str, float]]]:
    """Measure both kinds of loop in turn. Every rank calls this.

    Args:
        job: the flags of this program, and a folder for the run.
        device: of this rank.

    Returns:
        The samples of each kind: microseconds per step, those of the slowest rank.
    """
    args, out = job
    torch.set_num_threads(1)
    size, never = SHARE * dist.get_world_size(), 1 << 40
    flags = Flags(batch_size=size, epochs=never, checkpoint_every=never, out=out)
    batches = Batches(WARM_UP + args.steps)
    with Run(flags, device, "numbers") as run:
        run.resume()
        epochs = run.epochs(flags.epochs)
        kinds = {
            ALONE: partial(timed, batches, len(batches)),
            OURS: partial(one_epoch, run, epochs, batches),
        }
        return compare(kinds, args.rounds, warm_up=1)


def one_epoch(run: Run, epochs: Iterator[int], batches: Batches) -> dict[str, float]:
    """Time an epoch with all of a run's bookkeeping but its end. Every rank calls this."""
    next(epochs)
    found = timed(run.steps(batches), len(batches), run)
    run.state.epoch, run.state.batch = run.state.epoch + 1, 0
    return found


def timed(batches: Iterable[Any], steps: int, run: Run | None = None) -> dict[str, float]:
    """Microseconds per step of the slowest rank, without the first steps. Every rank calls this."""
    loss, compute = torch.tensor(1.0), small_model()
    ours = waits = began = 0.0
    computed = (0.0, 0.0)  # when the last step had been, by both clocks
    for step, _ in enumerate(batches):
        if step > WARM_UP:
            ours += time.thread_time() - computed[0]
            waits += time.perf_counter() - computed[1]
        elif step == WARM_UP:
            began = time.process_time() - time.thread_time()
        until = time.thread_time() + STEP
        while time.thread_time() < until:
            compute()
        computed = time.thread_time(), time.perf_counter()
        if run:
            run.log(loss)
    others = time.process_time() - time.thread_time() - began
    slowest = torch.tensor([ours, others, waits], dtype=torch.float64)
    slowest *= 1e6 / (steps - WARM_UP)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(("loop", "threads", "seconds"), slowest.tolist(), strict=True))


def small_model() -> Callable[[], object]:
    """Forward and backward of three layers: less than a millisecond."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    inputs = torch.randn(SHARE, 256)
    return lambda: model(inputs).square().mean().backward()


def main(place: Place, args: Args) -> None:
    """Compare, and write the result."""
    result: dict[str, Any] = facts("torch") | {"rounds": args.rounds, "steps": args.steps}
    result |= {"milliseconds_of_a_step": 1e3 * STEP, "ranks": {}}
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            found = on_ranks(ranks, place, measure, (args, Path(folder)))
        of = {
            figure: {kind: [round(one[figure], 2) for one in each] for kind, each in found.items()}
            for figure in ("loop", "threads", "seconds")
        }
        middle = {figure: medians(samples, 2) for figure, samples in of.items()}
        more = {figure: round(kinds[OURS] - kinds[ALONE], 2) for figure, kinds in middle.items()}
        added = {"main thread": more["loop"], "other threads": max(0.0, more["threads"])}
        percent = round(sum(added.values()) / (1e4 * STEP), 3)
        print(f"{ranks} rank(s): {added}, {percent} %", flush=True)
        result["ranks"][str(ranks)] = {
            "microseconds": of,
            "medians": middle,
            "added": added,
            "percent_of_the_step": percent,
        }
    save("bookkeeping", result, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.bookkeeping:main", ["benchmarks.harness"])
