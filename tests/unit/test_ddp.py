"""The helpers around DistributedDataParallel; see also tests/examples/test_peculiar_models.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from common.ddp import (
    all_reduce_mean,
    check_replicas,
    parameter_hash,
    unwrapped,
    warm_up_buckets,
)
from tests import ranks


class Buffers(nn.Module):
    """An integer, and a view with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("gaps", torch.zeros(4, 6)[:, ::2])


def steps(compiled: bool) -> list[list[Tensor]]:
    """Return the gradients of two steps at the same parameters."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
    ddp = DDP(torch.compile(model, backend="eager") if compiled else model, bucket_cap_mb=1)
    assert unwrapped(ddp) is model
    warm_up_buckets(ddp)
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(dist.get_rank()))
    gradients = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).pow(2).sum().backward()
        gradients.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
    return gradients


@pytest.mark.parametrize("compiled", [False, True])
def test_first_step_has_the_bits_of_later_ones(compiled: bool, tmp_path: Path) -> None:
    """Otherwise a resumed run, whose first step is a later one, has other bits."""
    first, second = ranks.call(steps, compiled, folder=tmp_path, ranks=3)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------------ hashes


def test_hash_sees_every_parameter_and_buffer() -> None:
    kinds = [nn.Linear(4, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.complex64)]
    model = nn.Sequential(nn.BatchNorm1d(4), *kinds, Buffers())
    hashes = {parameter_hash(model)}
    tensors = model.state_dict().values()
    for tensor in tensors:
        tensor[-1:].add_(1) if tensor.dim() else tensor.add_(1)
        hashes.add(parameter_hash(model))
    assert len(hashes) == 1 + len(tensors)


def test_hash_sees_names() -> None:
    layer = nn.Linear(2, 2)
    a, b = (parameter_hash(nn.ModuleDict({name: layer})) for name in "ab")
    assert a != b


def test_hash_does_not_see_memory_order() -> None:
    layer = nn.Conv2d(3, 2, 3)
    expected = parameter_hash(layer)
    assert parameter_hash(layer.to(memory_format=torch.channels_last)) == expected


def replicas(changed_rank: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Buffers())
    for buffer in model.buffers():
        buffer += dist.get_rank()
    before = [buffer.clone() - dist.get_rank() for buffer in model.buffers()]
    with torch.no_grad():
        model[0].weight[1, 1] += dist.get_rank() == changed_rank
    try:
        found = check_replicas(model)
    except AssertionError as error:
        found = str(error)
    pairs = zip(model.buffers(), before, strict=True)
    return found, all(torch.equal(buffer, of_rank0) for buffer, of_rank0 in pairs)


def test_replicas_are_compared(tmp_path: Path) -> None:
    equal = ranks.call(replicas, 7, folder=tmp_path / "equal", ranks=3)
    assert len({found for found, _ in equal}) == 1
    assert len(equal[0][0]) == 64
    assert all(buffers for _, buffers in equal), "buffers, a view with gaps too, are rank 0's"
    for found, _ in ranks.call(replicas, 2, folder=tmp_path / "other", ranks=3):
        assert "[2]" in found


def mean() -> list[Tensor]:
    rank = dist.get_rank()
    tensors = [torch.full((2, 3), float(rank)), torch.tensor(10.0 * rank), torch.ones(1)]
    groups: Any = [dist.new_group([0, 1]), dist.new_group([2])]
    part = torch.tensor([float(rank)])
    all_reduce_mean(iter(tensors))
    all_reduce_mean([part], groups[rank // 2])
    return [*tensors, part]


def test_mean_over_ranks(tmp_path: Path) -> None:
    for rank, (a, b, c, part) in enumerate(ranks.call(mean, folder=tmp_path, ranks=3)):
        assert a.tolist() == [[1.0] * 3] * 2
        assert (b.item(), c.item()) == (10.0, 1.0)
        assert part.item() == (0.5 if rank < 2 else 2.0)
