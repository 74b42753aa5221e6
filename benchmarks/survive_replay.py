"""What survive.py must come to, by the history of its members: one process, and nothing is lost."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.data.idx import ImageData
from common.data.models import DigitNet
from common.train.checks import parameter_hash


def ring_sum(rows: list[Tensor]) -> Tensor:
    """The sum of what the ranks have, [n] each, added in the order in which a ring adds."""
    size, sums = len(rows), []
    chunks = [row.tensor_split(size) for row in rows]
    for number in range(size):  # a chunk begins at the rank of its number, and travels to the right
        total = chunks[number][number]
        for distance in range(1, size):
            total = chunks[(number + distance) % size][number] + total
        sums.append(total)
    return torch.cat(sums)


def replayed(data: ImageData, found: Mapping[str, Any], batch_size: int, lr: float) -> str:
    """The hash of the parameters after the same history, with as many threads as each rank had.

    Args:
        data: what was trained on, with --seed 1234 and --momentum 0.5.
        found: the content of result.json.
        batch_size: the flag.
        lr: the flag.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(found["threads"])
    torch.manual_seed(1234)
    model = DigitNet(data.size, data.classes)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr, 0.5)
    sizes = [parameter.numel() for parameter in parameters]
    for step in range(found["steps"]):
        epoch, number = divmod(step, -(-len(data.train) // batch_size))
        generator = torch.Generator().manual_seed(1234 + epoch)
        order = torch.randperm(len(data.train), generator=generator)
        batch = order[batch_size * number :][:batch_size]
        generations = found["generations"]
        begun = [each["members"] for each in generations if each["steps_done"] <= step]
        size, rows = len(begun[-1]), []
        for rank in range(size):
            share = batch[rank::size].tolist()
            images, labels, _ = data.collate(data.train.__getitems__(share))
            loss = F.cross_entropy(model(images), labels, reduction="sum") / len(batch)
            gradients = [gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)]
            rows.append(torch.cat([torch.zeros(len(batch)), *gradients, torch.zeros(2)]))
        _, *means, _ = ring_sum(rows).split([len(batch), *sizes, 2])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)
        optimizer.step()
    torch.set_num_threads(threads)
    return parameter_hash(model)
