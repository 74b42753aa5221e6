"""Data-parallel training in one file that needs only torch and scikit-learn; copy it anywhere.

    python plain_ddp.py                                              # one process
    torchrun --standalone --nproc-per-node 2 plain_ddp.py            # two: the same losses
    torchrun --standalone --nproc-per-node 2 plain_ddp.py --resume --epochs 30

The number of ranks must divide the batch size, and affects the result only through rounding.
`train.py` adds a clean stop, exact resuming, mixed precision and logs for long runs.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after init_process_group, it keeps gloo's threads alive
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = Path("runs/plain_ddp.pt")


def load_data() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return 426 tumors for training, and the rows [143, 30] and labels [143] of the test set."""
    rows, labels = (torch.tensor(array) for array in load_breast_cancer(return_X_y=True))
    test = torch.arange(len(labels)) % 4 == 0
    rows = ((rows - rows[~test].mean(0)) / rows[~test].std(0)).float()
    return TensorDataset(rows[~test], labels[~test]), rows[test], labels[test]


@torch.no_grad()
def accuracy(model: nn.Module, rows: Tensor, labels: Tensor) -> float:
    """Return the accuracy on the test set, each sample counted once. Every rank calls this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.eval()
    correct = (model(rows[rank::world_size]).argmax(1) == labels[rank::world_size]).sum()
    model.train()
    dist.all_reduce(correct)
    return correct.item() / len(labels)


def main() -> None:
    """Train on one rank; torchrun starts all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=48, help="global batch size")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--resume", action="store_true", help=f"continue from {CHECKPOINT}")
    args = parser.parse_args()

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # NCCL needs a GPU for each rank of this machine.
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # otherwise, "cuda" means GPU 0 on every rank
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:  # torchrun sets RANK, WORLD_SIZE and the address of rank 0
        dist.init_process_group(backend, device_id=device if cuda else None)
    else:  # a single process needs no address, only a store in memory
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world_size:
        text = f"--batch-size {args.batch_size} is not divisible by {world_size} ranks"
        raise SystemExit(text if rank == 0 else 1)

    train_set, test_rows, test_labels = load_data()  # the same samples on all ranks
    test_rows, test_labels = test_rows.to(device), test_labels.to(device)
    torch.manual_seed(rank)  # for dropout, if any; DDP broadcasts rank 0's parameters
    # Rank r gets samples r, r + W, r + 2W, ... of a permutation, which the sampler's own seed makes
    # the same on all ranks. Without drop_last, the sampler would repeat some samples, and the
    # loader's last batch would be incomplete.
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(30, 32), nn.GELU(), nn.Linear(32, 2)).to(device)
    optimizer = AdamW(model.parameters(), args.lr)
    first_epoch = 0
    # Before DDP wraps the model, its parameters' names lack the prefix "module.".
    if args.resume and CHECKPOINT.exists():  # all ranks read the file
        saved = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"]
    ddp = DDP(model, device_ids=[device] if cuda else None)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the same order
        loss_sum = torch.zeros((), device=device)
        for rows, labels in loader:  # [B / W, 30], [B / W]
            loss = nn.functional.cross_entropy(ddp(rows.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients over the ranks, bucket by bucket
            optimizer.step()
            loss_sum += loss.detach()  # .item() would make the host wait for the GPU
        dist.all_reduce(loss_sum)
        mean_loss = loss_sum.item() / (len(loader) * world_size)
        score = accuracy(model, test_rows, test_labels)  # not `ddp`, which may communicate
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean_loss:.7f}, accuracy {score:.4f}", flush=True)
            CHECKPOINT.parent.mkdir(exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch + 1}, f"{CHECKPOINT}.new")
            Path(f"{CHECKPOINT}.new").replace(CHECKPOINT)  # atomic: the file is never partial
    dist.barrier()  # otherwise, ranks that still communicate could fail
    dist.destroy_process_group()  # gloo's threads could abort a process that exits


if __name__ == "__main__":
    main()
