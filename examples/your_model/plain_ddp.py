"""Data-parallel training in one file of plain torch. Copy it anywhere: it needs nothing beside it.

    torchrun --standalone --nproc-per-node 2 plain_ddp.py
    torchrun --standalone --nproc-per-node 1 plain_ddp.py    # the same losses up to rounding

`train.py` trains the same model, and adds what long runs need: resuming, mixed precision, logs.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_SIZE, LR = 20, 48, 0.002  # BATCH_SIZE is global: divided by the ranks


def load_data() -> tuple[TensorDataset, Tensor, Tensor]:
    """569 tumours [30], benign or not: those to train on, and the rows and labels of the test."""
    table, labels = (torch.tensor(array) for array in load_breast_cancer(return_X_y=True))
    test = torch.arange(len(labels)) % 4 == 0
    table = ((table - table[~test].mean(0)) / table[~test].std(0)).float()
    return TensorDataset(table[~test], labels[~test]), table[test], labels[test]


@torch.no_grad()
def accuracy(model: nn.Module, rows: Tensor, labels: Tensor) -> float:
    """Of the whole test set: each rank takes every W-th sample. Every rank calls this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.eval()
    right = (model(rows[rank::world_size]).argmax(1) == labels[rank::world_size]).sum()
    model.train()
    dist.all_reduce(right)
    return right.item() / len(labels)


def main() -> None:
    """Train in one process of the job; torchrun starts all of them."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it by torchrun: torchrun --nproc-per-node 2 plain_ddp.py")
    cuda, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if os.environ["RANK"] == "0":
        print(f"starting {os.environ['WORLD_SIZE']} rank(s) ...", flush=True)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH_SIZE % world_size:
        raise SystemExit(f"{world_size} ranks do not divide BATCH_SIZE {BATCH_SIZE}: change one")
    torch.manual_seed(rank)  # any dropout differs; DDP sends rank 0's parameters to all
    train_set, test_rows, test_labels = load_data()
    test_rows, test_labels = test_rows.to(device), test_labels.to(device)
    # Rank r gets r, r + W, r + 2W, ... of a permutation; samples repeat if W does not divide it.
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(30, 32), nn.GELU(), nn.Linear(32, 2)).to(device)
    ddp = DDP(model, device_ids=[device] if cuda else None)
    optimizer = AdamW(ddp.parameters(), LR)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without this, every epoch has the same order
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(ddp(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients over the ranks meanwhile
            optimizer.step()
        mean_loss = loss.detach() / world_size
        dist.all_reduce(mean_loss)  # the last batch's, over all ranks
        score = accuracy(model, test_rows, test_labels)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean_loss.item():.7f}, accuracy {score:.4f}")
    if rank == 0:
        torch.save(model.state_dict(), "plain_ddp.pt")  # without DDP's "module." prefix
    dist.barrier()  # exiting during the last message would abort the job
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
