"""Break gan_ddp's rule in several ways, and compare DDP's gradients with the true gradients.

    python -m examples.gan_ddp.further.break_the_rule

The rule: a network in DDP runs one forward and one backward pass per step. For each way to train
the discriminator, this program compares DDP's gradients with the true gradients: the unwrapped
network's gradients, averaged over the ranks. It also compares the ranks and counts the bytes that
DDP sends. With one process, all ways give the same gradients, so a mistake goes unnoticed.
"""

import copy
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector

from common.ddp import all_reduce_mean

from ..networks import make_discriminator


def one_forward(network: nn.Module, real: Tensor, fake: Tensor) -> None:
    """Follow the rule: real and generated images are one batch with one loss."""
    on_real, on_fake = network(torch.cat([real, fake])).chunk(2)
    (F.softplus(-on_real).mean() + F.softplus(on_fake).mean()).backward()


def two_passes(network: nn.Module, real: Tensor, fake: Tensor) -> None:
    """Run a forward and a backward pass for real images, then again for generated images."""
    F.softplus(-network(real)).mean().backward()
    F.softplus(network(fake)).mean().backward()


def two_forwards(network: nn.Module, real: Tensor, fake: Tensor) -> None:
    """Run two forward passes, then one backward pass for the sum of both losses."""
    on_real, on_fake = network(real), network(fake)
    (F.softplus(-on_real).mean() + F.softplus(on_fake).mean()).backward()


def two_backwards(network: nn.Module, real: Tensor, fake: Tensor) -> None:
    """Run two forward passes, then one backward pass for each loss."""
    on_real, on_fake = network(real), network(fake)
    F.softplus(-on_real).mean().backward()
    F.softplus(on_fake).mean().backward()


def wrapped_critic(network: nn.Module, real: Tensor, fake: Tensor) -> None:
    """Follow the rule, but compute the generator's loss with the wrapped discriminator."""
    one_forward(network, real, fake)
    kept = [parameter.grad for parameter in network.parameters()]
    network.zero_grad(set_to_none=True)
    F.softplus(-network(fake)).mean().backward()  # also sends the discriminator's gradients
    for parameter, gradient in zip(network.parameters(), kept, strict=True):
        parameter.grad = gradient


WAYS: dict[str, Callable[[nn.Module, Tensor, Tensor], None]] = {
    "one forward and one backward pass (the rule)": one_forward,
    "two passes: forward, backward, forward, backward": two_passes,
    "two forward passes, one backward pass": two_forwards,
    "two forward passes, two backward passes": two_backwards,
    "the rule, but the generator's loss through DDP": wrapped_critic,
}


def try_way(way: Callable[..., None], norm: nn.Module) -> tuple[float, float, int] | str:
    """Return the gradients' error, the ranks' difference and the bytes sent, or an error message.

    Every rank calls this.
    """
    torch.manual_seed(0)
    plain = make_discriminator(8, copy.deepcopy(norm))
    ddp, sent = DDP(copy.deepcopy(plain)), list[int]()

    def count(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)  # DDP's default

    ddp.register_comm_hook(None, count)
    torch.manual_seed(1 + dist.get_rank())  # ranks have different images
    real, fake = torch.rand(2, 12, 1, 8, 8)
    way(plain, real, fake)
    try:
        way(ddp, real, fake)
    except RuntimeError as error:
        return str(error).partition(".")[0]
    truth, own = (
        parameters_to_vector([p.grad for p in network.parameters() if p.grad is not None])
        for network in (plain, ddp)
    )
    all_reduce_mean([truth])
    of_rank0 = own.clone()
    dist.broadcast(of_rank0, 0)
    errors = torch.stack([(own - truth).abs().max(), (own - of_rank0).abs().max()])
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return errors[0].item(), errors[1].item(), sum(sent)


def main_worker(rank: int, init_method: str) -> None:
    """Try all ways on a network without buffers and on a network with BatchNorm's buffers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method, rank=rank, world_size=2)
    for norm in (nn.GroupNorm(1, 64), nn.BatchNorm2d(64)):
        rows = {name: try_way(way, norm) for name, way in WAYS.items()}
        if rank == 0:
            print(f"\ndiscriminator with {norm}\n{'':50}   error   ranks differ by   bytes sent")
            for name, row in rows.items():
                text = row if isinstance(row, str) else "{:.1e}   {:15.1e}   {:10,}".format(*row)
                print(f"{name:50} {text}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Forked processes do not import torch again, but they cannot use CUDA.
        mp.start_processes(main_worker, (f"file://{folder}/file",), nprocs=2, start_method="fork")
