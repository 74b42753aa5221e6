"""imagenet_ddp: train any torchvision classification model on a folder of images.

The command lines of pytorch/examples `imagenet/main.py` work here, with GPUs or without.

    python -m examples.imagenet_ddp                                   # draws its own images
    python -m examples.imagenet_ddp -a resnet50 DIR                   # DIR/{train,val}/CLASS/*
    python -m examples.imagenet_ddp -a resnet50 --multiprocessing-distributed DIR    # all GPUs
    python -m examples.imagenet_ddp -a resnet50 --dummy               # no files: measures speed
    python -m examples.imagenet_ddp -a resnet50 -e --resume auto DIR  # evaluates only
    torchrun --nproc-per-node 8 --max-restarts 3 -m examples.imagenet_ddp -a resnet50 DIR
    python -m examples.imagenet_ddp --dist-url tcp://HOST0:29500 --world-size 2 --rank 0 DIR
    python -m examples.imagenet_ddp --dist-url tcp://HOST0:29500 --world-size 2 --rank 1 DIR
"""

import runpy
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import CrossEntropyLoss
from torch.nn.parallel import DistributedDataParallel as DDP

from common.images.loader import eval_loader, train_loader, warn_of_broken
from common.images.sets import load_images
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.checks import check_replicas
from common.train.ddp import check_smallest_batch, warm_up_buckets
from common.train.evaluate import evaluate
from common.train.loader import local_batch
from common.train.run import Run
from examples.imagenet_ddp.args import Args
from examples.imagenet_ddp.evaluate import evaluate_only
from examples.imagenet_ddp.recipe import build_model, make_ema, make_optimizer, make_scheduler

PADDING = -100  # a label that CrossEntropyLoss ignores


def main(place: Place, args: Args) -> None:
    """Spawn this node's processes, unless torchrun or srun has started them already."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    place.export(local_rank)  # RANK, LOCAL_RANK, WORLD_SIZE, ... as torchrun sets them
    device, backend = choose_device(args.launch, local_rank)
    bound = device if device.type == "cuda" else None  # nccl connects now, not in the first step
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience, device_id=bound)
    if args.evaluate:
        evaluate_only(args, device)
    else:
        train(args, device)
    dist.destroy_process_group()


def train(args: Args, device: torch.device) -> None:
    """Train and evaluate; every rank runs this with its own share of the data."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # dropout differs; DDP sends rank 0's parameters to all
    data, recipe = load_images(args.images, args.seed, args.out), args.recipe
    epochs, batch_size = args.num_epochs, args.global_batch
    passes = f"{world_size} rank(s) x {args.accumulate} backward pass(es)"
    micro_batch = local_batch(batch_size, world_size * args.accumulate, passes)
    shown = {"what": f"{recipe.arch} on {data}", "shares": f"{passes} x {micro_batch}"}
    with Run(args, device, data, **args.options, **shown) as run:
        loader = train_loader(data.train, batch_size, run.amp, args.seed, args.images.workers)
        test_loader = eval_loader(data.val, 2 * micro_batch, run.amp, args.images.workers)
        network = build_model(recipe, len(data.classes), data.size, device)
        model = DDP(
            run.prepare(network),
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=args.find_unused_parameters,
            static_graph=args.static_graph,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
        )
        ema = make_ema(recipe, network)
        eval_model = ema.module if ema else network
        optimizer = make_optimizer(recipe, model, args.learning_rate, run.scaler)
        scheduler = make_scheduler(recipe, optimizer, len(loader), epochs)
        criterion = CrossEntropyLoss(reduction="sum", label_smoothing=recipe.label_smoothing)
        report_broken = partial(warn_of_broken, run, loader, test_loader)
        run.state.epoch = recipe.start_epoch
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema}
        run.resume(before_save=report_broken, **parts)
        smallest = torch.zeros(loader.batch_sampler.smallest(micro_batch), 3, data.size, data.size)
        check_smallest_batch(network, run.autocast, run.amp.to_device(smallest))
        warm_up_buckets(model)  # a resumed run then adds gradients in the same order

        for epoch in run.epochs(epochs):
            loader.batch_sampler.set_epoch(epoch)  # without this, every epoch has the same order
            for images, labels in run.steps(loader):  # [B, 3, H, W], [B], on the device
                batch_samples, local_samples = run.batch_share()
                labels[local_samples:] = PADDING
                optimizer.zero_grad()
                loss = torch.zeros((), device=device)
                for start in range(0, len(labels), micro_batch):
                    is_last = start + micro_batch >= len(labels)
                    # Gradients add up here; DDP averages them in the last backward only.
                    with nullcontext() if is_last else model.no_sync():
                        with run.autocast():
                            logits = model(images[start : start + micro_batch]).float()
                        loss_sum = criterion(logits, labels[start : start + micro_batch])
                        # The average over the ranks is the mean over the global batch.
                        micro_loss = loss_sum * world_size / batch_samples
                        run.scaler.scale(micro_loss).backward()
                    loss += micro_loss.detach()
                run.scaler.step(optimizer)
                run.scaler.update()
                scheduler.step()
                if ema:
                    ema.update_parameters(network)
                run.log(loss)
            evaluation = evaluate(eval_model, test_loader, len(data.classes), run.autocast)
            run.end_epoch(evaluation, model=eval_model)
        run.finish(parameter_hash=check_replicas(eval_model), skipped_images=report_broken())


if __name__ == "__main__":  # the same as python -m examples.imagenet_ddp
    runpy.run_module("examples.imagenet_ddp", run_name="__main__")
