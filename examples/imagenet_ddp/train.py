"""imagenet_ddp: any torchvision classification model on a folder of images, on one process or many nodes.

The command lines of pytorch/examples `imagenet/main.py` work here, with GPUs or without.

    python -m examples.imagenet_ddp.train                                       # draws its own images
    python -m examples.imagenet_ddp.train -a resnet50 DIR                       # DIR/train/CLASS/*, DIR/val/CLASS/*
    python -m examples.imagenet_ddp.train -a resnet50 --multiprocessing-distributed DIR        # one process per GPU
    python -m examples.imagenet_ddp.train -a resnet50 --dummy                   # no files: to measure the speed
    python -m examples.imagenet_ddp.train -a resnet50 -e --resume auto DIR      # evaluate only
    torchrun --nproc-per-node 8 --max-restarts 3 -m examples.imagenet_ddp.train -a resnet50 --resume auto DIR
    python -m examples.imagenet_ddp.train -a resnet50 --dist-url tcp://HOST0:29500 --world-size 2 --rank 0 \
        --multiprocessing-distributed DIR                                       # the first of two nodes
"""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, arg

from common.errors import Stopped, UserError
from common.flags import at_least, begin, leave
from common.image_options import ImageOptions
from common.launcher import Launch, Place
from common.precision import Precision
from examples.imagenet_ddp.recipe import Recipe

DEFAULTS = {"folder": (90, 256), "drawn": (6, 48), "dummy": (1, 48)}  # epochs, batch size


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training set (default: 90; 6 for drawn images, 1 for --dummy)."""
    batch_size: Annotated[int | None, arg(aliases=["-b"], metavar="N")] = None
    """GLOBAL batch size in images (default: 256; 48 without DIR)."""
    accumulate: Annotated[int, arg(metavar="N")] = 1
    """Backward passes per step, for batches that do not fit into memory at once."""
    evaluate: Annotated[bool, arg(aliases=["-e"])] = False
    """Only evaluate the weights that --resume or --pretrained gives."""
    resume: Annotated[str, arg(metavar="auto|PATH|no")] = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no; with -e also a .safetensors file."""
    seed: int = 0
    """Seed of parameters, order and crops."""
    find_unused_parameters: bool = False
    """Let DDP search for parameters that a forward did not use."""
    static_graph: bool = False
    """Promise DDP that every step uses the same parameters in the same order."""
    profile: Annotated[int, arg(metavar="STEPS")] = 0
    """Record a trace of this many steps."""
    print_freq: Annotated[int, arg(aliases=["-p"], metavar="STEPS")] = 10
    """Steps between lines of the log."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS")] = 500
    """Steps between checkpoints (there is one after every epoch, too)."""
    keep: Annotated[int, arg(metavar="N")] = 2
    """Checkpoints that stay."""
    out: Path = Path("runs/imagenet_ddp")
    """Folder for everything that the run writes."""
    images: OmitArgPrefixes[ImageOptions] = ImageOptions()
    recipe: OmitArgPrefixes[Recipe] = Recipe()
    launch: OmitArgPrefixes[Launch] = Launch()
    numbers: OmitArgPrefixes[Precision] = Precision(channels_last="yes")

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, accumulate=self.accumulate, keep=self.keep)
        at_least(1, print_freq=self.print_freq, checkpoint_every=self.checkpoint_every)
        at_least(0, profile=self.profile, seed=self.seed)
        if self.evaluate and self.resume == "no" and not self.recipe.pretrained:
            raise UserError("--evaluate needs weights: give --resume auto, --resume PATH or --pretrained")


if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, workers start meanwhile
    args, place = begin(Args, __doc__, preload_also=("common.images", "torchvision.models"))

import torch
import torch.distributed as dist
from torch.nn import CrossEntropyLoss
from torch.nn.parallel import DistributedDataParallel

from common.checkpoint import Checkpoints, load_model
from common.data import dealt, eval_batches, local_batch, train_loader
from common.distributed import Stop, World, launch, settle, taking_part
from common.metrics import evaluate
from common.proof import prove_replicas_agree, prove_seen_once
from common.report import Report
from common.seed import seed_everything


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        with Report("imagenet_ddp", args.out / "evaluation" if args.evaluate else args.out, world) as report:
            train(args, world, report)


def train(args: Args, world: World, report: Report) -> None:
    """Train and evaluate; every rank runs this with its own share of the data."""
    chosen = zip((args.epochs, args.batch_size), DEFAULTS[args.images.kind], strict=True)
    epochs, batch_size = (given or default for given, default in chosen)
    micro = local_batch(batch_size, world, args.accumulate)  # images per rank and backward pass
    numerics = args.numbers.on(world.device)
    seed_everything(args.seed, world.rank, args.numbers.deterministic)
    data = args.images.load(args.seed, args.out, world)
    shares = f"{world.size} rank(s) x {args.accumulate} backward pass(es) x {micro}"
    report.introduce(f"{args.recipe.arch} on {data}", numerics, batch_size, shares)
    loader, sampler = train_loader(data.train, batch_size, world, numerics, args.seed, args.images.workers)
    test_loader = eval_batches(data.val, 2 * micro, world, numerics, args.images.workers)
    model = numerics.prepare(args.recipe.model(len(data.classes), data.size, world, not args.evaluate))
    average = args.recipe.average(model)  # of the weights, with --ema
    judged = average.module if average else model

    def judge(label: str) -> float:
        for buffer in model.buffers():  # BatchNorm's statistics: each rank has its own since its last forward
            dist.broadcast(buffer, 0)
        with report.evaluating():
            found = evaluate(judged, test_loader, numerics, world, len(data.classes))
        report.skipped(loader.broken | test_loader.broken)
        report.epoch(label, progress["step"], found, data.val.names)
        progress["metrics"] = found.metrics
        return found.metrics["accuracy"]

    settings = {"epochs": epochs, "global_batch": batch_size, "seed": args.seed}
    config = settings | asdict(args.recipe) | data.identity | numerics.settings
    progress: dict[str, Any] = {"epoch": args.recipe.start_epoch, "batch": 0, "step": 0, "best": -1.0, "metrics": {}}
    if args.evaluate:
        progress["best"] = judge(f"evaluation of {load_model(args.resume, args.out, judged, world)}")
    else:
        ddp = DistributedDataParallel(
            numerics.compiled(model),
            device_ids=[world.device] if world.device.type == "cuda" else None,
            find_unused_parameters=args.find_unused_parameters,
            static_graph=args.static_graph,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
        )
        criterion = CrossEntropyLoss(reduction="sum", label_smoothing=args.recipe.label_smoothing)
        optimizer = args.recipe.optimizer(model, batch_size)
        schedule = args.recipe.schedule(optimizer, len(loader), epochs)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule} | ({"ema": average} if average else {})
        checkpoints = Checkpoints(args.out / "checkpoints", parts, config, world, args.keep)
        start = checkpoints.load(args.resume)
        progress = start.progress if start else progress
        report.begin(progress["step"], start)
        with numerics.autocast():
            settle(ddp, numerics.images(torch.zeros(sampler.smallest(micro), 3, data.size, data.size)))

        with checkpoints, report.profiling(args.profile), Stop() as stop:
            for epoch in range(progress["epoch"], epochs):
                sampler.set_epoch(epoch, progress["batch"])  # a new permutation, from the batch to go on with
                seen = sampler.seen()  # by the run that this one resumes
                name = f"epoch {epoch + 1}/{epochs}"
                for images, labels, indices in report.steps(loader, name, len(loader), progress["batch"]):
                    total = min(
                        batch_size, len(data.train) - progress["batch"] * batch_size
                    )  # the last batch may be smaller
                    mine = dealt(total, world)  # what this rank has beyond these is padding
                    optimizer.zero_grad()
                    losses = []
                    for first in range(0, len(images), micro):
                        end, last = min(first + micro, mine), first + micro >= len(images)
                        with nullcontext() if last else ddp.no_sync():  # gradients are averaged with the last backward
                            with numerics.autocast():
                                logits = ddp(images[first : first + micro])[: max(0, end - first)]
                            # DDP averages over the ranks: W/total of the sum is the mean over the global batch.
                            loss = criterion(logits.float(), labels[first:end]) * (world.size / total)
                            loss.backward()
                        losses.append(loss.detach())
                    optimizer.step()
                    schedule.step()
                    if average:
                        average.update_parameters(model)
                    seen.index_add_(0, indices[:mine], torch.ones(mine, dtype=torch.int32))
                    progress["batch"] += 1
                    progress["step"] += 1
                    report.loss(progress["step"], torch.stack(losses).sum(), total)
                    if progress["step"] % args.print_freq == 0:
                        report.progress(f"{name}, step {progress['batch']}/{len(loader)}")
                    signum = stop.agreed()
                    if signum or progress["step"] % args.checkpoint_every == 0 or progress["batch"] == len(loader):
                        report.gather_losses()
                        checkpoints.save(progress)
                    if signum:
                        raise Stopped(signum, f"checkpoint at step {progress['step']}; go on with --resume auto")

                report.gather_losses()
                prove_seen_once(seen)
                progress["best"] = report.best(judged, judge(name), progress["best"])
                progress |= {"epoch": epoch + 1, "batch": 0}
                checkpoints.save(progress)

    config |= data.facts | {"metrics": progress["metrics"] | {"best_accuracy": progress["best"]}}
    report.finish(**config, steps=progress["step"], parameter_hash=prove_replicas_agree(judged, world))


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
