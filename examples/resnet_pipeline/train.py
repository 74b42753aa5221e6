"""resnet_pipeline: train a ResNet cut into stages, one per process, which work at the same time.

The batch is cut into micro-batches: a stage computes one while the next stage computes the one
before. GPipe, 1F1B, interleaved 1F1B and zero bubble are written out in schedule.py, v_schedule.py
and pipeline.py; `--engine torch` runs torch.distributed.pipelining.

    python -m examples.resnet_pipeline                                   # un-split: one stage
    python -m examples.resnet_pipeline --nproc 2                         # two stages
    python -m examples.resnet_pipeline --nproc 4 --stages 2              # two replicas x two stages
    python -m examples.resnet_pipeline --nproc 2 --schedule gpipe -m 8   # 8 micro-batches
    python -m examples.resnet_pipeline --nproc 2 --schedule interleaved  # two stages per process
    python -m examples.resnet_pipeline --nproc 2 --schedule zbv          # backward in two halves
    python -m examples.resnet_pipeline --nproc 2 --engine torch --schedule zero-bubble
    python -m examples.resnet_pipeline --nproc 2 --dataset imagenet --image-size 224 -b 64
    torchrun --nproc-per-node 2 -m examples.resnet_pipeline              # started by torchrun
"""

import os
import runpy
from functools import partial

import torch
import torch.distributed as dist
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from common.images.loader import warn_of_broken
from common.launch.collectives import gather_objects
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.checks import check_replicas
from common.train.loader import local_batch
from common.train.run import Run
from examples.resnet_pipeline.args import Args
from examples.resnet_pipeline.evaluate import evaluate
from examples.resnet_pipeline.full_state import FullState
from examples.resnet_pipeline.grid import average_over_replicas, make_grid
from examples.resnet_pipeline.images import image_sets, loaders
from examples.resnet_pipeline.model import PADDING
from examples.resnet_pipeline.partition import describe
from examples.resnet_pipeline.schedule import micro_batch_sizes
from examples.resnet_pipeline.stages import build_local_stages, check_batch_norm, make_pipeline
from examples.resnet_pipeline.timeline import Timeline, report_timeline


def main(place: Place, args: Args) -> None:
    """Spawn this node's processes, unless torchrun or srun has started them already."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    place.export(local_rank)
    # CUDA has 8 hardware queues by default, and each receive that was posted early waits in one.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device, backend = choose_device(args.launch, local_rank)
    # Not bound to the device: nccl would then send all messages of a group in one stream, in order,
    # and stages that send and receive at once could wait for each other.
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience)
    train(args, device)
    dist.destroy_process_group()


def train(args: Args, device: torch.device) -> None:
    """Train and evaluate; every rank runs this with its own stages."""
    flags = args.pipeline
    grid = make_grid(flags.stages, device, args.launch.patience)
    batch = local_batch(args.batch_size, grid.dp_size, f"{grid.dp_size} replicas")
    sizes = micro_batch_sizes(batch, flags.micro_batches)
    torch.manual_seed(args.seed)
    data = image_sets(args)
    options = {
        "what": f"{data}, {flags.arch} with {flags.norm} norm",
        "shares": f"{grid.dp_size} replica(s) x micro-batches of {', '.join(map(str, sizes))}",
        "settings": {"micro_batches": len(sizes), "replicas": grid.dp_size},
        # All stages of a replica go through its part of each batch; it counts in the first one.
        "shard": (grid.dp_rank, grid.dp_size),
        "counts": grid.pp_rank == 0,
    }
    with Run(args, device, data, **options) as run:
        train_batches, test_batches = loaders(args, data, run.amp, grid)
        sampler = train_batches.batch_sampler
        check_batch_norm(flags, sampler.smallest(batch), args.image_size)
        probe = run.amp.to_device(torch.randn(batch, 3, args.image_size, args.image_size))
        local = build_local_stages(flags, args.seed, len(data.classes), probe, run.amp, grid)
        run.print0("\n".join(describe(local.partition, flags.schedule, grid.pp_size, sizes)))
        timeline = Timeline(dist.get_rank(), device)
        pipeline = make_pipeline(flags, local, grid, probe.shape, timeline)
        optimizer = AdamW(local.parameters, args.lr, weight_decay=args.weight_decay)
        steps = args.epochs * len(train_batches)
        scheduler = OneCycleLR(optimizer, args.lr, steps, cycle_momentum=False)
        full = FullState(local, optimizer, grid)
        parts = {"model": full.model, "optimizer": full.optimizer, "scheduler": scheduler}
        report_broken = partial(warn_of_broken, run, train_batches, test_batches)
        run.resume(before_save=lambda: (full.gather(), report_broken()), **parts)

        for epoch in run.epochs(args.epochs):
            sampler.set_epoch(epoch)  # without this, every epoch has the same order
            for images, labels in run.steps(train_batches):  # [B, 3, H, W], [B]
                batch_samples, local_samples = run.batch_share()
                labels[local_samples:] = PADDING  # so that replicas get the same number
                timeline.begin()
                # batch_samples / D is a replica's share on average: dividing by it makes the mean
                # over the D replicas the mean over the global batch.
                sizes = micro_batch_sizes(len(labels), flags.micro_batches)
                loss = pipeline.step(images, labels, sizes, batch_samples / grid.dp_size)
                average_over_replicas(local.modules, grid)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.log(loss * grid.pp_size)  # only the last stage's process has it
            evaluation = evaluate(local, grid, test_batches, len(data.classes))
            run.end_epoch(evaluation, model=full.model.module)

        for index, stage in local.stages.items():
            check_replicas(stage, part=index)
        facts = flags.facts | {"stages": grid.pp_size, "replicas": grid.dp_size}
        facts["most_kept"] = gather_objects(pipeline.most_kept)
        facts["bubble"] = report_timeline(timeline, args.out, flags.title)
        facts["skipped_images"] = report_broken()
        run.finish(parameter_hash=full.parameter_hash(), **facts)


if __name__ == "__main__":  # the same as python -m examples.resnet_pipeline
    runpy.run_module("examples.resnet_pipeline", run_name="__main__")
