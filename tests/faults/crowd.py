"""Many ranks that meet and then fail: `python -m tests.faults.crowd --ranks 64 --fault mistake`."""

from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist
from tyro.conf import OmitArgPrefixes

from common.launch.args import start
from common.launch.errors import UserError
from common.launch.flags import Launch
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import hosted, launch


@dataclass(frozen=True, kw_only=True)
class Args:
    """The flags of this program."""

    ranks: int
    """Processes."""
    fault: Literal["mistake", "exception", "exception of one"]
    """What happens to them."""
    launch: OmitArgPrefixes[Launch] = Launch(nproc=2, device="cpu")


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One rank."""
    place.export(local_rank)
    store, rank, _ = next(dist.rendezvous(JOB, timeout=place.flags.patience))
    if args.fault == "mistake":
        raise UserError("no such folder: give another")
    if args.fault == "exception" or rank == args.ranks - 1:
        raise RuntimeError(f"something is wrong with rank {rank}")
    store.wait(["what never comes"])


def main(place: Place, args: Args) -> None:
    """Start them here, however many cores there are."""
    group = replace(place, local_world_size=args.ranks, world_size=args.ranks, port=0)
    with hosted(group) as here:
        launch(main_worker, here, args)


if __name__ == "__main__":
    start(Args, "tests.faults.crowd:main")
