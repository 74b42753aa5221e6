"""Show what each rank holds before and after each call of torch.distributed, and check it.

    python -m examples.manual_allreduce_sgd.tour                              # all, 4 processes
    python -m examples.manual_allreduce_sgd.tour --nproc 2 broadcast scatter  # some topics
    torchrun --nproc-per-node 2 -m examples.manual_allreduce_sgd.tour         # started by torchrun

Topics: see topics.py. The last, `support`, shows which calls the backends of this machine accept,
by trying them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from tyro.conf import OmitArgPrefixes, Positional, arg

from common.launch.args import start
from common.launch.collectives import print0
from common.launch.device import choose_device
from common.launch.errors import UserError
from common.launch.flags import Launch
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from examples.manual_allreduce_sgd.table import Tour
from examples.manual_allreduce_sgd.topics import TOPICS


@dataclass(frozen=True)
class Args:
    """The topics, and the processes that show them."""

    topics: Annotated[tuple[str, ...], Positional, arg(metavar="TOPIC ...")] = ()
    """What to show: send-recv, broadcast, ... (default: all topics)."""
    launch: OmitArgPrefixes[Launch] = Launch(nproc=4)

    def __post_init__(self) -> None:
        for name in self.topics:
            if name not in (*TOPICS, "support"):
                raise UserError(
                    f"{name} is not a topic; there are {', '.join((*TOPICS, 'support'))}"
                )


Call = tuple[Callable[..., object], *tuple[Any, ...]]


def calls(device: torch.device) -> dict[str, Call]:
    """A call for each line of the table: its function and arguments.

    What one rank refuses, all ranks refuse: none waits for the others.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(*shape, dtype=dtype, device=device)

    pairs = [ones(2) for _ in range(world_size)]
    given = pairs if rank == 0 else None
    lengths = [peer + 1 for peer in range(world_size)]
    rows = [ones(2 + peer % 2) for peer in range(world_size)]
    column = ones(2, 2)[:, 0]  # [2], not contiguous
    found: dict[str, Call] = {
        f"all_reduce {name}": (dist.all_reduce, ones(2), getattr(dist.ReduceOp, name))
        for name in ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
    }
    found |= {
        "all_reduce BAND of float32": (dist.all_reduce, ones(2), dist.ReduceOp.BAND),
        "all_reduce of bfloat16": (dist.all_reduce, ones(2, dtype=torch.bfloat16)),
        "broadcast": (dist.broadcast, ones(2), 0),
        "reduce": (dist.reduce, ones(2), 0),
        "scatter": (dist.scatter, ones(2), given),
        "gather": (dist.gather, ones(2), given),
        "all_gather": (dist.all_gather, pairs, ones(2)),
        "reduce_scatter": (dist.reduce_scatter, ones(2), pairs),
        "all_to_all": (dist.all_to_all, pairs, [ones(2) for _ in range(world_size)]),
        "all_to_all of unequal parts": (
            dist.all_to_all_single,
            ones(world_size * (rank + 1)),
            ones(sum(lengths)),
            [rank + 1] * world_size,
            lengths,
        ),
        "all_gather of unequal sizes": (dist.all_gather, rows, ones(2 + rank % 2)),
        "broadcast of a tensor that is not contiguous": (dist.broadcast, column, 0),
    }
    if device.type == "cpu":  # nccl would accept it, and wait for a receiver
        send = (dist.isend, column, (rank + 1) % world_size)
        found["send of a tensor that is not contiguous"] = send
    return found


def attempt(function: Callable[..., object], *arguments: object) -> str:
    """Try a call: `yes`, or why it was refused."""
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        return f"no: {str(error).splitlines()[0]}"
    return "yes"


def support(tour: Tour) -> None:
    """Which calls the backends of this machine accept: each is tried. Every rank calls this."""
    devices = {"gloo on the CPU": torch.device("cpu")}
    if tour.device.type == "cuda":
        devices[f"{tour.backend} on CUDA"] = tour.device
    untried = "" if len(devices) > 1 else "; no CUDA device: nccl not tried"
    print0(f"\nsupport, tried with torch {torch.__version__}{untried}")
    for name, device in devices.items():
        for call, (function, *arguments) in calls(device).items():
            print0(f"  {name}: {call:45} {attempt(function, *arguments)}")


def main(place: Place, args: Args) -> None:
    """Run the tour in every process of this node."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the tour."""
    place.export(local_rank)
    device, backend = choose_device(args.launch, local_rank)
    if place.world_size < 2:
        raise UserError("--nproc 1: the tour needs at least 2 processes")
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience)
    topics = TOPICS | {"support": support}
    chosen = args.topics or tuple(topics)
    tour = Tour(device)
    for name in chosen:
        topics[name](tour)
    ranks = dist.get_world_size()
    print0(f"\nevery rank checked what it holds: {len(chosen)} topic(s), {ranks} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    start(Args, "examples.manual_allreduce_sgd.tour:main")
