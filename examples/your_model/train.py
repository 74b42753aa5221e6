"""your_model: train your own model: a template in which four marked places change.

    python -m examples.your_model                                 # a world of one
    python -m examples.your_model --nproc 2                       # two processes
    python -m examples.your_model --multiprocessing-distributed   # one process per GPU
    torchrun --nproc-per-node 2 -m examples.your_model            # started by torchrun
    python -m examples.your_model.language_model --nproc 2        # the same frame, another task

With any number of processes, the training is the same up to rounding.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.data.samplers import Shard
from common.launch.args import start
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.ddp import warm_up_buckets
from common.train.evaluate import evaluate
from common.train.run import Run
from examples.your_model.args import Args

PADDING = -100  # a label that cross_entropy ignores


# 1. YOUR DATA: a sample is an input, a label, and its number in its set, from 0.
@dataclass(frozen=True)
class Data:
    """569 tumours: 30 measurements each [30], and whether the tumour is benign."""

    train: TensorDataset
    test: TensorDataset
    class_names = ("malignant", "benign")  # of labels 0 and 1, for predictions.csv

    def __str__(self) -> str:
        """What the run prints at its start."""
        return f"breast cancer ({len(self.train)} train, {len(self.test)} test)"

    @property
    def facts(self) -> dict[str, Any]:
        """What result.json says about the data."""
        return {"train_samples": len(self.train), "eval_samples": len(self.test)}


def load_data() -> Data:
    """Every fourth row is for the test; only the others decide how the columns are scaled."""
    table, labels = (torch.tensor(array) for array in load_breast_cancer(return_X_y=True))
    test = torch.arange(len(labels)) % 4 == 0
    table = ((table - table[~test].mean(0)) / table[~test].std(0)).float()
    train, tested = (
        TensorDataset(table[part], labels[part], torch.arange(int(part.sum())))
        for part in (~test, test)
    )
    return Data(train, tested)


# 2. YOUR MODEL: it does not know about ranks.
def build_model(data: Data) -> nn.Module:
    """Rows [B, columns] to logits [B, 2]."""
    columns = data.train.tensors[0].shape[1]
    return nn.Sequential(nn.Linear(columns, 32), nn.GELU(), nn.Linear(32, 2))


def main(place: Place, args: Args) -> None:
    """Train in every process of this node."""
    launch(main_worker, place, args)


@record  # one line per error and job, a clean stop on SIGTERM; torch's own `record` works, too
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    place.export(local_rank)  # RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun
    device, backend = choose_device(args.launch, local_rank)  # cuda and nccl, or cpu and gloo
    bound = device if device.type == "cuda" else None  # nccl connects now, not in the first step
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience, device_id=bound)
    train(args, device)
    dist.destroy_process_group()


def train(args: Args, device: torch.device) -> None:
    """Train and evaluate; every rank runs this with its own share of the data."""
    rank, world_size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    torch.manual_seed(args.seed + rank)  # dropout differs; DDP sends rank 0's parameters to all
    data = load_data()
    with Run(args, device, data, unit="samples") as run:
        sampler = DistributedSampler(data.train, seed=args.seed)
        loader = DataLoader(
            data.train,
            args.batch_size // world_size,
            sampler=sampler,
            num_workers=args.workers,
            pin_memory=cuda,
        )
        test_loader = DataLoader(
            data.test, 1000, sampler=Shard(len(data.test)), num_workers=args.workers
        )
        model = DDP(
            run.prepare(build_model(data)),
            device_ids=[device] if cuda else None,
            find_unused_parameters=args.find_unused_parameters,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
        )
        optimizer = AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay)
        steps = args.epochs * len(loader)
        scheduler = OneCycleLR(optimizer, args.lr, steps, cycle_momentum=False)
        run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
        warm_up_buckets(model)  # a resumed run then adds gradients in the same order

        for epoch in run.epochs(args.epochs):
            sampler.set_epoch(epoch)  # without this, every epoch has the same order
            model.train()  # from_pretrained gives a model in evaluation mode
            for inputs, labels in run.steps(loader):
                # The last batch may be smaller, and the sampler pads it with repeated samples, at
                # the end, because DDP needs all ranks in every step.
                batch_samples, local_samples = run.batch_share()
                labels[local_samples:] = PADDING
                inputs, labels = (x.to(device, non_blocking=True) for x in (inputs, labels))
                with run.autocast():
                    outputs = model(inputs).float()
                # 3. YOUR LOSS: the sum over this rank's samples, without the padding.
                loss_sum = F.cross_entropy(outputs, labels, reduction="sum")  # [B, 2], [B]

                # DDP averages over the ranks: this makes it the mean over the global batch.
                loss = loss_sum * world_size / batch_samples
                optimizer.zero_grad()
                run.scaler.scale(loss).backward()  # DDP all-reduces full buckets meanwhile
                run.scaler.step(optimizer)
                run.scaler.update()
                scheduler.step()
                run.log(loss)
            # 4. YOUR METRIC: of the whole test set, the same on all ranks.
            run.end_epoch(evaluate(model, test_loader, len(data.class_names), run.autocast))

        run.finish()


if __name__ == "__main__":
    start(Args, "examples.your_model.train:main")
