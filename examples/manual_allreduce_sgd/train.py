"""Synchronous SGD with an all-reduce written by hand: what DistributedDataParallel does for you.

    python -m examples.manual_allreduce_sgd --nproc 2
    torchrun --nproc-per-node 2 -m examples.manual_allreduce_sgd --all-reduce torch

Each rank computes the gradient of its local batch. The mean of these gradients is the
gradient of the whole batch, so the number of ranks affects the result only through rounding.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler

from common.data import DigitNet, image_data
from common.evaluate import evaluate
from common.rank import init_distributed, record
from common.run import Run

from .args import Args


def ring_all_reduce(tensor: Tensor) -> None:
    """Sum a tensor [n] over the ranks, in place. Every rank calls this.

    In each of 2 (W - 1) steps, a rank sends one of W chunks to its right neighbor and receives one
    from its left neighbor. In the first half (reduce-scatter), the received chunk is added to the
    local chunk, until rank r has the sum of chunk r + 1. In the second half (all-gather), received
    sums replace local chunks. A rank sends 2 (W - 1) / W times the tensor's size, the minimum
    (https://doi.org/10.1016/j.jpdc.2008.09.002).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)  # views; some are empty if n < W
    for step in range(2 * (world_size - 1)):
        outgoing, own = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(own) if step < world_size - 1 else own
        send = dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)
        receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size)
        # Post both together: if every rank waited for its send first, no rank would receive.
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        if incoming is not own:
            own += incoming


def average_gradients(model: nn.Module, all_reduce: Callable[[Tensor], object]) -> None:
    """Replace each gradient with its mean over the ranks. Every rank calls this."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = total = parameters_to_vector(gradients)  # one message is faster than many short ones
    if flat.is_cuda and dist.get_backend() == "gloo":  # gloo cannot send CUDA tensors
        total = torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat)
    all_reduce(total)
    vector_to_parameters(flat.copy_(total) / dist.get_world_size(), gradients)


def partition_dataset(samples: Tensor, batch_size: int) -> list[tuple[Tensor, int]]:
    """Return this rank's samples in each global batch of `samples` [N], and the batch's size.

    Rank r of W gets the samples r, r + W, ... of each batch. No sample is dropped for any W.
    """
    own = slice(dist.get_rank(), None, dist.get_world_size())
    return [(batch[own], len(batch)) for batch in samples.split(batch_size)]


def main(args: Args) -> None:
    """Start several ranks on this machine; not called under torchrun or srun."""
    mp.start_processes(main_worker, (args,), args.nproc, start_method="forkserver")


@record  # prints an error once per job, and sets the exit code
def main_worker(local_rank: int, args: Args) -> None:
    """Train on one rank."""
    device = init_distributed(args, local_rank)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    data = image_data(args.dataset, Path("data"))
    images, labels = (tensor.to(device) for tensor in data.train.tensors)
    test_loader = DataLoader(data.test, 1000, sampler=DistributedSampler(data.test, shuffle=False))
    model = DigitNet(data.size, len(data.class_names)).to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # all ranks start with rank 0's model
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.5)
    all_reduce = {"ring": ring_all_reduce, "torch": dist.all_reduce}[args.all_reduce]
    run = Run(args, device, data, about=data.about, model=model, optimizer=optimizer)
    for epoch in run.epochs(args.epochs):
        generator = torch.Generator().manual_seed(args.seed + epoch)  # the same on all ranks
        order, losses = torch.randperm(len(labels), generator=generator).to(device), []
        for part, global_batch_size in run.steps(partition_dataset(order, args.batch_size)):
            with run.autocast:
                logits = model(images[part]).float()  # [B, C]; B may differ by one between ranks
            loss_sum = F.cross_entropy(logits, labels[part], reduction="sum")
            # Averaged over the ranks, this is the mean loss of the global batch. The mean of the
            # ranks' means is not, because samples of a smaller local batch would count more.
            loss = loss_sum * world_size / global_batch_size
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, all_reduce)
            optimizer.step()
            run.log(loss)
            losses.append(loss.detach())
        print(f"rank {rank}: mean loss {float(sum(losses)) / max(1, len(losses)):.4f}", flush=True)
        evaluation = evaluate(model, test_loader, len(data.test), run.autocast)
        run.end_epoch(evaluation.metrics, score=evaluation.metrics["accuracy"])
    run.finish(model)
    dist.destroy_process_group()
