"""your_model: a template for your own training. Change the four marked places.

    python -m examples.your_model                                        # one process
    python -m examples.your_model --nproc 2                              # two processes
    torchrun --standalone --nproc-per-node 2 -m examples.your_model      # started by torchrun

The number of ranks must divide the batch size, and affects the result only through rounding.
`plain_ddp.py` trains this model in one file with plain torch; `further/language_model.py` is this
file with the four marked places changed.
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.ddp import warm_up_buckets
from common.evaluate import evaluate, write_predictions
from common.rank import init_distributed, local_batch_size, record
from common.run import Run

from .args import Args

# 1. YOUR DATA: two datasets; here, a sample is 30 measurements of a tumor [30] and its label.
CLASSES = ["malignant", "benign"]  # names of labels 0 and 1


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 426 tumors for training and 143 for testing."""
    rows, labels = (torch.tensor(array) for array in load_breast_cancer(return_X_y=True))
    test = torch.arange(len(labels)) % 4 == 0
    rows = ((rows - rows[~test].mean(0)) / rows[~test].std(0)).float()  # training statistics
    return TensorDataset(rows[~test], labels[~test]), TensorDataset(rows[test], labels[test])


# 2. YOUR MODEL: it contains no code for ranks.
def build_model() -> nn.Module:
    """Return a network that maps rows [B, 30] to logits [B, 2]."""
    return nn.Sequential(nn.Linear(30, 32), nn.GELU(), nn.Linear(32, len(CLASSES)))


def main(args: Args) -> None:
    """Start several ranks on this machine; not called under torchrun or srun."""
    mp.start_processes(main_worker, (args,), args.nproc, start_method="forkserver")


@record  # prints an error once per job, and sets the exit code
def main_worker(local_rank: int, args: Args) -> None:
    """Train on one rank."""
    device = init_distributed(args, local_rank)  # cuda and nccl, or cpu and gloo
    rank, world_size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    torch.manual_seed(args.seed)  # all ranks must load the same samples in the same order
    train_set, test_set = load_data()
    torch.manual_seed(args.seed + rank)  # for dropout; DDP broadcasts rank 0's parameters
    # Rank r gets samples r, r + W, r + 2W, ... of a permutation. drop_last leaves out samples that
    # do not fill a global batch, so that all ranks have batches of equal size in every step.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(
        train_set,
        local_batch_size(args.batch_size, world_size),
        sampler=sampler,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=cuda,
    )
    test_sampler = DistributedSampler(test_set, shuffle=False)
    # 1,000 samples per rank and batch; use fewer if the memory is too small.
    test_loader = DataLoader(test_set, 1000, sampler=test_sampler, num_workers=args.workers)
    model = DDP(
        build_model().to(device),
        device_ids=[device] if cuda else None,
        find_unused_parameters=False,  # True if some steps do not use all parameters
        gradient_as_bucket_view=True,  # avoids a copy of the gradients
    )
    optimizer = AdamW(model.parameters(), args.lr)
    scheduler = OneCycleLR(optimizer, args.lr, args.epochs * len(loader), cycle_momentum=False)
    run = Run(  # bookkeeping: it resumes here and never calls the model, the loss or the optimizer
        args,
        device,
        f"{len(train_set)} training samples",
        about={"classes": CLASSES},
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
    )
    warm_up_buckets(model)  # makes a resumed run match an uninterrupted one bit for bit

    for epoch in run.epochs(args.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the same order
        model.train()  # from_pretrained returns a model in evaluation mode
        for inputs, labels in run.steps(loader):  # [B / W, 30], [B / W]
            inputs, labels = (x.to(device, non_blocking=True) for x in (inputs, labels))
            with run.autocast:
                outputs = model(inputs).float()
            # 3. YOUR LOSS: the mean over this rank's samples.
            loss = F.cross_entropy(outputs, labels)  # [B / W, 2], [B / W]
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients over the ranks, bucket by bucket
            optimizer.step()
            scheduler.step()
            run.log(loss)
        # 4. YOUR METRIC: over the whole test set, each sample once; equal on all ranks.
        evaluation = evaluate(model, test_loader, len(test_set), run.autocast)
        if run.end_epoch(evaluation.metrics, score=evaluation.metrics["accuracy"]):
            write_predictions(args.out / "predictions.csv", CLASSES, evaluation)
    run.finish(model)
    dist.destroy_process_group()
