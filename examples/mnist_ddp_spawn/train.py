"""mnist_ddp_spawn: train a network on digits with DDP; every distributed step is in this file.

    python -m examples.mnist_ddp_spawn                        # a world of one
    python -m examples.mnist_ddp_spawn --nproc 2              # two processes
    torchrun --nproc-per-node 2 -m examples.mnist_ddp_spawn   # started by torchrun
    python -m examples.mnist_ddp_spawn --world-size 2 --rank 0 --dist-url tcp://HOST0:29500
    python -m examples.mnist_ddp_spawn --world-size 2 --rank 1 --dist-url tcp://HOST0:29500

With any number of processes, the training is the same up to rounding. `Run` is bookkeeping; it also
communicates, to stop together, to save, and to average the losses.
"""

import runpy

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

from common.data.idx import image_data
from common.data.models import DigitNet
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import wait_for
from common.train.ddp import warm_up_buckets
from common.train.evaluate import evaluate
from common.train.run import Run
from examples.mnist_ddp_spawn.args import Args

PADDING = -100  # a label that cross_entropy ignores


def main(place: Place, args: Args) -> None:
    """Spawn this node's processes, unless a launcher has started them or there is only one."""
    if place.launched:
        main_worker(place.local_rank, place, args)
        return
    # mp.spawn would import torch anew in each process; these are forked from one in which
    # `start` (common/launch/args.py) has had it imported.
    context = mp.start_processes(
        main_worker, (place, args), place.local_world_size, join=False, start_method="forkserver"
    )
    wait_for(context)


@record  # one line per error and job, a clean stop on SIGTERM; torch's own `record` works, too
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job: rank = node * processes per node + local rank."""
    place.export(local_rank)  # RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun
    device, backend = choose_device(args.launch, local_rank)  # "cpu:gloo,cuda:nccl", or "gloo"
    # JOB works like env://, and names the ranks that do not come.
    bound = device if device.type == "cuda" else None  # nccl connects now, not in the first step
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience, device_id=bound)
    train(args, device)
    dist.destroy_process_group()


def train(args: Args, device: torch.device) -> None:
    """Train and evaluate; every rank runs this with its own share of the data."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # any dropout differs; DDP sends rank 0's parameters to all
    # local rank 0 downloads; the others wait
    data = image_data(args.dataset, args.data_dir, args.most_samples)
    with Run(args, device, data, **args.options) as run:
        sampler = DistributedSampler(data.train, seed=args.seed)  # rank r: r, r + W, r + 2W, ...
        loader = DataLoader(
            data.train,
            args.batch_size // world_size,
            sampler=sampler,
            num_workers=args.workers,
            collate_fn=list,  # data.train returns batches at once
            pin_memory=device.type == "cuda",
        )
        model = DDP(
            run.prepare(DigitNet(data.size, data.classes)),  # moved to the device
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=args.find_unused_parameters,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
        )
        optimizer = SGD(
            model.parameters(),
            args.lr,
            args.momentum,
            weight_decay=args.weight_decay,
            nesterov=args.momentum > 0,
            fused=device.type == "cuda" and not run.scaler.is_enabled(),  # in fp16 it can diverge
        )
        steps = args.num_epochs * len(loader)
        scheduler = OneCycleLR(optimizer, args.lr, steps, cycle_momentum=False)
        run.resume(model=model, optimizer=optimizer, scheduler=scheduler)  # with --resume
        warm_up_buckets(model)  # a resumed run then has the same bits with 3 ranks, too

        for epoch in run.epochs(args.num_epochs):
            sampler.set_epoch(epoch)  # without this, every epoch has the same order
            for pixels, labels in run.steps(loader):  # [B, 1, H, W] bytes, [B]
                # DDP needs all ranks in every step: the sampler pads the epoch's last batch.
                batch_samples, local_samples = run.batch_share()
                labels[local_samples:] = PADDING
                pixels, labels = (x.to(device, non_blocking=True) for x in (pixels, labels))
                with run.autocast():
                    logits = model(data.normalise(pixels)).float()  # [B, classes]
                loss_sum = F.cross_entropy(
                    logits, labels, reduction="sum", label_smoothing=args.label_smoothing
                )
                # DDP averages over the ranks: mean of (loss_sum * W / B) = mean over the batch.
                loss = loss_sum * world_size / batch_samples
                optimizer.zero_grad()
                run.scaler.scale(loss).backward()  # DDP all-reduces full buckets meanwhile
                run.scaler.step(optimizer)
                run.scaler.update()
                scheduler.step()
                run.log(loss)  # kept on the device; one all_reduce per epoch averages them
            # Each rank evaluates its shard; all_gather puts the predictions back in order.
            test_loader = data.eval_loader(args.test_batch_size)
            evaluation = evaluate(model.module, test_loader, data.classes, run.autocast)
            run.end_epoch(evaluation)  # rank 0 writes the checkpoint and the files
        run.finish()


if __name__ == "__main__":  # the same as python -m examples.mnist_ddp_spawn
    runpy.run_module("examples.mnist_ddp_spawn", run_name="__main__")
