"""`--survive`: a lost rank does not end the training.

    python -m examples.imagenet_ddp --survive --nproc 3              # kill -9 one of them
    python -m examples.imagenet_ddp --survive --replace --nproc 3    # another takes its place

The training of train.py, with torch's DistributedDataParallel, in generations of members
(common/train/membership.py). A step counts when its last message, a sum over the ranks, has come
through: who gets it takes the step. Who gets an error, in this or in any bucket of gradients, goes
to a meeting, and so do the others, in their next message at the latest. There, those who took the
step give its outcome to those who did not; if nobody did, all do it again. So it is with an
evaluation.

The process that you start hosts the store at which the members meet, and starts them. It does not
train, and it is the only one that must not be lost.
"""

import contextlib
import gc
import io
import os
import time
from collections.abc import Generator
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from common.images.sets import load_images
from common.launch.args import fail
from common.launch.console import say
from common.launch.device import choose_device
from common.launch.errors import Lost, UserError
from common.launch.members import join, keep
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.loader import end_loader_workers
from common.train.membership import NOTHING, Membership, TooLate, leave_group
from common.train.seed import seed_numpy_and_python
from examples.imagenet_ddp.args import Args
from examples.imagenet_ddp.generation import Generation
from examples.imagenet_ddp.replica import Replica

TRIES = 10  # of one unit: more failures in a row come from a bug, or a network that does not work


def main(place: Place, args: Args) -> None:
    """Prepare the images, start the members of this node, and replace them if asked to.

    Raises:
        SystemExit: as `keep`; a mistake of the user (code 2).
    """
    if place.launcher in ("torchrun", "slurm"):
        fail(UserError("--survive starts its processes by itself: torchrun and srun end all"))
    if place.launcher == "plain":
        fail(UserError("--survive needs several processes: give --nproc"))
    if args.launch.device == "auto" and not args.launch.no_accel and torch.cuda.is_available():
        fail(UserError("--survive trains on CPUs only, by gloo: give --device cpu"))
    nodes = replace(place, local_world_size=1, world_size=place.num_nodes, rank=place.node_rank)
    launch(prepare, nodes, args)
    keep(member, place, args, args.replace)


@record
def prepare(local_rank: int, place: Place, args: Args) -> None:
    """Draw, list or decode the images once per node, before members that can be lost need them."""
    place.export(local_rank)
    dist.init_process_group("gloo", init_method=JOB, timeout=args.launch.patience)
    load_images(args.images, args.seed, args.out)
    dist.destroy_process_group()


@record  # one line per error and job
def member(local_number: int, number: int, place: Place, args: Args) -> None:
    """One process of the training.

    Args:
        local_number: of the processes of this node.
        number: of this member, in the job.
        place: where its parent runs.
        args: the flags.
    """
    store = join(local_number, place)
    device, _ = choose_device(args.launch, 0)
    with alone(args.launch.patience) as said:
        torch.manual_seed(args.seed)  # the founders begin with the same model
        data = load_images(args.images, args.seed, args.out)
        seed_numpy_and_python()
        replica = Replica(args, data, device)
        replica.check_smallest_batch(place.world_size)
    if number == 0:  # what `prepare` has not said: which weights of --init were taken
        for line in said.getvalue().splitlines():
            if line.startswith("weights of "):
                say(line)
    gc.freeze()  # a million objects of libraries: what is there now is not looked at again
    membership = Membership(store, number, place.world_size, args.launch.patience)
    with contextlib.suppress(TooLate):
        train(args, replica, membership, 0 if number < place.world_size else NOTHING)


@contextlib.contextmanager
def alone(timeout: timedelta) -> Generator[io.StringIO]:
    """A group of one, and silence: what asks all ranks asks none, as a newcomer finds none.

    Yields:
        What would be printed.
    """
    os.environ["LOCAL_RANK"] = "0"  # it waits for no other process of the node
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        yield said
    leave_group()


def train(args: Args, replica: Replica, membership: Membership, done: int) -> None:
    """Train to the end with the members that are there. Every rank calls this.

    Args:
        args: the flags.
        replica: of this process.
        membership: of this process.
        done: the units that it has done: 0, or NOTHING for a newcomer.

    Raises:
        TooLate: a newcomer is not needed any more.
    """
    generation, failures, since = None, 0, time.monotonic()
    while True:
        try:
            if generation is None:
                # DDP is garbage in a circle. While it is there, its group keeps its connections,
                # and others that wait for this process do not notice that it has left.
                gc.collect()
                done = membership.meet(done)
                state, done = membership.bring_up_to_date(replica.state())
                replica.load(state)
                generation = Generation(replica, membership, done)
            if done == replica.units:
                generation.finish()
                return
            somebody_knocks = generation.do(done)
        except Lost as lost:
            replica.undo()
            end_loader_workers()
            generation, failures = None, failures + 1
            if failures == TRIES:
                raise RuntimeError(f"unit {done + 1} has failed {TRIES} times: {lost}") from lost
            continue
        generation.note_seconds(done, time.monotonic() - since)
        done, failures, since = done + 1, 0, time.monotonic()
        # All see the same sum, so all go to the meeting, or none.
        if somebody_knocks or done == replica.units:
            end_loader_workers()
            generation = None
