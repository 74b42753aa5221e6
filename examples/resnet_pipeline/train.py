"""resnet_pipeline: train a ResNet that is cut into stages, one per process.

    python -m examples.resnet_pipeline                          # one stage: the un-split model
    python -m examples.resnet_pipeline --nproc 2                # two stages
    python -m examples.resnet_pipeline --nproc 4 --stages 2     # two replicas of two stages

Read two_devices.py first. pipeline.py contains the schedules and messages, and stages.py the cuts.
The un-split ResNet with gradient accumulation over micro-batches gives the same result. With
--norm group, the result does not depend on the numbers of micro-batches and replicas either.
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.optim import AdamW

from common.ddp import all_reduce_mean
from common.evaluate import evaluate, write_predictions
from common.images import normalize
from common.launch import UserError
from common.rank import init_distributed, record
from common.run import Run

from .args import Args
from .data import load_images
from .pipeline import Pipeline, gpipe, make_mesh, one_forward_one_backward
from .stages import build, build_stage
from .state import WholeModel, WholeOptimizer

SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def main(args: Args) -> None:
    """Start several ranks on this machine; not called under torchrun or srun."""
    mp.start_processes(main_worker, (args,), args.nproc, start_method="forkserver")


@record  # prints an error once per job, and sets the exit code
def main_worker(local_rank: int, args: Args) -> None:
    """Train one stage of one replica."""
    device = init_distributed(args, local_rank)  # cuda and nccl, or cpu and gloo
    stages = args.stages or dist.get_world_size()
    if dist.get_world_size() % stages:
        raise UserError(f"the number of ranks must be a multiple of --stages {stages}")
    mesh = make_mesh(device.type, stages, args.timeout)  # [dp, pp]: replicas x stages
    replicas, replica_group = mesh.size(0), mesh.get_group("dp")
    train_loader, test_loader = load_images(args, mesh)
    classes, test_samples = train_loader.dataset.classes, len(test_loader.dataset)

    torch.manual_seed(args.seed)  # every rank draws the whole model and keeps one stage of it
    settings = args.arch, len(classes), args.norm
    stage = build_stage(*settings, stages, mesh.get_local_rank("pp"), args.cuts).to(device)
    pipeline = Pipeline(stage, mesh, SCHEDULES[args.schedule], args.micro_batches, args.timeout)
    optimizer = AdamW(stage.parameters(), args.lr, fused=True)
    whole = WholeModel(stage, mesh.get_group("pp"))  # checkpoints fit any number of stages
    run = Run(
        args,
        device,
        f"{args.arch} in {stages} stage(s), {len(train_loader.dataset)} training images",
        replicas=replicas,
        about={"classes": classes, "model": args.arch, "norm": args.norm, "size": args.image_size},
        model=whole,
        optimizer=WholeOptimizer(optimizer, stage, mesh.get_group("pp")),
    )

    for epoch in run.epochs(args.epochs):
        train_loader.sampler.set_epoch(epoch)  # without this, every epoch has the same order
        for pixels, labels in run.steps(train_loader):  # labels are equal within a replica
            images = normalize(pixels, device, torch.channels_last)  # [B / D, 3, H, W]
            optimizer.zero_grad()
            with run.autocast:  # around all micro-batches, to cast weights once per step
                loss = pipeline.step(images, labels.to(device, non_blocking=True))
            if replicas > 1:
                averaged = [p.grad for p in stage.parameters() if p.grad is not None]
                averaged += [b for b in stage.buffers() if b.is_floating_point()]  # running stats
                all_reduce_mean(averaged, replica_group)
            optimizer.step()
            run.log(loss * stages)  # the mean over all ranks; only last stages have a loss
        batches = ((normalize(x, device, torch.channels_last), y) for x, y in test_loader)
        evaluation = evaluate(pipeline, batches, test_samples, run.autocast, replica_group)
        if run.end_epoch(evaluation.metrics, score=evaluation.metrics["accuracy"]):
            write_predictions(args.out / "predictions.csv", classes, evaluation)
    run.finish(whole.copy_to(build(*settings)), stages=stages)
    dist.destroy_process_group()
