"""manual_allreduce_sgd: synchronous SGD in which the ranks average their gradients by hand.

    python -m examples.manual_allreduce_sgd.train --nproc 2                              # hand-written ring
    python -m examples.manual_allreduce_sgd.train --nproc 4 --algorithm shared-memory    # nothing is sent
    python -m examples.manual_allreduce_sgd.train --nproc 2 --algorithm bucketed         # while backward computes
    python -m examples.manual_allreduce_sgd.train --nproc 2 --algorithm ddp              # torch's, to compare
    python -m examples.manual_allreduce_sgd.train --nproc 2 --compress bf16              # half the bytes
    torchrun --nproc-per-node 2 -m examples.manual_allreduce_sgd.train --algorithm ring
    python -m examples.manual_allreduce_sgd.train --multiprocessing-distributed          # one process per GPU

All algorithms, with any number of processes, train the same up to rounding.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from common.errors import Stopped, UserError
from common.flags import at_least, begin, leave, share
from common.launcher import Launch, Place
from common.precision import Precision

ROUNDING = ("flat", "bucketed", "ring", "recursive-doubling")  # the algorithms that can send bfloat16


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    algorithm: Annotated[
        Literal["per-parameter", "flat", "bucketed", "ring", "recursive-doubling", "shared-memory", "ddp"],
        arg(aliases=["-a"]),
    ] = "ring"
    """How the gradients are averaged over the ranks (gradients.py)."""
    compress: Literal["no", "bf16"] = "no"
    """Send gradients in bfloat16: half the bytes, and an error of up to 2^-8 of each partial sum."""
    bucket_mb: float = 4.0
    """Size of a bucket of `bucketed`, in MB."""
    dataset: str = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Path = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int, arg(metavar="N")] = 10
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 120
    """GLOBAL batch size in samples, divided by the world size."""
    lr: float = 0.01
    """Learning rate."""
    momentum: float = 0.5
    """Momentum of SGD."""
    seed: int = 1234
    """Seed of parameters and sample order."""
    out: Path = Path("runs/manual_allreduce_sgd")
    """Folder for everything that the run writes."""
    resume: str = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS")] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    launch: OmitArgPrefixes[Launch] = Launch()
    numbers: OmitArgPrefixes[Precision] = Precision()

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, checkpoint_every=self.checkpoint_every)
        at_least(0, lr=self.lr, seed=self.seed, bucket_mb=self.bucket_mb)
        share(momentum=self.momentum)
        if self.compress != "no" and self.algorithm not in ROUNDING:
            raise UserError(f"--compress {self.compress} does not go with {self.algorithm}: use {', '.join(ROUNDING)}")


if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, workers start meanwhile
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import CrossEntropyLoss
from torch.optim import SGD

from common.checkpoint import Checkpoints
from common.data import eval_loader, image_data, local_batch
from common.distributed import Stop, World, launch, taking_part
from common.metrics import evaluate
from common.models import DigitNet
from common.proof import prove_replicas_agree, prove_seen_once
from common.report import Report
from common.seed import seed_everything
from examples.manual_allreduce_sgd.gradients import averaging
from examples.manual_allreduce_sgd.partition import partition_dataset


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        train(args, world)


def broadcast_parameters(model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0, whatever they drew."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def mean_losses(losses: list[torch.Tensor], mine: int, world: World) -> str:
    """Each rank's mean loss over the samples that it trained on, in one line; a resumed epoch may have none left."""
    everybody: list[float] = [0.0] * world.size
    dist.all_gather_object(everybody, float(sum(losses)) / max(1, mine))
    return ", ".join(f"rank {rank} {loss:.4f}" for rank, loss in enumerate(everybody))


def train(args: Args, world: World) -> None:
    """Train and evaluate; every rank runs this with its own part of the data."""
    numerics = args.numbers.on(world.device)
    seed_everything(args.seed, world.rank, args.numbers.deterministic)
    with Report("manual_allreduce_sgd", args.out, world) as report:
        data = image_data(args.dataset, args.data_dir, world)
        samples = len(data.train)
        local_batch(args.batch_size, world)  # an error if the world size does not divide it
        report.introduce(f"{data.name} ({samples} train, {len(data.test)} test)", numerics, args.batch_size)

        model = numerics.prepare(DigitNet(data.size, data.classes))
        broadcast_parameters(model)
        wire = torch.bfloat16 if args.compress == "bf16" else torch.float32
        example = numerics.images(torch.zeros(1, 1, data.size, data.size))
        with numerics.autocast():
            gradients = averaging(args.algorithm, numerics.compiled(model), world, wire, args.bucket_mb, example)
        criterion = CrossEntropyLoss(reduction="sum")
        optimizer = SGD(model.parameters(), args.lr, args.momentum)
        same = ("dataset", "batch_size", "lr", "momentum", "seed", "algorithm", "compress", "bucket_mb")
        config = {name: getattr(args, name) for name in same} | {"epochs": args.epochs} | numerics.settings
        checkpoints = Checkpoints(args.out / "checkpoints", {"model": model, "optimizer": optimizer}, config, world)
        start = checkpoints.load(args.resume)
        progress = start.progress if start else {"epoch": 0, "batch": 0, "step": 0, "best": -torch.inf, "metrics": {}}
        report.begin(progress["step"], start)

        with checkpoints, Stop() as stop:
            for epoch in range(progress["epoch"], args.epochs):
                batches, loader = partition_dataset(data, args.batch_size, epoch, world)
                seen = torch.zeros(samples, dtype=torch.int32)
                for batch in batches[: progress["batch"]]:  # trained on by the run that this one resumes
                    seen[batch] = 1
                losses, mine = [], 0
                name, rest = f"epoch {epoch + 1}/{args.epochs}", islice(loader, progress["batch"], None)
                for images, labels, indices in report.steps(rest, name, len(loader), progress["batch"]):
                    total = min(args.batch_size, samples - progress["batch"] * args.batch_size)
                    with numerics.autocast():
                        logits = gradients.model(numerics.images(images))  # [mine, classes], mine may be 0
                    sum_of_losses = criterion(logits.float(), labels.to(world.device))
                    # The mean over the ranks of W/total times their sums is the mean over the global batch.
                    loss = sum_of_losses * (world.size / total)
                    optimizer.zero_grad()
                    loss.backward()
                    gradients.average()
                    optimizer.step()
                    seen[indices] += 1
                    losses.append(sum_of_losses.detach())
                    mine += len(labels)
                    progress["batch"] += 1
                    progress["step"] += 1
                    report.loss(progress["step"], loss, total)
                    signum = stop.agreed()
                    if signum or progress["step"] % args.checkpoint_every == 0:
                        report.gather_losses()
                        checkpoints.save(progress)
                    if signum:
                        raise Stopped(signum, f"checkpoint at step {progress['step']}; go on with --resume auto")

                report.gather_losses()
                report.log(f"{name}: mean loss of {mean_losses(losses, mine, world)}")
                prove_seen_once(seen)
                with report.evaluating():
                    found = evaluate(model, eval_loader(data, world), numerics, world, data.classes)
                progress |= {"epoch": epoch + 1, "batch": 0, "metrics": found.metrics}
                progress["best"] = report.best(model, found.metrics["accuracy"], progress["best"])
                report.epoch(name, progress["step"], found)
                checkpoints.save(progress)

        report.finish(
            **data.facts,
            epochs=args.epochs,
            steps=progress["step"],
            global_batch=args.batch_size,
            precision=numerics.name,
            algorithm=args.algorithm,
            bytes_sent=gradients.circle.bytes,
            metrics=progress["metrics"] | {"best_accuracy": progress["best"]},
            parameter_hash=prove_replicas_agree(model, world),
        )


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
