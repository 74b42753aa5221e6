"""Local SGD and DiLoCo: send models every few steps instead of gradients in every step.

    python -m examples.manual_allreduce_sgd.further.local_sgd --nproc 2 --every 8

Each rank trains alone for H steps (--every), so it sends 1/H of the bytes of synchronous SGD. Then
all ranks continue from one model:

- local SGD: the mean of the ranks' models (https://arxiv.org/abs/1805.09767)
- DiLoCo: the result of an outer SGD step on the mean change (https://arxiv.org/abs/2311.08105)
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common.data import DigitNet, image_data

from ..run import launch
from ..train import average_gradients, partition_dataset


class Outer:
    """Combines the ranks' models, which start equal, with a step of an outer Nesterov SGD.

    With the default values, the result is the mean of the models.
    """

    def __init__(self, model: nn.Module, lr: float = 1.0, momentum: float = 0.0) -> None:
        self.model = model
        self.shared = parameters_to_vector(model.parameters()).detach().clone()  # [n]
        self.optimizer = torch.optim.SGD([self.shared], lr, momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self) -> None:
        """Combine the models, and copy the result to each rank. Every rank calls this."""
        change = self.shared - parameters_to_vector(self.model.parameters())
        dist.all_reduce(change)
        self.shared.grad = change / dist.get_world_size()
        self.optimizer.step()
        vector_to_parameters(self.shared.clone(), self.model.parameters())


def train(model: nn.Module, outer: Outer | None, every: int, epochs: int) -> float:
    """Train on the digits; return the accuracy on the test set. Every rank calls this.

    `outer` combines the models once per `every` steps; if `outer` is None, gradients are averaged.
    """
    data = image_data("digits", Path())
    (images, labels), (test_images, test_labels) = data.train.tensors, data.test.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)  # one per rank
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(labels), generator=generator) for _ in range(epochs)]
    parts = partition_dataset(torch.cat(orders), batch_size=64)
    for step, (part, size) in enumerate(parts, start=1):
        loss_sum = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
        optimizer.zero_grad()
        (loss_sum * dist.get_world_size() / size).backward()
        if outer is None:
            average_gradients(model, dist.all_reduce)
        optimizer.step()
        if outer is not None and (step % every == 0 or step == len(parts)):
            outer.step()
    return (model(test_images).argmax(dim=1) == test_labels).float().mean().item()


def compare(every: int, epochs: int) -> None:
    """Train the same model with each method, and print the accuracy. Every rank calls this."""
    methods = {"synchronous SGD": None, "local SGD": (1.0, 0.0), "DiLoCo": (0.7, 0.9)}
    for name, settings in methods.items():
        torch.manual_seed(0)
        model = DigitNet(size=8, classes=10)
        accuracy = train(model, Outer(model, *settings) if settings else None, every, epochs)
        if dist.get_rank() == 0:
            steps = f"one message every {every if settings else 1} step(s)"
            print(f"{name:16} {steps}, accuracy {accuracy:.1%}", flush=True)


def main(nproc: int = 2, every: int = 8, epochs: int = 4) -> None:
    """Train on the digits with each method; local methods communicate once per `every` steps."""
    launch(compare, nproc, every, epochs)


if __name__ == "__main__":
    tyro.cli(main)
