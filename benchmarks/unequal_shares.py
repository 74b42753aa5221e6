"""What a slower machine costs two ranks: with unequal shares, and with fewer meetings.

    python -m benchmarks.unequal_shares      # three minutes; nothing else may run
    python -m benchmarks.unequal_shares --rounds 1 --epochs 1 --steps 32

Shares: each of two ranks has a core to itself, but on the second core a process counts as fast as
it can, so that the rank there gets half of it. `examples.manual_allreduce_sgd` trains with equal
shares and with `--shares auto`, and with equal shares without that process, all in one run.

Delays: a rank sleeps in random steps, for the same sum of seconds whatever `--every` is. Either
rank 1 alone has all delays, or each rank has half of them. Nobody is disturbed otherwise.
"""

import contextlib
import io
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import SGD

from benchmarks.harness import RanksMeasurement, compare, facts, medians, save, speedups
from benchmarks.ranks import on_ranks
from common.data.models import DigitNet
from common.launch.args import start
from common.launch.collectives import broadcast_object, print0
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.launch.place import Place
from common.train import summary
from common.train.log import Log
from common.train.precision import Precision
from examples.manual_allreduce_sgd import train
from examples.manual_allreduce_sgd.local import LocalSgd

RANKS = 2
EQUAL, AUTO, FREE = "equal shares", "--shares auto", "equal shares, nothing else runs"
EVERY = (1, 8, 32)
WHO = {"rank 1 alone": (0.0, 1.0), "each rank half": (0.5, 0.5)}  # its part of the delays
BUSY = "import itertools; all(map(lambda _: True, itertools.count()))"


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    epochs: int = 4
    """Passes over the digits in each training."""
    batch: int = 240
    """GLOBAL batch size."""
    steps: int = 96
    """Steps of a training with delays."""
    delay: float = 20.0
    """Milliseconds of a delay, of which there are half as many as steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, epochs=self.epochs, batch=self.batch, steps=self.steps)
        at_least(0, delay=self.delay)
        if len(os.sched_getaffinity(0)) < RANKS:
            raise UserError(f"{RANKS} cores are needed: one for each rank")


def measure(args: Args, device: torch.device) -> dict[str, Any]:
    """Seconds per step of everything. Every rank calls this."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))[:RANKS]
    for thread in Path("/proc/self/task").iterdir():  # gloo's, too
        os.sched_setaffinity(int(thread.name), {cores[dist.get_rank()]})
    folder = Path(broadcast_object(tempfile.mkdtemp))
    number = itertools.count()
    programs = {
        name: lambda name=name: trained(args, name, folder / str(next(number)), cores[1], device)
        for name in (EQUAL, AUTO, FREE)
    }
    show = lambda name, of: f"{name}: {1e3 * of['seconds']:.2f} ms, {of['shares']}"  # noqa: E731
    shares = compare(programs, args.rounds, warm_up=1, show=show if dist.get_rank() == 0 else None)
    found: dict[str, Any] = {"shares": shares, "delays": {}}
    for who in WHO:
        ways = {f"every {every}": partial(delayed, args, who, every) for every in EVERY}
        ways["no delays"] = partial(delayed, args, "", 1)
        found["delays"][who] = compare(ways, args.rounds, warm_up=1)
        middle = {name: round(1e3 * median(of), 2) for name, of in found["delays"][who].items()}
        print0(f"{who}, ms per step: {middle}")
    return found


@contextlib.contextmanager
def busy(core: int) -> Generator[None]:
    """Meanwhile, a process uses a core as much as it gets."""
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        os.sched_setaffinity(process.pid, {core})
        try:
            yield
        finally:
            process.kill()


def trained(args: Args, name: str, out: Path, core: int, device: torch.device) -> dict[str, Any]:
    """Seconds of a step of a whole training, and its shares. Every rank calls this."""
    flags = train.Args(
        algorithm="ring",
        shares="auto" if name == AUTO else "equal",
        epochs=args.epochs,
        batch_size=args.batch,
        out=out,
        amp=Precision("fp32"),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(summary, "draw_curves", lambda *_: None))
        stack.enter_context(patch.object(Log, "write_events", lambda _: None))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if dist.get_rank() == 0 and name != FREE:
            stack.enter_context(busy(core))
        dist.barrier()
        train.train(flags, device)
        dist.barrier()
    found = broadcast_object(lambda: json.loads((out / "result.json").read_text()))
    seconds = found["seconds"]["train"] / found["steps"]
    return {"seconds": seconds, "shares": found["shares"]}


def delayed(args: Args, who: str, every: int) -> float:
    """Seconds of a step of local SGD with delays. Every rank calls this."""
    rank = dist.get_rank()
    part = WHO[who][rank] if who else 0.0
    chance = random.Random(rank)  # noqa: S311 - no secret
    sleeps = set(chance.sample(range(args.steps), round(part * args.steps / 2)))
    torch.manual_seed(0)
    model = DigitNet(8)
    optimizer = SGD(model.parameters(), 0.01, 0.5)
    way = LocalSgd(model, optimizer, every)
    images, labels = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
    dist.barrier()
    began = time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if step in sleeps:
            time.sleep(args.delay / 1e3)
        optimizer.step()
        way.after_step()
    way.end_epoch()
    dist.barrier()
    return (time.perf_counter() - began) / args.steps


def main(place: Place, args: Args) -> None:
    """Measure, and write the result."""
    result: dict[str, Any] = facts("torch") | {
        "ranks": RANKS,
        "rounds": args.rounds,
        "epochs": args.epochs,
        "batch": args.batch,
        "delay_milliseconds": args.delay,
        "steps_with_delays": args.steps,
    }
    found = on_ranks(RANKS, place, measure, args)
    seconds = {name: [one["seconds"] for one in of] for name, of in found["shares"].items()}
    result["shares"] = {
        "milliseconds": {name: [round(1e3 * s, 3) for s in of] for name, of in seconds.items()},
        "chosen": [one["shares"] for one in found["shares"][AUTO]],
        "medians": medians({name: [1e3 * s for s in of] for name, of in seconds.items()}, 2),
        "times_equal_shares": medians(speedups(seconds, EQUAL), 2),
    }
    result["delays"] = {
        who: {
            "milliseconds": {n: [round(1e3 * s, 3) for s in of] for n, of in ways.items()},
            "medians": medians({n: [1e3 * s for s in of] for n, of in ways.items()}, 1),
        }
        for who, ways in found["delays"].items()
    }
    save("unequal_shares", result, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.unequal_shares:main", ["benchmarks.harness"])
