"""A lost rank does not end the job: the others redo the step without it, and go on.

    python -m examples.manual_allreduce_sgd.survive --nproc 3             # kill -9 one of them
    python -m examples.manual_allreduce_sgd.survive --nproc 3 --replace   # another takes its place

A step has one collective, the sum of the gradients over the ranks. Who gets the sum takes the step.
Who gets an error goes to a meeting (membership.py), and so do the others, in the next step at the
latest. There, those who took the step give its outcome to those who did not; if nobody did, all do
it again. Each global batch is divided among the ranks of that moment: every sample of the epoch is
trained on once, and nobody waits for a rank to come back.

The process that you start hosts the store at which the ranks meet, and starts them. It does not
train, and it is the only one that must not be lost.
"""

import json
import multiprocessing
import multiprocessing.connection
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from tyro.conf import OmitArgPrefixes, arg

from common.data.idx import ImageData, image_data
from common.launch import rendezvous
from common.launch.args import STOPPING, fail, start
from common.launch.console import complain, say
from common.launch.device import share_cores
from common.launch.errors import Lost, UserError
from common.launch.flags import IDX, Launch, at_least, share
from common.launch.place import Place
from common.launch.record import record
from common.train.checks import parameter_hash
from common.train.files import write_atomically
from common.train.weights import save_model
from examples.manual_allreduce_sgd.allreduce import ring
from examples.manual_allreduce_sgd.membership import NOTHING, Membership, TooLate, communication
from examples.manual_allreduce_sgd.replica import Replica

TRIES = 10  # of one step: more failures in a row come from a bug, or a network that does not work


@dataclass(frozen=True)
class Args:
    """What to train, and whether lost ranks are replaced."""

    replace: bool = False
    """Start a newcomer for each rank that is lost."""
    dataset: Annotated[str, IDX] = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Path = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int, arg(metavar="N")] = 10
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 120
    """GLOBAL batch size in samples, divided among however many ranks there are."""
    lr: float = 0.01
    """Learning rate."""
    momentum: float = 0.5
    """Momentum of SGD."""
    seed: int = 1234
    """Seed of parameters and sample order."""
    out: Path = Path("runs/survive")
    """Folder for the output of the run."""
    launch: OmitArgPrefixes[Launch] = Launch(nproc=2, timeout=20.0, device="cpu")

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size)
        at_least(0, lr=self.lr, seed=self.seed)
        share(momentum=self.momentum)


def train(args: Args, data: ImageData, membership: Membership, done: int) -> None:
    """Train to the end with the members that are there. Every rank calls this.

    Args:
        args: the flags.
        data: what is trained on.
        membership: of this process.
        done: the steps that it has done: 0, or NOTHING for a newcomer.

    Raises:
        TooLate: a newcomer is not needed any more.
    """
    replica, meet, failures, since = Replica(args, data), True, 0, time.monotonic()
    while True:
        try:
            if meet:
                done = membership.meet(done)
                state, done = membership.bring_up_to_date(replica.state())
                replica.load(state)
                if dist.get_rank() == 0:
                    say(f"after step {done}: members {', '.join(map(str, membership.members))}")
            if done == replica.steps:
                finish(args, replica, membership)
                return
            batch = replica.batch(done)
            own = replica.backward(batch, dist.get_rank(), dist.get_world_size())
            knock = torch.tensor([float(membership.somebody_knocks())])
            message = torch.cat([own, knock])
            with communication():
                ring(message)  # the sum over the ranks
        except Lost as lost:
            meet, failures = True, failures + 1
            if failures == TRIES:
                raise RuntimeError(f"step {done + 1} has failed {TRIES} times: {lost}") from lost
            continue
        replica.step(batch, message[:-1])
        done += 1
        if meet and dist.get_rank() == 0:
            membership.note_seconds(time.monotonic() - since)
        # All see the same sum, so all go to the meeting, or none.
        meet, failures, since = bool(message[-1] > 0) or done == replica.steps, 0, time.monotonic()
        if done % replica.steps_per_epoch == 0:
            end_epoch(replica, done)


def end_epoch(replica: Replica, done: int) -> None:
    """Check that the epoch is complete, and say how it went."""
    loss, epoch = replica.end_epoch(), done // replica.steps_per_epoch
    if dist.get_rank() == 0:  # alone: an evaluation by all is one more place to be lost at
        found = f"loss {loss:.4f}, test accuracy {replica.accuracy():.2f} %"
        say(f"epoch {epoch}/{replica.args.epochs}: {found}")


def finish(args: Args, replica: Replica, membership: Membership) -> None:
    """Write what came out. Every rank calls this, and leaves when all have come so far.

    Raises:
        Lost: somebody was lost meanwhile; if it was the writer, another one has to write.
    """
    if dist.get_rank() == 0:
        hashed = parameter_hash(replica.model)
        found = {"steps": replica.steps, "accuracy": replica.accuracy(), "parameter_hash": hashed}
        found |= {"threads": torch.get_num_threads(), "generations": membership.history()}
        save_model(args.out / "model.safetensors", replica.model, {"parameter_hash": hashed})
        write_atomically(args.out / "result.json", json.dumps(found, indent=1).encode())
        membership.store.set("finished", "")
    with communication():
        dist.barrier()


@record  # one line per error and job
def member(local_number: int, number: int, place: Place, args: Args) -> None:
    """One process of the training.

    Args:
        local_number: of the processes that its parent has started.
        number: of this member, in the job.
        place: where its parent runs.
        args: the flags.
    """
    place.export(local_number)  # on one machine: gloo listens on loopback only
    share_cores(place, place.local_world_size)
    rendezvous.joined = store = client(place, args)  # where `record` asks who reports an error
    data = image_data(args.dataset, args.data_dir)
    membership = Membership(store, number, place.world_size, args.launch.patience)
    with suppress(TooLate):
        train(args, data, membership, 0 if number < place.world_size else NOTHING)


def client(place: Place, args: Args) -> dist.Store:
    """Connect to the store, which the first node's parent hosts."""
    host = "127.0.0.1" if place.loopback else place.host
    return dist.TCPStore(
        host, place.port, is_master=False, wait_for_workers=False, timeout=args.launch.patience
    )


def stop(store: dist.Store, running: dict[Any, tuple[int, Any]], signum: int, _: object) -> None:
    """End this parent of members: a terminal's Ctrl-C reaches them, too, and one line is enough."""
    for again in STOPPING:
        signal.signal(again, lambda *_: None)
    first = b"parent"
    with suppress(dist.DistError):
        first = store.compare_set("end reported", "", "parent")
    if first == b"parent":
        complain(f"stopped by {signal.Signals(signum).name}: nothing is saved before the end")
    else:  # killed now, it would not come to say it
        for _, process in running.values():
            process.join(5)
    raise SystemExit(128 + signum)


def main(place: Place, args: Args) -> None:
    """Start the members of this node, see them end, and replace them if asked to.

    Raises:
        SystemExit: all were lost (code 1), one met an error, or this process got a signal.
    """
    if place.launched:
        fail(UserError("survive starts its processes by itself: srun and torchrun end all of them"))
    (args.out / "result.json").unlink(missing_ok=True)
    store, running = client(place, args), dict[Any, tuple[int, Any]]()
    context, finished = multiprocessing.get_context("forkserver"), False

    def begin(number: int) -> None:
        process = context.Process(target=member, args=(len(running), number, place, args))
        process.start()
        running[process.sentinel] = number, process
        say(f"member {number} is process {process.pid}")

    for signum in STOPPING:
        signal.signal(signum, partial(stop, store, running))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        for local_rank in range(place.local_world_size):
            begin(place.rank + local_rank)
        while running:
            patience = args.launch.timeout if finished else None
            ended = multiprocessing.connection.wait(list(running), patience)
            if not ended:
                break  # what is left is silent, and the others have done without it
            for sentinel in ended:
                number, process = running.pop(sentinel)
                process.join()
                code = process.exitcode
                with suppress(dist.DistError):  # the first node's parent ends first
                    store.set(f"ended/{number}", str(code))
                if code > 0:
                    raise SystemExit(code)  # an error, which would come again
                finished = finished or code == 0
                if code < 0 and not finished:
                    say(f"lost member {number}: {signal.Signals(-code).name}")
                    if args.replace:
                        begin(place.world_size + store.add("newcomers", 1) - 1)
    finally:
        for _, process in running.values():
            process.kill()
    if place.node_rank == 0 and not store.check(["finished"]):
        complain("all members are lost: nobody was left to go on")
        raise SystemExit(1)


if __name__ == "__main__":
    start(Args, "examples.manual_allreduce_sgd.survive:main")
