"""A lost rank does not end the job: the others redo the step without it, and go on.

    python -m examples.manual_allreduce_sgd.survive --nproc 3             # kill -9 one of them
    python -m examples.manual_allreduce_sgd.survive --nproc 3 --replace   # another takes its place

A step has one collective, the sum of the gradients over the ranks. Who gets the sum takes the step.
Who gets an error goes to a meeting (`Membership`), and so do the others, in the next step at the
latest. There, those who took the step give its outcome to those who did not; if nobody did, all do
it again. Each global batch is divided among the ranks of that moment: every sample of the epoch is
trained on once, and nobody waits for a rank to come back.

The process that you start hosts the store at which the ranks meet, and starts them. It does not
train, and it is the only one that must not be lost.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from tyro.conf import OmitArgPrefixes, arg

from common.data.idx import ImageData, image_data
from common.launch.args import fail, start
from common.launch.console import say
from common.launch.errors import Lost, UserError
from common.launch.flags import IDX, Launch, at_least, check_cpu_only, share
from common.launch.members import join, keep
from common.launch.place import Place
from common.launch.record import record
from common.train.checks import parameter_hash
from common.train.files import write_atomically
from common.train.membership import NOTHING, Membership, TooLate, communication
from common.train.weights import save_model
from examples.manual_allreduce_sgd.allreduce import ring
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
        check_cpu_only(self.launch)


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
        local_number: of the processes of this node.
        number: of this member, in the job.
        place: where its parent runs.
        args: the flags.
    """
    store = join(local_number, place)
    data = image_data(args.dataset, args.data_dir)
    membership = Membership(store, number, place.world_size, args.launch.patience)
    with suppress(TooLate):
        train(args, data, membership, 0 if number < place.world_size else NOTHING)


def main(place: Place, args: Args) -> None:
    """Start the members of this node, see them end, and replace them if asked to.

    Raises:
        SystemExit: as `keep`.
    """
    if place.launched:
        fail(UserError("survive starts its processes by itself: srun and torchrun end all of them"))
    (args.out / "result.json").unlink(missing_ok=True)
    keep(member, place, args, args.replace)


if __name__ == "__main__":
    start(Args, "examples.manual_allreduce_sgd.survive:main")
