"""mnist_ddp_spawn: data-parallel training, with every distributed step written out.

This program starts its processes itself (`mp.start_processes`, the general form of `mp.spawn`), joins them
(`init_process_group`), cuts the data (`DistributedSampler`) and averages gradients (`DistributedDataParallel`).

    python -m examples.mnist_ddp_spawn.train                                     # a world of one
    python -m examples.mnist_ddp_spawn.train --nproc 2                           # two processes on this machine
    python -m examples.mnist_ddp_spawn.train --nproc 2 --dataset mnist           # MNIST, downloaded once
    python -m examples.mnist_ddp_spawn.train --multiprocessing-distributed       # one process per GPU
    torchrun --nproc-per-node 2 -m examples.mnist_ddp_spawn.train                # started by torchrun
    python -m examples.mnist_ddp_spawn.train --nproc 1 --world-size 2 --rank 0 --dist-url tcp://HOST0:29500
    python -m examples.mnist_ddp_spawn.train --nproc 1 --world-size 2 --rank 1 --dist-url tcp://HOST0:29500
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from common.errors import Stopped
from common.flags import at_least, begin, leave, share
from common.launcher import Launch, Place
from common.precision import Precision


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    dataset: str = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Path = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training set (default: 20 for digits, else 1)."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 120
    """GLOBAL batch size in samples, divided by the world size."""
    lr: float = 0.3
    """Highest learning rate of the one-cycle schedule."""
    momentum: float = 0.9
    """Momentum of SGD (Nesterov's)."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 2e-3
    """L2 penalty."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""
    seed: int = 0
    """Seed of parameters and sample order."""
    workers: Annotated[int, arg(aliases=["-j"], metavar="N")] = 0
    """Loader processes per rank; 0 is fastest here, since the data lie in memory as tensors."""
    find_unused_parameters: bool = False
    """Let DDP search for parameters that a forward did not use."""
    out: Path = Path("runs/mnist_ddp_spawn")
    """Folder for everything that the run writes."""
    resume: str = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS")] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    launch: OmitArgPrefixes[Launch] = Launch()
    numbers: OmitArgPrefixes[Precision] = Precision()

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, checkpoint_every=self.checkpoint_every)
        at_least(0, workers=self.workers, lr=self.lr, seed=self.seed, weight_decay=self.weight_decay)
        share(momentum=self.momentum, label_smoothing=self.label_smoothing)


if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, workers start meanwhile
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import CrossEntropyLoss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler

from common.checkpoint import Checkpoints
from common.data import dealt, eval_loader, image_data, local_batch
from common.distributed import Stop, World, meet, settle, supervise, taking_part
from common.metrics import evaluate
from common.models import DigitNet
from common.proof import prove_replicas_agree, prove_seen_once
from common.report import Report
from common.seed import seed_everything, seed_loader_worker


def main(args: Args, place: Place) -> int:
    """Start the processes of this node, unless a launcher has done so, and return the exit code."""
    with meet(place) as here:
        if not here.spawns:
            main_worker(here.local_rank, here, args)
            return 0
        workers = mp.start_processes(main_worker, (here, args), here.local_size, join=False, start_method="forkserver")
        return supervise(workers)


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job: `mp` passes its index as the first argument, then ours."""
    with taking_part(place, local_rank) as world:  # rank = node * processes per node + local rank
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        train(args, world)


def train(args: Args, world: World) -> None:
    """Train and evaluate; every rank runs this with its own share of the data."""
    epochs = args.epochs or (20 if args.dataset == "digits" else 1)
    batch = local_batch(args.batch_size, world)
    numerics = args.numbers.on(world.device)
    seed_everything(args.seed, world.rank, args.numbers.deterministic)
    with Report("mnist_ddp_spawn", args.out, world) as report:
        data = image_data(args.dataset, args.data_dir, world)
        samples = len(data.train)
        report.introduce(f"{data.name} ({samples} train, {len(data.test)} test)", numerics, args.batch_size)

        # Rank r gets positions r, r + W, r + 2W, ... of one permutation of the training set (see sampler.py).
        sampler = DistributedSampler(data.train, world.size, world.rank, shuffle=True, seed=args.seed)
        generator = torch.Generator()  # the loader's own: drawing from the global one would make resuming inexact
        loader = DataLoader(
            data.train,
            batch,
            sampler=sampler,
            num_workers=args.workers,
            timeout=args.launch.timeout if args.workers else 0,
            collate_fn=data.normalise,
            worker_init_fn=seed_loader_worker,
            pin_memory=world.device.type == "cuda",
            generator=generator,
        )
        model = numerics.prepare(DigitNet(data.size, data.classes))
        ddp = DistributedDataParallel(
            numerics.compiled(model),
            device_ids=[world.device] if world.device.type == "cuda" else None,
            find_unused_parameters=args.find_unused_parameters,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
        )
        criterion = CrossEntropyLoss(reduction="sum", label_smoothing=args.label_smoothing)
        nesterov = args.momentum > 0
        optimizer = SGD(ddp.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay, nesterov=nesterov)
        schedule = lr_scheduler.OneCycleLR(optimizer, args.lr, epochs * len(loader), cycle_momentum=False)
        same = ("dataset", "batch_size", "lr", "momentum", "weight_decay", "label_smoothing", "seed")
        config = {name: getattr(args, name) for name in same} | {"epochs": epochs} | numerics.settings
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        checkpoints = Checkpoints(args.out / "checkpoints", parts, config, world)
        start = checkpoints.load(args.resume)
        progress = start.progress if start else {"epoch": 0, "batch": 0, "step": 0, "best": -torch.inf, "metrics": {}}
        report.begin(progress["step"], start)
        with numerics.autocast():
            settle(ddp, numerics.images(torch.zeros(batch, 1, data.size, data.size)))

        with checkpoints, Stop() as stop:
            for epoch in range(progress["epoch"], epochs):
                sampler.set_epoch(epoch)  # a new permutation; without it every epoch has the same order
                generator.manual_seed(hash((args.seed, world.rank, epoch)))  # of the loader's workers, if there are any
                seen = torch.zeros(samples, dtype=torch.int32)
                # Trained on by the run that this one resumes, if it was interrupted in this epoch:
                seen[list(islice(sampler, min(progress["batch"] * batch, dealt(samples, world))))] = 1
                name, rest = f"epoch {epoch + 1}/{epochs}", islice(loader, progress["batch"], None)
                for images, labels, indices in report.steps(rest, name, len(loader), progress["batch"]):
                    # The last batch may be smaller, and DistributedSampler pads it with repeated samples so that all
                    # ranks get as many. `mine` counts this rank's samples without the padding, which is last.
                    total = min(args.batch_size, samples - progress["batch"] * args.batch_size)
                    mine = dealt(total, world)
                    with numerics.autocast():
                        logits = ddp(numerics.images(images))[:mine]  # [mine, classes]
                    targets = labels[:mine].to(world.device, non_blocking=True)
                    # DDP averages the gradients of the ranks: W/total of the sum is the mean over the global batch.
                    loss = criterion(logits.float(), targets) * (world.size / total)
                    optimizer.zero_grad()
                    loss.backward()  # DDP averages each bucket of gradients while the rest is still being computed
                    optimizer.step()
                    schedule.step()
                    seen[indices[:mine]] += 1
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
                prove_seen_once(seen)
                with report.evaluating():
                    found = evaluate(model, eval_loader(data, world), numerics, world, data.classes)
                progress |= {"epoch": epoch + 1, "batch": 0, "metrics": found.metrics}
                progress["best"] = report.best(model, found.metrics["accuracy"], progress["best"])
                report.epoch(name, progress["step"], found)
                checkpoints.save(progress)

        report.finish(
            **data.facts,
            epochs=epochs,
            steps=progress["step"],
            global_batch=args.batch_size,
            precision=numerics.name,
            metrics=progress["metrics"] | {"best_accuracy": progress["best"]},
            parameter_hash=prove_replicas_agree(model, world),
        )


if __name__ == "__main__":
    leave(main(args, place))
