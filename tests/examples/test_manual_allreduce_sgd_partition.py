"""manual_allreduce_sgd: which rank trains on which samples, and in which order."""

import ast
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.launch.errors import UserError
from examples.manual_allreduce_sgd.partition import DataPartitioner
from tests.conftest import Programs
from tests.make_data import write_idx


@settings(deadline=None)
@given(st.integers(0, 300), st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any), st.integers(0, 5))
@example(161, [1, 3, 3, 8, 10, 4, 17], 0)  # 8 / 46 * 161 is 28.000000000000004
def test_no_sample_is_lost_or_twice(samples: int, weights: list[int], seed: int) -> None:
    sizes = [weight / sum(weights) for weight in weights]
    parts = [DataPartitioner(samples, sizes, seed).use(rank) for rank in range(len(sizes))]
    assert sorted(index for part in parts for index in part) == list(range(samples))
    for part, size in zip(parts, sizes, strict=True):
        assert abs(len(part) - size * samples) < 1


@settings(deadline=None)
@given(st.integers(0, 300), st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 50))
def test_batches_of_all_parts_are_those_of_one_process(samples: int, weights: list[int], batch_size: int) -> None:
    sizes = [weight / sum(weights) for weight in weights]
    parts = DataPartitioner(samples, sizes, 3)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(3)).tolist()
    whole = [order[start : start + batch_size] for start in range(0, samples, batch_size)]
    dealt = list(zip(*(parts.batches(rank, batch_size) for rank in range(len(sizes))), strict=True))
    assert [sorted(chain(*batch)) for batch in dealt] == [sorted(batch) for batch in whole]
    for batch, all_of_it in zip(dealt, whole, strict=True):
        for part, size in zip(batch, sizes, strict=True):
            assert abs(len(part) - size * len(all_of_it)) < 2


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 5))
def test_equal_parts_are_dealt_like_cards(samples: int, size: int, seed: int) -> None:
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()
    for rank in range(size):
        assert DataPartitioner(samples, [1 / size] * size, seed).use(rank) == order[rank::size]


def test_seven_ranks_keep_all_of_mnist() -> None:
    parts = [DataPartitioner(60_000, [1 / 7] * 7).use(rank) for rank in range(7)]
    assert sum(map(len, parts)) == 60_000, "int(60000 / 7) * 7 is 59,997"
    with pytest.raises(UserError, match="not shares that add up to 1"):
        DataPartitioner(10, [0.5, 0.4])


def test_the_order_follows_from_seed_and_epoch(programs: Programs, tmp_path: Path) -> None:
    write_idx(tmp_path / "data", train=50, test=10, size=12, classes=10)
    done = programs.run(
        "-m", "tests.examples.manual_allreduce_jobs", "orders", "--dataset", tmp_path / "data", "--folder", tmp_path
    )
    once, again, other = (ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("[["))
    assert once == again
    epochs = [*once, *other]
    assert all(sorted(chain(*epoch)) == list(range(50)) for epoch in epochs)
    assert once[0] != once[1], "every epoch has an order of its own"
    assert once != other, "and every seed"
    assert [len(batch) for batch in once[0]] == [24, 24, 2]
