"""A tour of torch.distributed: what each rank holds before and after each call, checked.

    python -m examples.manual_allreduce_sgd.tour                              # all topics, 4 processes
    python -m examples.manual_allreduce_sgd.tour --nproc 2 broadcast scatter  # some topics
    torchrun --nproc-per-node 2 -m examples.manual_allreduce_sgd.tour         # started by torchrun

Topics: see topics.py, and `support`: which calls the backends of this machine accept, found by trying.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, arg

from common.flags import begin, leave
from common.launcher import Launch, Place


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    topics: Annotated[tuple[str, ...], Positional, arg(metavar="TOPIC ...")] = ()
    """What to show: send-recv, broadcast, ... (default: everything; a wrong name prints the list)."""
    launch: OmitArgPrefixes[Launch] = Launch(nproc=4)


if __name__ == "__main__":  # before the heavy imports
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import World, launch, say, taking_part
from common.errors import UserError
from examples.manual_allreduce_sgd.table import Tour
from examples.manual_allreduce_sgd.topics import TOPICS


def calls(world: World, device: torch.device) -> dict[str, tuple[Any, ...]]:
    """A call for each line of the table: its function and arguments. What one rank refuses, all refuse."""
    size, rank = world.size, world.rank

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(*shape, dtype=dtype, device=device)

    columns = ones(2, 2)[:, 0]  # [2], not contiguous
    several = [ones(2) for _ in range(size)]
    on_main = None if rank else several
    reductions = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
    return {
        **{f"all_reduce {op}": (dist.all_reduce, ones(2), getattr(dist.ReduceOp, op)) for op in reductions},
        "all_reduce BAND of float32": (dist.all_reduce, ones(2), dist.ReduceOp.BAND),
        "all_reduce of bfloat16": (dist.all_reduce, ones(2, dtype=torch.bfloat16)),
        "broadcast": (dist.broadcast, ones(2), 0),
        "reduce": (dist.reduce, ones(2), 0),
        "scatter": (dist.scatter, ones(2), on_main),
        "gather": (dist.gather, ones(2), on_main),
        "all_gather": (dist.all_gather, several, ones(2)),
        "reduce_scatter": (dist.reduce_scatter, ones(2), several),
        "all_to_all": (dist.all_to_all, several, [ones(2) for _ in range(size)]),
        "all_to_all of unequal parts": (
            dist.all_to_all_single, ones(size * (rank + 1)), ones(size * (size + 1) // 2),
            [rank + 1] * size, [peer + 1 for peer in range(size)],
        ),
        "all_gather of unequal sizes": (
            dist.all_gather, [ones(2 + peer % 2) for peer in range(size)], ones(2 + rank % 2),
        ),
        "send of a tensor that is not contiguous": (dist.isend, columns, (rank + 1) % size),
        "broadcast of a tensor that is not contiguous": (dist.broadcast, columns, 0),
    }  # fmt: skip


def tried(function: Callable[..., object], *arguments: object) -> str:
    """What happens: `yes`, or the reason of the refusal."""
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        return f"no: {str(error).splitlines()[0]}"
    return "yes"


def support(tour: Tour) -> None:
    """Which calls the backends of this machine accept: each is tried, on the CPU and on a CUDA device."""
    world = tour.world
    columns = {"gloo on the CPU": torch.device("cpu")}
    if world.device.type == "cuda":
        columns[f"{world.backend} on CUDA"] = world.device
    say(
        world,
        f"\nsupport, tried with torch {torch.__version__}"
        + ("" if len(columns) > 1 else "; no CUDA device: nccl not tried"),
    )
    for name, device in columns.items():
        for call, (function, *arguments) in calls(world, device).items():
            say(world, f"  {name}: {call:45} {tried(function, *arguments)}")


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the tour."""
    with taking_part(place, local_rank) as world:
        topics = TOPICS | {"support": support}
        if world.size < 2:
            raise UserError("--nproc 1: the tour needs at least 2 processes")
        if wrong := [name for name in args.topics if name not in topics]:
            raise UserError(f"{wrong[0]} is no topic; there are {', '.join(topics)}")
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        for name in args.topics or topics:
            topics[name](Tour(world))
        say(world, f"\nevery rank checked what it holds: {len(args.topics or topics)} topic(s), {world.size} ranks")


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
