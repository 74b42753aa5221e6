"""mnist_ddp_spawn: train a network on digits; this file contains every step of DDP training.

    python -m examples.mnist_ddp_spawn                        # one process
    python -m examples.mnist_ddp_spawn --nproc 2              # two processes
    torchrun --nproc-per-node 2 -m examples.mnist_ddp_spawn   # started by torchrun

The number of processes affects the result only through rounding. docs/en/launchers.md covers
several nodes. `Run` resumes, saves and logs; it never calls the model, the loss or the optimizer.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from sklearn.metrics import precision_recall_fscore_support, roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

from common.data import DigitNet, image_data
from common.ddp import warm_up_buckets
from common.evaluate import Evaluation, evaluate, write_predictions
from common.launch import place
from common.rank import choose_device, local_batch_size, record, wait_for_ranks
from common.run import Run

from .args import Args


def main(args: Args) -> None:
    """Start the processes on this machine if --nproc is above 1."""
    # Otherwise, and under torchrun and srun, `start` (common/launch.py) calls main_worker directly.
    # mp.spawn would import torch again in each process; the fork server imports it only once.
    # The process index becomes the first argument.
    mp.start_processes(main_worker, (args,), args.nproc, start_method="forkserver")


@record  # prints an error once per job, and sets the exit code
def main_worker(local_rank: int, args: Args) -> None:
    """Train in one process of the job."""
    here = place(args, local_rank)  # rank = node * processes per node + local rank
    device, backend = choose_device(args, here)  # cuda and NCCL, or cpu and gloo
    dist.init_process_group(
        backend,
        store=wait_for_ranks(here, args.timeout),  # ranks exchange addresses through this store
        rank=here.rank,
        world_size=here.world_size,
        timeout=timedelta(seconds=args.timeout),
        device_id=device if "nccl" in backend else None,  # NCCL connects now, not in step 1
    )
    rank, world_size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    torch.manual_seed(args.seed + rank)  # for dropout; DDP broadcasts rank 0's parameters
    data = image_data(args.dataset, args.data_dir)  # one process per node downloads
    # Rank r gets the samples r, r + W, r + 2 W, ... of a permutation. Without drop_last, the
    # sampler would repeat some samples, and the loader's last batch would be incomplete.
    sampler = DistributedSampler(data.train, seed=args.seed, drop_last=True)
    loader = DataLoader(
        data.train,
        batch_size=local_batch_size(args.batch_size, world_size),  # this process's batch size
        sampler=sampler,  # shuffles
        drop_last=True,
        num_workers=args.workers,
        worker_init_fn=None,  # a function to call in each worker, for example to open a file
        pin_memory=cuda,  # allows asynchronous copies
    )
    # Without drop_last, this sampler repeats samples; `evaluate` removes the repeats.
    test_loader = DataLoader(data.test, 1000, sampler=DistributedSampler(data.test, shuffle=False))
    model = DDP(
        DigitNet(data.size, len(data.class_names)).to(device),
        device_ids=[device] if cuda else None,  # output_device defaults to this device
        find_unused_parameters=False,  # True if some steps do not use all parameters
        gradient_as_bucket_view=True,  # avoids a copy of the gradients
    )
    optimizer = SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True, fused=cuda)
    scheduler = OneCycleLR(optimizer, args.lr, args.epochs * len(loader), cycle_momentum=False)
    run = Run(  # with --resume, loads the checkpoint on every rank
        args, device, data, about=data.about, model=model, optimizer=optimizer, scheduler=scheduler
    )
    if not cuda and args.device == "auto":
        run.warn("no CUDA device found; large models train slowly on a CPU")  # yellow, on rank 0
    warm_up_buckets(model)  # makes a resumed run match an uninterrupted one bit for bit

    for epoch in run.epochs(args.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the same order
        for images, labels in run.steps(loader):  # [B / W, 1, S, S], [B / W]
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with run.autocast:
                logits = model(images).float()  # [B / W, C]
            # Local batches have equal sizes, so the mean of the ranks' means is the global mean.
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            loss.backward()  # DDP averages the gradients over the ranks, bucket by bucket
            optimizer.step()
            scheduler.step()
            run.log(loss)
        # Each rank evaluates its own samples; `evaluate` restores the dataset's order.
        evaluation = evaluate(model, test_loader, len(data.test), run.autocast)
        metrics = evaluation.metrics | report(evaluation)
        if run.end_epoch(metrics, score=metrics["accuracy"]):  # True for the best epoch so far
            write_predictions(args.out / "predictions.csv", data.class_names, evaluation)
    run.finish(model)
    dist.destroy_process_group()


def report(evaluation: Evaluation) -> dict[str, float]:
    """Return macro-averaged precision, recall and F1, and the one-vs-rest AUC."""
    targets, predictions = evaluation.targets.numpy(), evaluation.predictions.numpy()
    macro = precision_recall_fscore_support(targets, predictions, average="macro", zero_division=0)
    metrics = dict(zip(("precision", "recall", "f1"), map(float, macro[:3]), strict=True))
    scores = evaluation.scores.numpy()
    if len(set(targets)) == scores.shape[1]:
        scores = scores[:, 1] if scores.shape[1] == 2 else scores  # for scikit-learn's binary AUC
        metrics["auc"] = float(roc_auc_score(targets, scores, multi_class="ovr"))
    return metrics
