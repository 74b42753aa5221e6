"""Members that tell their numbers; one is killed, and replaced: `python -m tests.examples.members_job --nproc 3`."""

import os
import signal
from dataclasses import dataclass

from tyro.conf import OmitArgPrefixes

from common.launch.args import start
from common.launch.flags import Launch
from common.launch.members import join, keep
from common.launch.place import Place
from common.launch.record import record


@dataclass(frozen=True)
class Args:
    """The flags of the job."""

    launch: OmitArgPrefixes[Launch] = Launch()


@record
def member(local_number: int, number: int, place: Place, args: Args) -> None:
    store, count = join(local_number, place), place.local_world_size
    print(f"member {number}: {local_number} of this node, {os.environ['LOCAL_RANK']} by its name", flush=True)
    store.set(f"here/{number}", "")
    if number == 0:
        store.wait([f"here/{other}" for other in range(1, count)])
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait([f"here/{count}"])
    store.set("finished", "")


def main(place: Place, args: Args) -> None:
    keep(member, place, args, replace=True)


if __name__ == "__main__":
    start(Args, "tests.examples.members_job:main")
