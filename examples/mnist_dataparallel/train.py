"""mnist_dataparallel: one process, several devices: `nn.DataParallel`, and its eight steps by hand.

On CUDA devices torch's `nn.DataParallel` does the work; on the CPU, where it would quietly use one replica only, the
same steps written out in eight_steps.py, with one thread per replica.

    python -m examples.mnist_dataparallel.train                                     # all GPUs, or two CPU replicas
    python -m examples.mnist_dataparallel.train --devices cpu,cpu --explain         # the eight steps and their times
    python -m examples.mnist_dataparallel.train --devices 0,2                       # cuda:0 and cuda:2
    CUDA_VISIBLE_DEVICES=0,2 python -m examples.mnist_dataparallel.train            # the same two
    python -m examples.mnist_dataparallel.train --devices 0,1 --engine eight-steps  # by hand on GPUs
    torchrun --nnodes 2 --nproc-per-node 1 --node-rank R --master-addr HOST0 -m examples.mnist_dataparallel.train
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
from examples.mnist_dataparallel import devices as device_flag


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    devices: str = "auto"
    """Devices of each process, the first holds the model: 0,1 (of CUDA), or cpu,cpu for two replicas in threads.
    auto: all CUDA devices that are visible, else cpu,cpu."""
    engine: Literal["auto", "torch", "eight-steps"] = "auto"
    """torch is nn.DataParallel, which needs CUDA; auto is torch on CUDA and eight-steps on the CPU."""
    loss: Literal["gathered", "inside"] = "gathered"
    """Compute the loss on the gathered outputs, or inside the replicas, which sends less to the first device."""
    explain: bool = False
    """Show shapes and milliseconds of each step of the third iteration."""
    dataset: str = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Path = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training set (default: 20 for digits, else 1)."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 120
    """GLOBAL batch size in samples, divided by the processes, then by their devices."""
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
    out: Path = Path("runs/mnist_dataparallel")
    """Folder for everything that the run writes."""
    resume: str = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS")] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    launch: OmitArgPrefixes[Launch] = Launch()
    numbers: OmitArgPrefixes[Precision] = Precision()

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, checkpoint_every=self.checkpoint_every)
        at_least(0, lr=self.lr, seed=self.seed, weight_decay=self.weight_decay)
        share(momentum=self.momentum, label_smoothing=self.label_smoothing)
        device_flag.read(self.devices, self.launch)
        if self.numbers.compile:
            raise UserError("--compile: torch.compile does not work in the threads of DataParallel; leave it out")


if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, workers start meanwhile
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
from torch.nn import CrossEntropyLoss
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler

from common.checkpoint import Checkpoints
from common.data import dealt, eval_loader, image_data, local_batch
from common.distributed import Stop, World, launch, taking_part
from common.metrics import evaluate
from common.models import DigitNet
from common.proof import prove_replicas_agree, prove_seen_once
from common.report import Report
from common.seed import seed_everything
from examples.mnist_dataparallel.eight_steps import Net, average_over_processes
from examples.mnist_dataparallel.engines import engine
from examples.mnist_dataparallel.explain import Explanation


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process, by convention one per node: its replicas are threads of it."""
    names = device_flag.read(args.devices, args.launch)
    with taking_part(device_flag.placed(place, names), local_rank) as world:
        devices = device_flag.choose(names, world.device.type, torch.cuda.device_count(), world.place)
        world = device_flag.on_first(world, devices)
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        train(args, world, devices)


def train(args: Args, world: World, devices: list[torch.device]) -> None:
    """Train and evaluate; every process runs this with its own share of the data and its own devices."""
    epochs = args.epochs or (20 if args.dataset == "digits" else 1)
    batch = local_batch(args.batch_size, world)
    numerics = args.numbers.on(world.device)
    seed_everything(args.seed, 0, args.numbers.deterministic)  # all processes draw the same parameters
    with Report("mnist_dataparallel", args.out, world) as report:
        data = image_data(args.dataset, args.data_dir, world)
        samples = len(data.train)
        model = numerics.prepare(DigitNet(data.size, data.classes))
        criterion = CrossEntropyLoss(reduction="sum", label_smoothing=args.label_smoothing)
        explanation = Explanation(devices, 3 if args.explain else 0)
        parallel = engine(args.engine, Net(model, criterion, numerics), devices, args.loss == "inside", explanation)
        chunks = [len(chunk) for chunk in torch.arange(batch).chunk(len(devices))]
        what = f"{parallel.name} on {', '.join(map(str, devices))}"
        report.introduce(
            f"{data.name} ({samples} train, {len(data.test)} test), {what}", numerics, args.batch_size,
            f"{world.size} process(es) x chunks of {', '.join(map(str, chunks))}",
        )  # fmt: skip
        if len(chunks) < len(devices):
            report.warn(f"{len(devices) - len(chunks)} of {len(devices)} devices get no sample: raise --batch-size")

        sampler = DistributedSampler(data.train, world.size, world.rank, shuffle=True, seed=args.seed)
        loader = DataLoader(
            data.train, batch, sampler=sampler, collate_fn=data.normalise,
            pin_memory=world.device.type == "cuda", generator=torch.Generator(),
        )  # fmt: skip
        nesterov = args.momentum > 0
        optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay, nesterov=nesterov)
        schedule = lr_scheduler.OneCycleLR(optimizer, args.lr, epochs * len(loader), cycle_momentum=False)
        same = ("dataset", "batch_size", "lr", "momentum", "weight_decay", "label_smoothing", "seed")
        config = {name: getattr(args, name) for name in same} | {"epochs": epochs} | numerics.settings
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        checkpoints = Checkpoints(args.out / "checkpoints", parts, config, world)
        start = checkpoints.load(args.resume)
        progress = start.progress if start else {"epoch": 0, "batch": 0, "step": 0, "best": -torch.inf, "metrics": {}}
        if progress.setdefault("engine", what) != what:
            report.warn(f"the checkpoint was made by {progress['engine']}: this run rounds sums differently")
            progress["engine"] = what
        report.begin(progress["step"], start)

        with checkpoints, Stop() as stop:
            for epoch in range(progress["epoch"], epochs):
                sampler.set_epoch(epoch)
                seen = torch.zeros(samples, dtype=torch.int32)
                # Trained on by the run that this one resumes, if it was interrupted in this epoch:
                seen[list(islice(sampler, min(progress["batch"] * batch, dealt(samples, world))))] = 1
                name, rest = f"epoch {epoch + 1}/{epochs}", islice(loader, progress["batch"], None)
                for images, labels, indices in report.steps(rest, name, len(loader), progress["batch"]):
                    # DistributedSampler pads the last batch with repeated samples, which come last: cut them off.
                    total = min(args.batch_size, samples - progress["batch"] * args.batch_size)
                    mine = dealt(total, world)
                    explanation.begin()
                    # Losses are summed over the chunks, whatever their sizes, then averaged over the processes:
                    # W/total of the sums is the mean over the global batch.
                    loss = parallel.gradients(images[:mine], labels[:mine], world.size / total)  # steps 1 to 7
                    average_over_processes(model)
                    explanation.did(7, f"and averaged over {world.size} process(es)")
                    optimizer.step()
                    explanation.did(8, "the model is updated on the first device")
                    optimizer.zero_grad()
                    schedule.step()
                    for line in explanation.lines():
                        report.log(line)
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
            **data.facts, epochs=epochs, steps=progress["step"], global_batch=args.batch_size, precision=numerics.name,
            engine=parallel.name, devices=[str(device) for device in devices], samples_per_device=parallel.samples,
            metrics=progress["metrics"] | {"best_accuracy": progress["best"]},
            parameter_hash=prove_replicas_agree(model, world),
        )  # fmt: skip


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
