"""mnist_dataparallel: train with `nn.DataParallel`; eight_steps.py does the same by hand.

    python -m examples.mnist_dataparallel                     # all GPUs, or 2 CPU threads
    python -m examples.mnist_dataparallel --explain           # prints the eight steps
    python -m examples.mnist_dataparallel --device-ids 0 2    # cuda:0 and cuda:2
    torchrun --nnodes 2 --node-rank R --master-addr HOST0 -m examples.mnist_dataparallel

One process uses all devices on a machine; processes on several machines average their gradients.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

from common.data import DigitNet, image_data
from common.ddp import all_reduce_mean
from common.evaluate import evaluate
from common.rank import init_distributed, local_batch_size, record
from common.run import Run

from .args import Args
from .eight_steps import EightSteps, flat_state

LR = 0.2  # peak learning rate of the one-cycle schedule


class InAutocast(nn.Module):
    """The model, with autocast in `forward`, because the replicas' threads do not inherit it."""

    def __init__(self, model: nn.Module, autocast: torch.autocast) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 logits [N, classes] for images [N, 1, S, S]."""
        with self.autocast:
            return self.model(images).float()


def main(args: Args) -> None:
    """Start several ranks on this machine; not called under torchrun or srun."""
    mp.start_processes(main_worker, (args,), args.nproc, start_method="forkserver")


@record  # prints an error once per job, and sets the exit code
def main_worker(local_rank: int, args: Args) -> None:
    """Train on all devices of one process."""
    devices = choose_devices(args, init_distributed(args, local_rank))
    device, cuda, world_size = devices[0], devices[0].type == "cuda", dist.get_world_size()
    torch.manual_seed(args.seed)  # equal parameters in all processes; DDP would broadcast them
    data = image_data(args.dataset, Path("data"))
    local_batch = local_batch_size(args.batch_size, world_size)
    sampler = DistributedSampler(data.train, seed=args.seed, drop_last=True)
    loader = DataLoader(
        data.train,
        local_batch,
        sampler=sampler,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=cuda,
    )
    test_loader = DataLoader(data.test, 1000, sampler=DistributedSampler(data.test, shuffle=False))
    model = DigitNet(data.size, len(data.class_names)).to(device)
    optimizer = SGD(model.parameters(), LR, 0.9, weight_decay=5e-4, nesterov=True, fused=cuda)
    scheduler = OneCycleLR(optimizer, LR, args.epochs * len(loader), cycle_momentum=False)
    chunks = [len(chunk) for chunk in torch.arange(local_batch).chunk(len(devices))]
    what = f"{data}; {local_batch} samples = {chunks} on {', '.join(map(str, devices))}"
    run = Run(
        args, device, what, about=data.about, model=model, optimizer=optimizer, scheduler=scheduler
    )

    network = InAutocast(model, run.autocast)
    if cuda and not args.explain:
        parallel = nn.DataParallel(network, device_ids=devices)
    else:  # without CUDA devices, nn.DataParallel would only call the network
        parallel = EightSteps(network, devices, log=run.print0 if args.explain else None)

    for epoch in run.epochs(args.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the same order
        for images, labels in run.steps(loader):  # [B / W, 1, S, S], [B / W]
            images, labels = (x.to(device, non_blocking=True) for x in (images, labels))
            logits = parallel(images)  # scatter, replicate, forward in threads, gather
            # This loss is exact for unequal chunks; a mean of the chunks' means would not be.
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()  # in threads; sums the replicas' gradients
            if world_size > 1:  # several processes; DDP cannot wrap DataParallel
                all_reduce_mean(p.grad for p in model.parameters() if p.grad is not None)
            optimizer.step()
            scheduler.step()
            if isinstance(parallel, EightSteps):
                parallel.show("8 optimizer.step() updates the model", [flat_state(model)])
            run.log(loss)
        evaluation = evaluate(model, test_loader, len(data.test), run.autocast)
        run.end_epoch(evaluation.metrics, score=evaluation.metrics["accuracy"])
    # The first device also stores the optimizer state, inputs and outputs, and runs evaluation.
    memory = [torch.cuda.max_memory_allocated(each) for each in devices if cuda]
    run.finish(model, devices=devices, chunks=chunks, peak_memory=memory)
    dist.destroy_process_group()


def choose_devices(args: Args, device: torch.device) -> list[torch.device]:
    """Return this process's devices; the model is on the first one."""
    if device.type == "cpu":
        return [device] * (len(args.device_ids) or 2)
    alone = os.environ["LOCAL_WORLD_SIZE"] == "1"  # otherwise, each process has its own device
    every = range(torch.cuda.device_count()) if alone else [device.index]
    return [torch.device("cuda", index) for index in args.device_ids or every]
