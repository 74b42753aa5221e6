"""Jobs for test_manual_allreduce_shares.py: `python -m tests.examples.manual_allreduce_shares_jobs NAME`."""

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from common.launch.args import start
from common.launch.place import Place
from common.launch.record import record
from common.launch.spawn import launch
from common.train.checks import CheckError
from examples.manual_allreduce_sgd import shares, train
from tests.examples.manual_allreduce_checks import altered
from tests.examples.manual_allreduce_jobs import CPU, Args, cut_off_and_resumed, options, put, run_job

WAYS = ("ring", "bucketed", "shared-memory", "ddp")
UNEVEN = {2: ("3,1", "5,2"), 3: ("1,2,1", "3,1,3")}  # the second does not divide 24 samples
MEAN = ("loss_sum * world_size / batch_samples", "loss_sum / max(1, len(labels))")


def trainings(args: Args) -> None:
    """Unequal shares, by several algorithms; and code that is broken on purpose."""
    divides, does_not = UNEVEN[dist.get_world_size()]
    for way in WAYS:
        train.train(options(args, way, shares=does_not), CPU)
    train.train(options(args, "flat", shares=divides, out=args.folder / "divides"), CPU)
    with patch.object(shares, "SECONDS", 0.05):
        train.train(options(args, "flat", shares="auto", out=args.folder / "auto"), CPU)
    unweighted = altered("train", *MEAN)
    unweighted.train(options(args, "flat", shares=divides, out=args.folder / "unweighted"), CPU)
    forgotten: Any = altered("shares", '"shard": (0, 1), ', "")
    with patch.object(train, "division", forgotten.division), pytest.raises(CheckError, match="were lost"):
        train.train(options(args, "flat", shares=divides, out=args.folder / "uncounted"), CPU)


def of_machines(samples: int, *_: object) -> float:
    """Seconds of a step where rank 0 computes three times as fast, and half a step is the same for all."""
    return (1 if dist.get_rank() == 0 else 3) * (0.012 + 0.001 * samples)


def measured(args: Args) -> None:
    """What is measured decides; a resumed run does not measure again."""
    with patch.object(shares, "step_seconds", of_machines):
        found = shares.measured_shares(120, *[None] * 2)  # ty: ignore[invalid-argument-type]
    calls = []

    def noted(samples: int, *_: object) -> float:
        calls.append(samples)
        return of_machines(samples)

    with patch.object(shares, "step_seconds", noted):
        cut_off_and_resumed(args, "auto", "ring", shares="auto")
    assert len(calls) == 2 * shares.ROUNDS, "of the two runs that were not resumed"
    if dist.get_rank() == 0:
        put(found)


JOBS = {"trainings": trainings, "measured": measured}


def main(place: Place, args: Args) -> None:
    """Run the job in every process."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of a job."""
    run_job(JOBS, local_rank, place, args)


if __name__ == "__main__":
    start(Args, "tests.examples.manual_allreduce_shares_jobs:main")
