"""Sums by hand are those of torch; each program of the folder does what it says."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.manual_allreduce_sgd import allreduce
from examples.manual_allreduce_sgd.further import buckets, compress, local_sgd, shared_memory
from examples.manual_allreduce_sgd.run import launch
from examples.manual_allreduce_sgd.train import (
    average_gradients,
    partition_dataset,
    ring_all_reduce,
)
from tests import programs, ranks

PACKAGE = "examples.manual_allreduce_sgd"
SIZES = (0, 1, 2, 3, 5, 8, 17, 1000)


def sums() -> dict[str, list[Tensor]]:
    """Return sums of whole numbers, then of floats, of each algorithm."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = {}
    for algorithm in (dist.all_reduce, ring_all_reduce, allreduce.recursive_doubling):
        generator.manual_seed(dist.get_rank())
        numbers = [torch.randint(10**9, (n,), generator=generator) for n in SIZES]
        floats = [torch.randn(n, generator=generator) for n in SIZES]
        for tensor in (*numbers, *floats):
            algorithm(tensor)
        found[algorithm.__name__] = [*numbers, *floats]
    return found


@pytest.mark.parametrize("world_size", range(1, 9))
def test_all_algorithms_sum_like_torch(world_size: int, tmp_path: Path) -> None:
    first, *others = ranks.call(sums, folder=tmp_path, ranks=world_size)
    for name, tensors in first.items():
        torch.testing.assert_close(tensors[: len(SIZES)], first["all_reduce"][: len(SIZES)])
        torch.testing.assert_close(tensors, first["all_reduce"], atol=1e-5, rtol=1e-5)
        for other in others:  # the same bits on all ranks
            torch.testing.assert_close(other[name], tensors, atol=0, rtol=0)


def sent(elements: int) -> list[tuple[int, int]]:
    """Return size and receiver of each message of a ring."""
    messages, operation = [], dist.P2POp

    def counted(function: Any, tensor: Tensor, peer: int) -> Any:
        if function is dist.isend:
            messages.append((tensor.numel(), peer))
        return operation(function, tensor, peer)

    with patch.object(dist, "P2POp", counted):
        ring_all_reduce(torch.ones(elements))
    return messages


def test_ring_sends_the_minimum_to_its_neighbor(tmp_path: Path) -> None:
    for rank, messages in enumerate(ranks.call(sent, 600, folder=tmp_path, ranks=3)):
        assert messages == [(200, (rank + 1) % 3)] * 4  # 2 (W - 1) / W of the tensor


@pytest.mark.parametrize(("samples", "batch_size"), [(1437, 128), (60, 7), (5, 5), (3, 10)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_partition_loses_no_sample(
    samples: int, batch_size: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, parts = torch.randperm(samples), []
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    for rank in range(world_size):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        parts.append(partition_dataset(order, batch_size))
    for batch, *all_ranks in zip(order.split(batch_size), *parts, strict=True):
        lengths = [len(part) for part, _ in all_ranks]
        assert max(lengths) - min(lengths) <= 1
        assert {size for _, size in all_ranks} == {len(batch)}
        together = torch.cat([part for part, _ in all_ranks])
        assert together.sort().values.equal(batch.sort().values)


def averaged(average: Callable[[nn.Module], None]) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5, bias=False))
    model[0].bias.requires_grad_(False)  # frozen
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, (dist.get_rank() + 1) * 3.0**number)
    average(model)
    return [p.grad for p in model.parameters() if p.grad is not None]


def average_in_a_ring(model: nn.Module) -> None:
    average_gradients(model, ring_all_reduce)


@pytest.mark.parametrize("average", [average_in_a_ring, allreduce.average_each_gradient])
def test_gradients_become_their_means(average: Any, tmp_path: Path) -> None:
    for gradients in ranks.call(averaged, average, folder=tmp_path, ranks=3):
        assert [g.unique().tolist() for g in gradients] == [[2.0], [2.0 * 9]]


def averaged_on_cuda() -> list[float]:
    model = nn.Linear(2, 2).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, dist.get_rank() + 1.0)
    average_in_a_ring(model)
    return [p.grad.mean().item() for p in model.parameters() if p.grad is not None]


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_send_from_host_memory(tmp_path: Path) -> None:
    assert ranks.call(averaged_on_cuda, folder=tmp_path, ranks=2) == [[1.5, 1.5]] * 2


def test_each_rank_prints_its_mean_loss(tmp_path: Path) -> None:
    run = ranks.run("manual_allreduce_sgd", 2, ["--epochs", "1"], out=tmp_path / "out").done()
    means = [re.findall(rf"rank {rank}: mean loss (\S+)", run.text) for rank in (0, 1)]
    own = [float(mean) for (mean,) in means]
    assert own[0] != own[1]
    assert sum(own) / 2 == pytest.approx(sum(run.losses) / len(run.losses), abs=1e-3)


# ----------------------------------------------------------------------------------- further


class Shared(nn.Module):
    """A layer that is used twice, and one that rank 1 skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs) if dist.get_rank() == 0 else inputs
        return self.last(self.twice(self.twice(hidden)))


def bucketed(bucket_bytes: int) -> tuple[list[int], float, str]:
    torch.manual_seed(0)
    model = Shared()
    averaging, overlapped, difference, message = buckets.Buckets(model, bucket_bytes), [], 0.0, ""
    for step in range(4):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank() + step))
        model.zero_grad()
        model(inputs.clone()).square().sum().backward()
        averaging.wait()
        overlapped.append(averaging.overlapped)
        mean = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        expected = plain_gradients(model, inputs)
        error = max((m - e).abs().max().item() for m, e in zip(mean, expected, strict=True))
        difference = max(difference, error)
    hidden = model.first(torch.ones(6, 4))
    for _ in range(2):  # each checkpointed call computes a part of the gradient
        hidden = checkpoint(model.twice, hidden, use_reentrant=True)
    try:
        hidden.sum().backward()
    except RuntimeError as error:
        message = str(error)
    return overlapped, difference, message


def plain_gradients(model: Shared, inputs: Tensor) -> list[Tensor]:
    """Return the mean gradients without buckets: hooks do not see `torch.autograd.grad`."""
    hidden = model.first(inputs) if dist.get_rank() == 0 else inputs
    loss = model.last(model.twice(model.twice(hidden))).square().sum()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    for gradient in gradients:
        dist.all_reduce(gradient)
    return [gradient / dist.get_world_size() for gradient in gradients]


@pytest.mark.parametrize("bucket_bytes", [1, 80, 10**6])
def test_buckets_average_the_gradients_during_backward(bucket_bytes: int, tmp_path: Path) -> None:
    results = ranks.call(bucketed, bucket_bytes, folder=tmp_path, ranks=2)
    for rank, (overlapped, difference, message) in enumerate(results):
        assert difference < 1e-5
        complete = {1: 6, 80: 3, 10**6: 1}[bucket_bytes]
        unused = {1: 2, 80: 1, 10**6: 1}[bucket_bytes] * rank  # rank 1 has no gradient of `first`
        assert set(overlapped) == {complete - unused}
        assert "ready twice" in message


def compressed(make: Callable[[], compress.Compressor], steps: int) -> list[Tensor]:
    """Return what was applied in all steps, what was true, and what is not sent yet."""
    compressor, generator = make(), torch.Generator().manual_seed(dist.get_rank())
    applied, true = torch.zeros(70), torch.zeros(70)
    for _ in range(steps):
        gradient = torch.randn(70, generator=generator)
        applied += compressor.average(gradient)
        true += gradient
    return [applied, true, compressor.error]


def top_ten() -> compress.Compressor:
    return compress.TopK(10 / 70)


def power_sgd() -> compress.Compressor:
    return compress.PowerSGD([(8, 8), (1, 6)], rank=2)


@pytest.mark.parametrize("make", [compress.Compressor, compress.BFloat16, top_ten, power_sgd])
def test_error_feedback_loses_nothing(make: Any, tmp_path: Path) -> None:
    results = ranks.call(compressed, make, 20, folder=tmp_path, ranks=3)
    applied, true, error = (torch.stack(tensors) for tensors in zip(*results, strict=True))
    assert applied[0].equal(applied[1])
    assert applied[0].equal(applied[2])
    rounded = make is compress.BFloat16  # the sum over the ranks is rounded, too
    difference = applied[0] + error.mean(0) - true.mean(0)
    assert difference.abs().max() < (0.3 if rounded else 1e-4)
    assert (error.abs().max() > 0.5) == (make in (top_ten, power_sgd))


def one_step() -> tuple[Tensor, Tensor, int, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradient, top = torch.randn(70, generator=generator), top_ten()
    left = torch.randn(8, 2, generator=torch.Generator().manual_seed(5))
    low_rank = left @ torch.randn(2, 8, generator=generator)  # [8, 8], of rank 2 also in the mean
    power = power_sgd().average(torch.cat([low_rank.flatten(), torch.ones(6)]))
    return gradient, top.average(gradient), top.bytes_per_step, power[:64].view(8, 8) - low_rank


def test_compressors_send_what_they_say(tmp_path: Path) -> None:
    results = ranks.call(one_step, folder=tmp_path, ranks=3)
    expected = torch.zeros(70)
    for gradient, _, size, _ in results:
        largest = gradient.abs().argsort(descending=True)[:10]
        expected[largest] += gradient[largest] / 3
        assert size == 10 * (8 + 4)
    torch.testing.assert_close(results[0][1], expected)
    # The mean of matrices of rank 2 with the same columns has rank 2: PowerSGD finds it exactly.
    assert sum(difference for *_, difference in results).abs().max() < 1e-4


def local(settings: tuple[float, float] | None, every: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    outer = local_sgd.Outer(model, *settings) if settings else None
    local_sgd.train(model, outer, every, epochs=1)
    return [p.detach().clone() for p in model.parameters()]


def test_local_sgd_is_the_mean_of_models(tmp_path: Path) -> None:
    alone = ranks.call(local, (1.0, 0.0), 5, folder=tmp_path / "1", ranks=1)[0]
    plain = ranks.call(local, None, 5, folder=tmp_path / "2", ranks=1)[0]
    torch.testing.assert_close(alone, plain)  # with one rank: plain SGD
    two = ranks.call(local, (1.0, 0.0), 5, folder=tmp_path / "3", ranks=2)
    assert all(a.equal(b) for a, b in zip(*two, strict=True))
    assert not torch.allclose(two[0][0], plain[0], atol=1e-4)


def outer_steps() -> tuple[list[float], list[float]]:
    """Return a parameter after each step of DiLoCo, and what the formula gives."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    outer, found, formula = local_sgd.Outer(model, lr=0.7, momentum=0.9), [], []
    shared, velocity = 1.0, 0.0
    for step in range(3):
        changes = [0.1 * (step + 1) * (rank + 1) for rank in range(dist.get_world_size())]
        with torch.no_grad():
            model.weight -= changes[dist.get_rank()]
        outer.step()
        found.append(model.weight.item())
        mean = sum(changes) / len(changes)
        velocity = 0.9 * velocity + mean
        shared -= 0.7 * (mean + 0.9 * velocity)  # Nesterov
        formula.append(shared)
    return found, formula


def test_diloco_is_its_formula(tmp_path: Path) -> None:
    for found, formula in ranks.call(outer_steps, folder=tmp_path, ranks=3):
        assert found == pytest.approx(formula, rel=1e-5)


def sum_in_memory(world_size: int, length: int) -> None:
    memory = shared_memory.SharedMemory(world_size, length)

    def run() -> None:
        for number in range(30):  # a rank that is ahead must not change a sum that others read
            memory.own.copy_(torch.arange(length) + 100.0 * dist.get_rank() + number)
            expected = world_size * (torch.arange(length) + number) + 100 * sum(range(world_size))
            assert memory.sum().equal(expected.float())

    launch(run, world_size)


@pytest.mark.parametrize(("world_size", "length"), [(2, 1000), (3, 2), (5, 13)])
def test_shared_memory_sums(world_size: int, length: int, tmp_path: Path) -> None:
    ranks.call(sum_in_memory, world_size, length, folder=tmp_path)


# -------------------------------------------------------------------------------- programs


def cold(program: str, *flags: str) -> str:
    return programs.run(*programs.PYTHON, f"{PACKAGE}.{program}", *flags).done().stdout


def test_smallest_program() -> None:
    assert sorted(cold("run").splitlines()) == [
        f"rank {rank} of 2: the sum of all ranks is 1" for rank in (0, 1)
    ]


def fails_on_rank_1() -> None:
    assert dist.get_rank() == 0


def exit_code() -> object:
    with pytest.raises(SystemExit) as stop:
        launch(fails_on_rank_1, 2)
    return stop.value.code


def test_launch_reports_a_failed_rank(tmp_path: Path) -> None:
    assert ranks.call(exit_code, folder=tmp_path) == 1


def test_tour_shows_what_each_rank_has() -> None:
    text = cold("tour", "--nproc", "3")
    blocks = [block.splitlines() for block in f"\n{text}".split("\n\n")]
    after = {
        block[0]: [re.split(r"  +", line.strip())[-1] for line in block[2:5]]
        for block in blocks
        if len(block) >= 5
    }
    everything = "[[0], [10], [20]]"
    assert after["broadcast(src=0)"] == ["[0, 0]"] * 3
    assert after["scatter(src=0)"] == ["[0]", "[10]", "[20]"]
    assert after["gather(dst=0)"] == [everything, "None", "None"]
    assert after["all_gather"] == [everything] * 3
    for operation, result in {"SUM": 9, "PRODUCT": 24, "MIN": 2, "MAX": 4, "AVG": 3}.items():
        assert after[f"all_reduce({operation})"] == [f"[{result}]"] * 3
    assert next(rows for call, rows in after.items() if call.startswith("reduce("))[0] == "[9]"
    assert after["reduce_scatter(SUM)"] == ["[3]", "[33]", "[63]"]
    objects = str([{"rank": rank} for rank in range(3)])
    assert after["all_gather_object"] == [objects] * 3
    assert after["gather_object(dst=0)"] == [objects, "None", "None"]
    assert after["recv from the left, add 1, send to the right; both calls block"] == [
        *("[100]", "[101]", "[102]")
    ]
    assert after["isend from rank 0, irecv on rank 1, wait"] == ["[7]", "[7]", "[-1]"]
    assert {"rank 0 started sending", "rank 1 started receiving"} <= set(text.splitlines())
    left = [float(seconds) for seconds in re.findall(r"left after (\S+) s", text)]
    arrived = [float(seconds) for seconds in re.findall(r"arrived after (\S+) s", text)]
    assert min(left) >= max(arrived) - 0.2
    refusals = [rows for call, rows in after.items() if ";" in call and "block" not in call]
    assert len(refusals) == 3
    assert all("Error: " in row for rows in refusals for row in rows)


@pytest.mark.parametrize(
    ("main", "settings", "facts"),
    [
        (allreduce.main, (3,), "^all_reduce|^ring_all|^recursive_d"),
        (
            buckets.main,
            (2, 4),
            "^6 of 6 buckets sent in the backward|parameters: (0.0e.00$)?(.*e-0[6-9]$)?$",
        ),
        (compress.main, (2, 1), "fp32 +207,848|bf16 +103,924|1% +6,240|4 +27,096"),
        (local_sgd.main, (2, 8, 1), "SGD .*y 1 step|^local SGD .*y 8 step|DiLoCo .*y 8 step"),
        (shared_memory.main, (2, 1), r"^time to sum 1,048,576 by|^all_reduce .*\d$|^shared m.*\d$"),
    ],
)
def test_programs_print_their_tables(
    main: Callable[..., None], settings: Any, facts: str, tmp_path: Path
) -> None:
    ranks.call(main, *settings, folder=tmp_path)
    text = (tmp_path / "0.txt").read_text()
    missing = [f for f in facts.split("|") if not re.search(f, text, re.MULTILINE)]
    assert not missing, text
