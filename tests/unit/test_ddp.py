"""The helpers around DistributedDataParallel, with peculiar models."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from common.ddp import (
    all_reduce_mean,
    broadcast_buffers,
    check_replicas,
    parameter_hash,
    unwrapped,
    warm_up_buckets,
)
from tests import ranks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.abs().long() % 9).sum(1))


class Buffers(nn.Module):
    """Buffers of all kinds: integers, a view with gaps, one that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("gaps", torch.zeros(4, 6)[:, ::2])
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.arange(float(len(x)))
        return self.layer(x)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 3}


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    return model.requires_grad_(False).append(nn.Linear(4, 4))


def hooked() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda _, __, output: output * 2)
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "batch_norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "channels_last": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)
    ),
    "extra": lambda: Extra(4, 4),
    "frozen": frozen,
    "hooked": hooked,
    "bfloat16": lambda: nn.Linear(4, 4).to(torch.bfloat16),
    "compiled": lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
} | {cls.__name__.lower(): cls for cls in (Tied, Complex, Recomputed, Sparse, Buffers)}


def warm_up(name: str) -> tuple[Any, ...]:
    """Return what the warm-up changed, and the gradients of a step after it and without it."""
    torch.manual_seed(5)
    model = MODELS[name]()
    gradients, changed = [], []
    for warm in (True, False):
        ddp = DDP(copy.deepcopy(model))
        torch.manual_seed(dist.get_rank())
        before, random = copy.deepcopy(ddp.state_dict()), torch.get_rng_state()
        if warm:
            warm_up_buckets(ddp)
            changed += [n for n, v in ddp.state_dict().items() if not same(v, before[n])]
            changed += [n for n, p in ddp.named_parameters() if p.grad is not None]
            changed += ["random"] * (not torch.equal(random, torch.get_rng_state()))
        x = torch.randn(3, 4).to(next(model.parameters()).dtype if name == "bfloat16" else None)
        ddp(x).float().pow(2).sum().backward()
        gradients.append([p.grad for p in ddp.parameters()])
    return changed, *gradients


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("name", MODELS)
def test_warm_up_changes_nothing(name: str, tmp_path: Path) -> None:
    for changed, warm, cold in ranks.call(warm_up, name, folder=tmp_path, ranks=2):
        assert not changed
        for a, b in zip(warm, cold, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.to_dense(), b.to_dense())


def rearranged(static_graph: bool) -> list[list[Tensor]]:
    """Return the gradients of two steps at the same parameters, with 3 ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(300, 300) for _ in range(4)]
    ddp = DDP(nn.Sequential(*layers), bucket_cap_mb=0.5, static_graph=static_graph)
    warm_up_buckets(ddp)
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(dist.get_rank()))
    steps = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).pow(2).sum().backward()
        steps.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
    return steps


def test_first_step_has_the_bits_of_later_ones(tmp_path: Path) -> None:
    """Otherwise a resumed run, whose first step is a later one, has other bits."""
    first, second = ranks.call(rearranged, False, folder=tmp_path, ranks=3)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------------ hashes


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"compiled"}))
def test_hash_sees_every_parameter_and_buffer(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    expected = parameter_hash(model)
    assert parameter_hash(unwrapped(model)) == expected
    for tensor in unwrapped(model).state_dict().values():
        if isinstance(tensor, Tensor):
            tensor.view(-1)[-1:].add_(1) if tensor.is_contiguous() else tensor[-1:].add_(1)
            changed = parameter_hash(model)
            assert changed != expected
            expected = changed


def test_hash_sees_names() -> None:
    layer = nn.Linear(2, 2)
    assert parameter_hash(nn.ModuleDict({"a": layer})) != parameter_hash(
        nn.ModuleDict({"b": layer})
    )


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


def broadcast() -> tuple[Tensor, Tensor]:
    model: Any = Buffers()
    model.gaps = torch.full((4, 6), float(dist.get_rank()))[:, ::2]
    model.steps += 2 - dist.get_rank()
    broadcast_buffers(DDP(model, broadcast_buffers=False))
    return model.gaps, model.steps


def test_buffers_with_gaps_are_broadcast(tmp_path: Path) -> None:
    for gaps, steps in ranks.call(broadcast, folder=tmp_path, ranks=2):
        assert gaps.tolist() == [[0.0] * 3] * 4
        assert steps.item() == 2
