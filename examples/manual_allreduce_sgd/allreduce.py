"""Compare algorithms that sum a tensor over the ranks, and their costs.

    python -m examples.manual_allreduce_sgd.allreduce --nproc 2

| W ranks, a tensor of S bytes | bytes sent per rank | consecutive messages | good for |
|---|---|---|---|
| `recursive_doubling` | log2(W) S | log2(W), 2 more unless W is a power of 2 | small tensors |
| `ring_all_reduce` in train.py | 2 (W - 1) / W S | 2 (W - 1) | large tensors |

Each algorithm gives all ranks the same bits. The algorithms add in different orders, so the
results of two algorithms are equal only up to rounding.
"""

import statistics
import timeit
from collections.abc import Callable

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

from .run import launch
from .train import ring_all_reduce


def recursive_doubling(tensor: Tensor) -> None:
    """Sum a tensor [n] over the ranks, in place. Every rank calls this.

    A rank exchanges its partial sum with the ranks at distance 1, 2, 4, ...; each exchange doubles
    the number of ranks in the sum. Ranks beyond the largest power of 2 first send their tensor to a
    partner, and receive the result at the end.
    (Thakur et al., 2005, https://doi.org/10.1177/1094342005051521, section 4.5)
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    power = 1 << (world_size.bit_length() - 1)  # the largest power of 2 up to W
    buffer = torch.empty_like(tensor)
    if rank >= power:
        dist.send(tensor, dst=rank - power)
        dist.recv(tensor, src=rank - power)
        return
    if rank + power < world_size:
        dist.recv(buffer, src=rank + power)
        tensor += buffer
    for distance in (1 << bit for bit in range(power.bit_length() - 1)):
        receive = dist.P2POp(dist.irecv, buffer, rank ^ distance)
        send = dist.P2POp(dist.isend, tensor, rank ^ distance)
        for work in dist.batch_isend_irecv([receive, send]):
            work.wait()
        tensor += buffer  # a + b on one rank, b + a on the other: the same bits
    if rank + power < world_size:
        dist.send(tensor, dst=rank + power)


def average_each_gradient(model: nn.Module) -> None:
    """Replace each gradient with its mean over the ranks. Every rank calls this.

    Most tutorials contain this loop. Its many short messages are slower than the single long
    message that `average_gradients` in train.py sends.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()


def milliseconds(function: Callable[..., object], *args: object) -> float:
    """Return the median time of a call in milliseconds. Every rank calls this."""
    times = timeit.repeat(lambda: function(*args), setup=dist.barrier, number=1, repeat=6)
    return 1000 * statistics.median(times[1:])  # the first call also allocates memory


def compare() -> None:
    """Print the time that each algorithm needs. Every rank calls this."""
    lines = ["milliseconds          1 KB    1 MB   16 MB"]
    for algorithm in (dist.all_reduce, ring_all_reduce, recursive_doubling):
        tensors = [torch.zeros(1 << bits) for bits in (8, 18, 22)]  # 4 bytes per element
        times = [f"{milliseconds(algorithm, tensor):7.2f}" for tensor in tensors]
        lines.append(f"{algorithm.__name__:18} {' '.join(times)}")
    if dist.get_rank() == 0:
        print("\n".join(lines))


def main(nproc: int = 2) -> None:
    """Compare the algorithms with `dist.all_reduce`."""
    launch(compare, nproc)


if __name__ == "__main__":
    tyro.cli(main)
