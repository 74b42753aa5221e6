"""Send gradients while the backward pass computes more of them, like DistributedDataParallel.

    python -m examples.manual_allreduce_sgd.further.buckets --nproc 2

Gradients become ready from the last layer to the first. Hooks collect them in buckets, and a bucket
is sent as soon as it is complete (Li et al., 2020, https://arxiv.org/abs/2006.15704, section 3.2).
"""

import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..run import launch
from ..train import average_gradients


class Buckets:
    """Averages a model's gradients over the ranks during the backward pass.

    Every rank creates an instance for the same model, and calls `wait` after each backward
    pass. A bucket is closed when it reaches `bucket_bytes`; DDP's default is 25 MB. Parameters
    that are unused in a step get zero gradients.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = 1 << 20) -> None:
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
            if sum(p.nbytes for p in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self._collect)
        self.ready = set[nn.Parameter]()  # parameters whose gradients are ready in this step
        self.sent: list[tuple[list[Tensor], Tensor, dist.Work]] = []  # in bucket order
        self.overlapped = 0  # buckets that were sent during the last backward pass

    def _collect(self, parameter: nn.Parameter) -> None:
        """Record that a gradient is ready, and send all complete buckets."""
        if parameter in self.ready:  # its bucket may have been sent; DDP also raises
            raise RuntimeError(f"a gradient of shape {list(parameter.shape)} became ready twice")
        self.ready.add(parameter)
        # All ranks must send the buckets in the same order, even if another bucket is ready first.
        for bucket in self.buckets[len(self.sent) :]:
            if not self.ready.issuperset(bucket):
                break
            self._send(bucket)

    def _send(self, bucket: list[nn.Parameter]) -> None:
        for parameter in bucket:
            if parameter.grad is None:  # unused on this rank; other ranks may use it
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in bucket if p.grad is not None]
        flat = parameters_to_vector(gradients)
        self.sent.append((gradients, flat, dist.all_reduce(flat, async_op=True)))

    def wait(self) -> None:
        """Replace each gradient with its mean over the ranks. Every rank calls this."""
        self.overlapped = len(self.sent)
        for bucket in self.buckets[self.overlapped :]:
            self._send(bucket)
        for gradients, flat, work in self.sent:
            work.wait()
            vector_to_parameters(flat / dist.get_world_size(), gradients)
        self.ready, self.sent = set(), []


def train(model: nn.Module, after_backward: Callable[[], object], steps: int) -> float:
    """Train on random numbers, different on each rank; return the median step time in ms."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        inputs = torch.randn(64, 512, generator=generator)
        loss = F.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        after_backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def compare(steps: int) -> None:
    """Train the same model with each method, and compare the results. Every rank calls this."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    models = [copy.deepcopy(nn.Sequential(*layers)) for _ in range(3)]
    flat, overlapped, ddp = models
    buckets = Buckets(overlapped)
    times = {
        "after backward": train(flat, lambda: average_gradients(flat, dist.all_reduce), steps),
        "in buckets": train(overlapped, buckets.wait, steps),
        "with DDP": train(DistributedDataParallel(ddp, bucket_cap_mb=1), lambda: None, steps),
    }
    vectors = [parameters_to_vector(model.parameters()) for model in models]
    difference = max((vector - vectors[0]).abs().max().item() for vector in vectors)
    if dist.get_rank() == 0:
        for name, time_per_step in times.items():
            print(f"{name:14} {time_per_step:7.2f} ms per step")
        print(f"{buckets.overlapped} of {len(buckets.buckets)} buckets sent in the backward pass")
        print(f"largest difference in parameters: {difference:.1e}")


def main(nproc: int = 2, steps: int = 30) -> None:
    """Compare averaging after the backward pass, in buckets during it, and with DDP."""
    launch(compare, nproc, steps)


if __name__ == "__main__":
    tyro.cli(main)
