"""imagenet_ddp: train a torchvision classifier on a folder of images with DDP; model.py builds it.

Command lines for `imagenet/main.py` from pytorch/examples work here, with or without GPUs.

    python -m examples.imagenet_ddp --nproc 2                         # digits, enlarged
    python -m examples.imagenet_ddp -a resnet50 DIR                   # DIR/{train,val}/CLASS/*
    python -m examples.imagenet_ddp -a resnet50 --multiprocessing-distributed DIR    # all GPUs
    torchrun --nproc-per-node 8 --max-restarts 3 -m examples.imagenet_ddp -a resnet50 DIR
    python -m examples.imagenet_ddp --dist-url tcp://HOST0:29500 --world-size 2 --rank R DIR
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from common.ddp import warm_up_buckets
from common.evaluate import evaluate, write_predictions
from common.images import image_loaders, normalize
from common.precision import autocast, set_kernels
from common.rank import init_distributed, local_batch_size, print0, record
from common.run import Run

from .args import Args
from .model import ExponentialAverage, build_model, load_trained, make_scheduler, model_options


def main(args: Args) -> None:
    """Start several ranks on this machine; not called under torchrun or srun."""
    mp.start_processes(main_worker, (args,), args.nproc, start_method="forkserver")


@record  # prints an error once per job, and sets the exit code
def main_worker(local_rank: int, args: Args) -> None:
    """Train on one rank."""
    device = init_distributed(args, local_rank)  # calls dist.init_process_group
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # DDP broadcasts rank 0's parameters; only dropout differs
    loader, test_loader = image_loaders(
        args.data,
        local_batch_size(args.batch_size, world_size),
        args.image_size,
        args.seed,
        args.workers,
        dummy=args.dummy,
        pin_memory=device.type == "cuda",
        timeout=args.timeout,
    )
    classes, total = loader.dataset.classes, len(test_loader.dataset)
    network = build_model(args, len(classes), device)
    if args.evaluate:
        load_trained(network, args, classes)
        set_kernels(args.deterministic, device)
        batches = ((normalize(p, device, torch.channels_last), y) for p, y in test_loader)
        metrics = evaluate(network, batches, total, autocast(args.precision, device)).metrics
        print0("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        return

    model = DDP(
        # DDP splits a compiled model into one graph per bucket, so that a bucket's gradients
        # are sent while the backward pass continues.
        torch.compile(network, dynamic=False) if args.compile else network,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # avoids a copy of the gradients
    )
    ema = ExponentialAverage(network, args.ema) if args.ema else None
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    optimizer = SGD(
        model.parameters(),
        args.lr,
        args.momentum,
        weight_decay=args.weight_decay,
        fused=not scaler.is_enabled(),  # if the scaler skips step 1, fused SGD gets no momentum
    )
    scheduler = make_scheduler(args, optimizer, loader)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    source = "random pixels" if args.dummy else args.data or "digits"
    what = f"{args.arch} on {source}, {len(loader.dataset)} training images"
    about = {"classes": classes, "model": args.arch, "size": args.image_size}
    about["options"] = model_options(args)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run = Run(args, device, what, about=about, **state, scaler=scaler, ema=ema)  # resumes here
    run.epoch = max(run.epoch, args.start_epoch)
    warm_up_buckets(model)  # makes a resumed run match an uninterrupted one bit for bit

    for epoch in run.epochs(args.epochs):
        loader.sampler.set_epoch(epoch)  # without this, every epoch has the same order
        for pixels, labels in run.steps(loader):  # bytes [B / W, 3, H, W], [B / W]
            images = normalize(pixels, device, torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = torch.zeros((), device=device)
            micro_batches = zip(
                images.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True
            )
            for number, (inputs, targets) in enumerate(micro_batches, 1):
                # Gradients add up. DDP averages them over the ranks in the last backward pass.
                with nullcontext() if number == args.accumulate else model.no_sync():
                    with run.autocast:
                        logits = model(inputs).float()  # [B / W / accumulate, C]
                    # The mean of the micro-batches' means is the mean of the batch.
                    micro_loss = criterion(logits, targets) / args.accumulate
                    scaler.scale(micro_loss).backward()
                loss += micro_loss.detach()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if ema:
                ema.update_parameters(network)
            run.log(loss)
        batches = ((normalize(p, device, torch.channels_last), y) for p, y in test_loader)
        evaluation = evaluate(ema.module if ema else network, batches, total, run.autocast)
        if run.end_epoch(evaluation.metrics, score=evaluation.metrics["accuracy"]):
            columns = test_loader.dataset.columns
            write_predictions(args.out / "predictions.csv", classes, evaluation, **columns)
    run.finish(model)
    dist.destroy_process_group()
