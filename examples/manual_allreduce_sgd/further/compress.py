"""Compress gradients with bfloat16, top-k or PowerSGD before sending them.

    python -m examples.manual_allreduce_sgd.further.compress --nproc 2

Each rank adds the difference between its gradient and the sent values to its next gradient, so that
nothing is lost permanently (error feedback, https://arxiv.org/abs/1901.09847).
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common.data import DigitNet, image_data
from common.ddp import all_reduce_mean

from ..run import launch
from ..train import partition_dataset


class Compressor:
    """Averages gradients [n] over the ranks; this base class sends them uncompressed."""

    def __init__(self) -> None:
        self.error = torch.zeros(())  # unsent part of the gradient; [n] after the first step
        self.bytes_per_step = 0  # size of this rank's messages in a step

    def average(self, gradient: Tensor) -> Tensor:
        """Return the approximate mean [n] of the ranks' gradients [n]. Every rank calls this."""
        wanted = gradient + self.error
        mean, sent = self._exchange(wanted)  # `mean` is the mean of all ranks' `sent`
        self.error = wanted - sent
        return mean

    def _exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        message, self.bytes_per_step = wanted.clone(), wanted.nbytes
        dist.all_reduce(message)
        return message / dist.get_world_size(), wanted


class BFloat16(Compressor):
    """Sends gradients in bfloat16, with a relative rounding error of up to 2^-8."""

    def _exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        message = wanted.bfloat16()
        sent, self.bytes_per_step = message.float(), message.nbytes
        dist.all_reduce(message)
        return message.float() / dist.get_world_size(), sent


class TopK(Compressor):
    """Sends only the gradient elements of largest magnitude (https://arxiv.org/abs/1704.05021)."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def _exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        indices = wanted.abs().topk(max(1, round(self.ratio * len(wanted)))).indices  # [k]
        values, world_size = wanted[indices], dist.get_world_size()
        self.bytes_per_step = indices.nbytes + values.nbytes
        # Ranks choose different indices, so an all-reduce could not add the values.
        all_indices = [torch.empty_like(indices) for _ in range(world_size)]
        all_values = [torch.empty_like(values) for _ in range(world_size)]
        dist.all_gather(all_indices, indices)
        dist.all_gather(all_values, values)
        total, sent = torch.zeros_like(wanted), torch.zeros_like(wanted)
        total.index_add_(0, torch.cat(all_indices), torch.cat(all_values))
        return total / world_size, sent.index_copy_(0, indices, values)


class PowerSGD(Compressor):
    """Sends factors [a, r] and [r, b] of each gradient [a, b] (https://arxiv.org/abs/1905.13727).

    A gradient is sent whole if its factors, with r = `rank`, would not be smaller.
    """

    def __init__(self, shapes: list[tuple[int, int]], rank: int) -> None:
        super().__init__()
        self.shapes = shapes
        self.thin = [rank * (a + b) < a * b for a, b in shapes]
        generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self.q = [torch.randn(b, rank, generator=generator) for _, b in shapes]  # for the next step

    def _exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        parts = wanted.split([a * b for a, b in self.shapes])
        matrices = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        triples = list(zip(matrices, self.q, self.thin, strict=True))
        p = [m @ q if thin else m.clone() for m, q, thin in triples]  # [a, r] each
        all_reduce_mean(p)
        p = [torch.linalg.qr(x).Q if thin else x for x, thin in zip(p, self.thin, strict=True)]
        q = [m.T @ x if thin else q[:0] for (m, q, thin), x in zip(triples, p, strict=True)]
        all_reduce_mean(q)  # [b, r] each
        self.q, self.bytes_per_step = q, sum(t.nbytes for t in (*p, *q))
        means = [x @ q.T if thin else x for x, q, thin in zip(p, q, self.thin, strict=True)]
        sent = [x if thin else m for x, (m, _, thin) in zip(means, triples, strict=True)]
        return parameters_to_vector(means), parameters_to_vector(sent)


def train(model: DigitNet, compressor: Compressor, epochs: int) -> float:
    """Train on the digits; return the accuracy on the test set. Every rank calls this."""
    data = image_data("digits", Path())
    (images, labels), (test_images, test_labels) = data.train.tensors, data.test.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(labels), generator=generator) for _ in range(epochs)]
    for part, size in partition_dataset(torch.cat(orders), batch_size=128):
        loss_sum = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
        optimizer.zero_grad()
        (loss_sum * dist.get_world_size() / size).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        vector_to_parameters(compressor.average(parameters_to_vector(gradients)), gradients)
        optimizer.step()
    return (model(test_images).argmax(dim=1) == test_labels).float().mean().item()


def compare(epochs: int) -> None:
    """Train with each method; print the bytes per step and the accuracy. Every rank calls this."""
    shapes = [(len(p), p[0].numel()) for p in DigitNet(size=8, classes=10).parameters()]
    compressors: dict[str, Compressor] = {
        "fp32": Compressor(),
        "bf16": BFloat16(),
        "top-k, 1%": TopK(0.01),
        "PowerSGD, rank 4": PowerSGD(shapes, 4),
    }
    for name, compressor in compressors.items():
        torch.manual_seed(0)
        accuracy = train(DigitNet(size=8, classes=10), compressor, epochs)
        if dist.get_rank() == 0:
            print(f"{name:16} {compressor.bytes_per_step:8,} bytes, accuracy {accuracy:.1%}")


def main(nproc: int = 2, epochs: int = 3) -> None:
    """Train on the digits with each method."""
    launch(compare, nproc, epochs)


if __name__ == "__main__":
    tyro.cli(main)
