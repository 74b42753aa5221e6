"""resnet_pipeline: a ResNet cut into stages, one per process, that work at the same time on micro-batches.

GPipe, 1F1B and interleaved 1F1B are written out in schedule.py; `--engine torch` runs torch.distributed.pipelining.

    python -m examples.resnet_pipeline.train                                       # un-split: a pipeline of one stage
    python -m examples.resnet_pipeline.train --nproc 2                             # two stages on this machine
    python -m examples.resnet_pipeline.train --nproc 4 --stages 2                  # two replicas of two stages
    python -m examples.resnet_pipeline.train --nproc 2 --schedule gpipe -m 8       # 8 micro-batches
    python -m examples.resnet_pipeline.train --nproc 2 --schedule interleaved      # two stages on each process
    python -m examples.resnet_pipeline.train --nproc 2 --engine torch --schedule zero-bubble
    python -m examples.resnet_pipeline.train --nproc 2 --dataset imagenet --image-size 224 -b 64
    torchrun --nproc-per-node 2 -m examples.resnet_pipeline.train                  # started by torchrun
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from common.errors import Stopped, UserError
from common.flags import at_least, begin, leave
from common.launcher import Launch, Place
from common.precision import Precision
from examples.resnet_pipeline.options import Cut


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    dataset: str = "shapes"
    """shapes (drawn in memory), or a folder with train/CLASS/*.jpg and val/CLASS/*.jpg."""
    image_size: Annotated[int, arg(metavar="PIXELS")] = 32
    """Height and width of the images."""
    images: Annotated[int, arg(metavar="N")] = 480
    """Images to draw for training, and half as many for the test."""
    epochs: Annotated[int, arg(metavar="N")] = 4
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 32
    """GLOBAL batch size in samples, divided by the number of replicas."""
    lr: float = 1e-3
    """Highest learning rate of the one-cycle schedule."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 0.01
    """Weight decay of AdamW."""
    seed: int = 0
    """Seed of parameters and sample order."""
    workers: Annotated[int, arg(aliases=["-j"], metavar="N")] = 0
    """Loader processes of each first stage."""
    out: Path = Path("runs/resnet_pipeline")
    """Folder for everything that the run writes."""
    resume: str = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS")] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    cut: OmitArgPrefixes[Cut] = Cut()
    launch: OmitArgPrefixes[Launch] = Launch()
    numbers: OmitArgPrefixes[Precision] = Precision()

    def __post_init__(self) -> None:
        at_least(1, images=self.images, image_size=self.image_size, epochs=self.epochs, batch_size=self.batch_size)
        at_least(1, checkpoint_every=self.checkpoint_every)
        if self.numbers.compile and self.cut.schedule in ("zero-bubble", "zbv"):
            raise UserError(f"--compile with --schedule {self.cut.schedule}: torch cannot split a compiled backward")
        at_least(0, workers=self.workers, lr=self.lr, seed=self.seed, weight_decay=self.weight_decay)


if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, workers start meanwhile
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
from torch.optim import AdamW, lr_scheduler
from torch.utils.data import DataLoader

from common.checkpoint import Checkpoints
from common.data import StepSampler
from common.distributed import Stop, World, agree, launch, taking_part
from common.proof import prove_replicas_agree, prove_seen_once
from common.report import Report
from common.seed import seed_everything, seed_loader_worker
from examples.resnet_pipeline.grid import make_grid, sum_over_replicas
from examples.resnet_pipeline.images import image_data, only_labels
from examples.resnet_pipeline.model import IGNORED
from examples.resnet_pipeline.parts import make_parts, make_pipeline, micro_batch_sizes
from examples.resnet_pipeline.plan import describe
from examples.resnet_pipeline.timeline import Timeline, report_timeline
from examples.resnet_pipeline.whole import Whole, evaluate


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        train(args, world)


def train(args: Args, world: World) -> None:
    """Train and evaluate; every rank runs this with its own stage."""
    numerics, cut = args.numbers.on(world.device), args.cut
    grid = make_grid(world, cut.stages)
    batch = grid.local_batch(args.batch_size)
    sizes = micro_batch_sizes(batch, cut.micro_batches)
    seed_everything(args.seed, world.rank, args.numbers.deterministic)
    with Report("resnet_pipeline", args.out, world) as report:
        data = image_data(args.dataset, args.image_size, args.images, args.images // 2, args.seed)
        samples = len(data.train)
        agree(world, hash(tuple(data.train.labels.tolist())), "the images' labels")  # the last stage has its own copy
        what = f"{data.name} ({samples} train, {len(data.test)} test), {cut.arch} with {cut.norm} norm"
        shares = f"{grid.replicas} replica(s) x micro-batches of {', '.join(map(str, sizes))}"
        report.introduce(what, numerics, args.batch_size, shares)
        probe = numerics.images(torch.randn(batch, 3, args.image_size, args.image_size))  # [B, 3, H, W]
        parts = make_parts(cut, args.seed, probe, data, numerics, world, grid)
        stages = list(parts.stages.values())
        for line in describe(parts.plan, cut.schedule, grid.stages, len(sizes), sizes[0]):
            report.log(line)
        timeline = Timeline(world.rank, world.device)
        pipeline = make_pipeline(cut, parts, grid, probe.shape, timeline)

        # Replica d gets positions d, d + D, d + 2D, ... of each batch. All its stages count through the same positions;
        # only the first stage reads pixels.
        dataset = data.train if parts.first else only_labels(data.train)
        sampler = StepSampler(
            samples, args.batch_size, replace(world, rank=grid.replica, size=grid.replicas), args.seed
        )
        generator = torch.Generator()  # the loader's own: drawing from the global one would make resuming inexact
        loader = DataLoader(
            dataset, batch_sampler=sampler, num_workers=args.workers if parts.first else 0, collate_fn=data.normalise,
            worker_init_fn=seed_loader_worker, pin_memory=world.device.type == "cuda", generator=generator,
            timeout=grid.seconds / 2 if parts.first and args.workers else 0,  # before those who wait for this stage
        )  # fmt: skip
        parameters = [parameter for stage in stages for parameter in stage.parameters()]
        optimizer = AdamW(parameters, args.lr, weight_decay=args.weight_decay)
        schedule = lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * len(loader), cycle_momentum=False)
        same = ("dataset", "image_size", "images", "batch_size", "epochs", "lr", "weight_decay", "seed")
        config = {name: getattr(args, name) for name in same} | numerics.settings
        config |= {"arch": cut.arch, "norm": cut.norm, "micro_batches": len(sizes), "replicas": grid.replicas}
        whole = Whole(parts.stages, optimizer, parts.unsplit, grid, world)
        checkpoints = Checkpoints(
            args.out / "checkpoints", whole.checkpoint_parts | {"schedule": schedule}, config, world
        )
        start = checkpoints.load(args.resume)
        progress = start.progress if start else {"epoch": 0, "batch": 0, "step": 0, "best": -torch.inf, "metrics": {}}
        report.begin(progress["step"], start)

        with checkpoints, Stop() as stop:
            for epoch in range(progress["epoch"], args.epochs):
                sampler.set_epoch(epoch, progress["batch"])  # a new permutation, from the batch to go on with
                seen = sampler.seen() * parts.first  # by the run that this one resumes; other stages read no pixels
                name = f"epoch {epoch + 1}/{args.epochs}"
                for images, labels, indices in report.steps(loader, name, len(loader), progress["batch"]):
                    total = min(args.batch_size, samples - progress["batch"] * args.batch_size)
                    mine = grid.dealt(total)
                    labels[mine:] = IGNORED  # repeated, so that all replicas get as many
                    timeline.begin()
                    loss = pipeline.step(
                        numerics.images(images), labels.to(world.device, non_blocking=True),
                        micro_batch_sizes(len(labels), len(sizes)), total,
                    )  # fmt: skip
                    sum_over_replicas(stages, grid)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    seen[indices[:mine]] += parts.first
                    progress["batch"] += 1
                    progress["step"] += 1
                    report.loss(progress["step"], loss * world.size, total)  # only last stages have one
                    signum = stop.agreed()
                    if signum or progress["step"] % args.checkpoint_every == 0:
                        report.gather_losses()
                        whole.gather()
                        checkpoints.save(progress)
                    if signum:
                        raise Stopped(signum, f"checkpoint at step {progress['step']}; go on with --resume auto")

                report.gather_losses()
                prove_seen_once(seen)
                with report.evaluating():
                    found = evaluate(parts, grid, data, world)
                progress |= {"epoch": epoch + 1, "batch": 0, "metrics": found.metrics}
                whole.gather()
                progress["best"] = report.best(whole.model, found.metrics["accuracy"], progress["best"])
                report.epoch(name, progress["step"], found)
                checkpoints.save(progress)

        for index, stage in parts.stages.items():
            prove_replicas_agree(stage, world, part=index)
        report.finish(
            **data.facts, **whole.facts(cut, pipeline.most_kept), epochs=args.epochs, steps=progress["step"],
            global_batch=args.batch_size, precision=numerics.name,
            bubble=report_timeline(timeline, report, world, f"{cut.arch}, {cut.engine} {cut.schedule}"),
            metrics=progress["metrics"] | {"best_accuracy": progress["best"]}, parameter_hash=whole.parameter_hash(),
        )  # fmt: skip


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
