"""manual_allreduce_sgd: train by synchronous SGD whose ranks average their gradients by hand.

    python -m examples.manual_allreduce_sgd --nproc 2                             # a ring by hand
    python -m examples.manual_allreduce_sgd --nproc 4 --algorithm shared-memory   # sends nothing
    python -m examples.manual_allreduce_sgd --nproc 2 --algorithm bucketed        # during backward
    python -m examples.manual_allreduce_sgd --nproc 2 --algorithm ddp             # torch's
    python -m examples.manual_allreduce_sgd --nproc 2 --compress bf16             # half the bytes
    python -m examples.manual_allreduce_sgd --nproc 2 --compress powersgd         # a few percent
    python -m examples.manual_allreduce_sgd --nproc 2 --algorithm local-sgd       # every 8 steps
    python -m examples.manual_allreduce_sgd --nproc 2 --shares 3,1                # a slower rank 1
    torchrun --nproc-per-node 2 -m examples.manual_allreduce_sgd --algorithm ring
    python -m examples.manual_allreduce_sgd --multiprocessing-distributed         # all GPUs

With any number of processes, all algorithms that send whole gradients train the same up to
rounding.
"""

import runpy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from common.data.idx import image_data
from common.data.models import DigitNet
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.evaluate import evaluate
from common.train.run import Run
from examples.manual_allreduce_sgd.args import Args
from examples.manual_allreduce_sgd.gradients import chosen
from examples.manual_allreduce_sgd.partition import partition_dataset
from examples.manual_allreduce_sgd.shares import agreed_shares, division


def main(place: Place, args: Args) -> None:
    """Train in every process of this node."""
    launch(main_worker, place, args)


@record  # one line per error and job, a clean stop on SIGTERM; torch's own `record` works, too
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    place.export(local_rank)  # RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun
    device, backend = choose_device(args.launch, local_rank)  # cuda and nccl, or cpu and gloo
    # Not bound to the device: nccl would then send all messages of a group in one stream, in order,
    # and a ring of single messages could wait for itself.
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience)
    train(args, device)
    dist.destroy_process_group()


def broadcast_parameters(model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0. Every rank calls this."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def mean_losses(loss_sum: Tensor, samples: int) -> str:
    """The mean loss of each rank over its samples, in words. Every rank calls this.

    A resumed epoch may have no samples left.
    """
    means = [0.0] * dist.get_world_size()
    dist.all_gather_object(means, loss_sum.item() / max(1, samples))
    return ", ".join(f"rank {rank} {mean:.4f}" for rank, mean in enumerate(means))


def train(args: Args, device: torch.device) -> None:
    """Train and evaluate; every rank runs this with its own part of the data."""
    rank, world_size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    torch.manual_seed(args.seed + rank)
    data = image_data(args.dataset, args.data_dir)
    with Run(args, device, data, what=f"{args.algorithm}, {data}", **division(args)) as run:
        model = run.prepare(DigitNet(data.size, data.classes))
        broadcast_parameters(model)  # the ranks start from the same model, whatever they drew
        # In float16 a step that overflows is left out. If it is the first, torch's fused SGD
        # continues with a momentum that was never set.
        fused = cuda and not run.scaler.is_enabled()
        optimizer = SGD(model.parameters(), args.lr, args.momentum, fused=fused)
        gradients = chosen(args, model, optimizer, run.scaler)
        parts = {"model": model, "optimizer": optimizer, "gradients": gradients}
        run.resume(before_save=gradients.gather_state, **parts)
        shares = agreed_shares(args, run, model)  # of each rank, in every global batch

        for epoch in run.epochs(args.epochs):
            loader = partition_dataset(data, args.batch_size, args.seed, epoch, shares, cuda)
            epoch_loss, epoch_samples = torch.zeros((), device=device), 0
            for pixels, labels in run.steps(loader):  # [B, 1, H, W] bytes, [B]; B may be 0
                pixels, labels = (x.to(device, non_blocking=True) for x in (pixels, labels))
                with run.autocast():
                    logits = gradients.model(data.normalise(pixels)).float()  # [B, classes]
                loss_sum = F.cross_entropy(logits, labels, reduction="sum")
                # The mean over the ranks of this is the mean over the global batch, even if the
                # ranks have different numbers of samples: by --shares, or in the last batch.
                batch_samples, _ = run.batch_share()
                loss = loss_sum * world_size / batch_samples
                optimizer.zero_grad()
                run.scaler.scale(loss).backward()  # some algorithms send gradients meanwhile
                gradients.average()  # by the chosen algorithm: the subject of this example
                run.scaler.step(optimizer)
                run.scaler.update()
                gradients.after_step()  # local-sgd, diloco: average the models, every H steps
                run.log(loss)
                epoch_loss += loss_sum.detach()
                epoch_samples += len(labels)
            gradients.end_epoch()  # the same two: one model to evaluate
            losses = mean_losses(epoch_loss, epoch_samples)
            run.print0(f"{run.label}: mean loss of {losses}")
            run.end_epoch(evaluate(model, data.eval_loader(), data.classes, run.autocast))
        run.finish(algorithm=args.algorithm, bytes_sent=gradients.bytes_sent, shares=shares)


if __name__ == "__main__":  # the same as python -m examples.manual_allreduce_sgd
    runpy.run_module("examples.manual_allreduce_sgd", run_name="__main__")
