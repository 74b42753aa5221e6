"""The order of very many samples, which is computed, and the proof by sums that each was seen once."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from common.data import samplers
from common.data.samplers import BLOCK, GlobalBatchSampler, Permutation
from common.train import seen
from tests.conftest import Programs
from tests.runs import result, tiny_imagenet

Statistic = Callable[[np.ndarray], float]
LENGTHS = [*range(1, 130), 251, 257, 1021, 1024, 4093, 4096, 10_000, 65_536, 65_537, 99_991]


def permutation(length: int, seed: int = 0) -> Permutation:
    return Permutation(length, torch.Generator().manual_seed(seed))


def whole(length: int, seed: int = 0) -> Tensor:
    return permutation(length, seed)[torch.arange(length)]


def randperm(length: int, seed: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_a_permutation(seed: int) -> None:
    for length in LENGTHS:
        found = whole(length, seed)
        assert found.dtype == torch.int64
        assert torch.equal(found.sort().values, torch.arange(length)), length
    assert len(whole(0)) == 0


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 99), st.data())
def test_any_part_is_that_of_the_whole(length: int, seed: int, data: st.DataObject) -> None:
    order = permutation(length, seed)
    positions = torch.tensor(data.draw(st.lists(st.integers(0, length - 1))), dtype=torch.int64)
    assert torch.equal(order[positions], whole(length, seed)[positions])


@pytest.mark.parametrize("bits", [24, 31, 32, 33, 47, 61])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_no_number_overflows(bits: int, more: int) -> None:
    """Beyond what can be listed: different numbers, inside, from both halves; and the way back from each half."""
    length = (1 << bits) + more
    order = permutation(length)
    for start in (0, length // 2, length - BLOCK):
        found = order[torch.arange(start, start + BLOCK)]
        assert found.unique().numel() == BLOCK
        assert 0 <= int(found.min()) < length // 100
        assert length - length // 100 < int(found.max()) < length
        assert abs(float((found < length // 2).double().mean()) - 0.5) < 0.01


def test_seeds_give_other_orders() -> None:
    orders = {tuple(whole(1000, seed).tolist()) for seed in range(200)}
    assert len(orders) == 200


# ------------------------------------------------------------------------------------- as random as torch.randperm


def chi_squared(cells: np.ndarray, expected: np.ndarray | float) -> float:
    """The probability of a deviation at least as large."""
    statistic = float(((cells - expected) ** 2 / expected).sum())
    rows, columns = cells.shape if cells.ndim == 2 else (2, cells.size)
    return float(stats.chi2.sf(statistic, (rows - 1) * (columns - 1)))


def of_places(order: np.ndarray) -> float:
    """Whether samples from any sixteenth of the data set come in any sixteenth of the epoch."""
    length = len(order)
    where = 16 * np.arange(length) // length
    cells = np.histogram2d(where, 16 * order // length, [np.arange(17)] * 2)[0]
    return chi_squared(cells, np.outer(cells.sum(1), cells.sum(0)) / length)


def of_differences(order: np.ndarray) -> float:
    """Whether from one sample to the next any distance is as frequent; every second pair: they do not overlap."""
    distances = (order[1::2] - order[: len(order) // 2 * 2 : 2]) % len(order)
    edges = np.linspace(1, len(order), 65)
    cells = np.histogram(distances, edges)[0]
    return chi_squared(cells, np.diff(np.ceil(edges)) * len(distances) / (len(order) - 1))


def of_neighbours(order: np.ndarray) -> float:
    """Whether a sample says nothing about the next one: their correlation, whose deviation is 1 / sqrt(n)."""
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    return float(2 * stats.norm.sf(abs(correlation) * math.sqrt(len(order))))


def of_low_bits(order: np.ndarray) -> float:
    """Whether even and odd numbers come in any order: runs of one kind (Wald and Wolfowitz)."""
    odd = order % 2
    ones, zeros = odd.sum(), len(odd) - odd.sum()
    runs = 1 + int((np.diff(odd) != 0).sum())
    mean = 1 + 2 * ones * zeros / len(odd)
    deviation = math.sqrt((mean - 1) * (mean - 2) / (len(odd) - 1))
    return float(2 * stats.norm.sf(abs(runs - mean) / deviation))


def of_rising_runs(order: np.ndarray) -> float:
    """How often the order rises from one sample to the next: (n + 1) / 12 is the variance."""
    rises = int((np.diff(order) > 0).sum())
    return float(2 * stats.norm.sf(abs(rises - (len(order) - 1) / 2) / math.sqrt((len(order) + 1) / 12)))


TESTS = (of_places, of_differences, of_neighbours, of_low_bits, of_rising_runs)
SEEDS = 40


@pytest.mark.parametrize("length", [4096, 10_007, 32_768])
@pytest.mark.parametrize("statistic", TESTS)
def test_it_is_as_random_as_randperm(length: int, statistic: Statistic) -> None:
    """The probabilities of 40 orders are spread evenly from 0 to 1, as those of 40 of torch's are."""
    ours = [statistic(whole(length, seed).numpy()) for seed in range(SEEDS)]
    theirs = [statistic(randperm(length, seed).numpy()) for seed in range(SEEDS)]
    for values in (ours, theirs):
        assert stats.kstest(values, "uniform").pvalue > 1e-3
        assert min(values) > 1e-5
    assert stats.ks_2samp(ours, theirs).pvalue > 1e-3


@pytest.mark.parametrize("statistic", [of_places, of_differences, of_neighbours, of_rising_runs])
def test_a_poor_order_is_told(statistic: Statistic) -> None:
    """The mutation: one round in place of eight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samplers, "ROUNDS", 1)
        poor = [statistic(whole(10_007, seed).numpy()) for seed in range(SEEDS)]
    assert stats.kstest(poor, "uniform").pvalue < 1e-3


def test_every_order_of_four_is_as_frequent() -> None:
    """Of very few samples, too, though the sampler does not use it there: all 24 orders."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(1200):
        order = tuple(whole(4, seed).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert chi_squared(np.array(list(counts.values())), 50.0) > 1e-3


# ----------------------------------------------------------------------------------------------------- the sampler


@pytest.mark.parametrize("size", [1, 2, 3])
def test_large_sets_are_dealt_as_small_ones(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(samplers, "LARGE", 100)
    monkeypatch.setattr(samplers, "BLOCK", 50)  # two batches
    parts = [GlobalBatchSampler(203, 24, 3, number, size) for number in range(size)]
    for part in parts:
        part.set_epoch(5)
    steps = list(parts[0])
    assert [len(list(part)) for part in parts] == [9] * size
    order = parts[0].order()
    assert isinstance(order, Permutation)
    dealt = [index for step in zip(*parts, strict=True) for each in zip(*step, strict=True) for _, index in each]
    assert dealt[:203] == order[torch.arange(203)].tolist()
    for start in (1, 4, 8):
        parts[0].skip(start)
        assert list(parts[0]) == steps[start:]


def test_a_trillion_samples_begin_anywhere_at_once() -> None:
    """A list of them would need 8 TB."""
    sampler = GlobalBatchSampler(10**12, 1024, 0, 1, 4)
    sampler.skip(900_000_000)
    first = 900_000_000 * 1024
    expected = sampler.order()[torch.arange(first + 1, first + 1024, 4)]
    assert next(iter(sampler)) == [(0, index) for index in expected.tolist()]


def test_small_sets_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert samplers.LARGE == seen.LARGE == 2**24
    monkeypatch.setattr(samplers, "LARGE", 1000)
    sampler = GlobalBatchSampler(samplers.LARGE - 1, 24, 3, 0, 1)
    assert isinstance(sampler.order(), Tensor)
    assert isinstance(GlobalBatchSampler(samplers.LARGE, 24, 3, 0, 1).order(), Permutation)


# ----------------------------------------------------------------------------------------- each sample seen once

JOBS = ("-m", "tests.common.jobs")
SAID = {
    "none": "fine",
    "lost": "of 1000 samples of the epoch, number 1 was lost",
    "doubled": "of 1000 samples of the epoch, number 1 was trained on twice",
    "swapped": "of 1000 samples of the epoch, as many were lost as were trained on more than once",
    "several": "of 1000 samples of the epoch, 3 or more were lost",
    "one too few": "of 1000 samples of the epoch, 1 or more were lost",
    "foreign": "of 1000 samples of the epoch, as many were lost as were trained on more than once",
    "resumed": "fine",
    "resumed, one lost": "of 1000 samples of the epoch, number 999 was lost",
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_sums_tell_what_the_counts_tell(programs: Programs, ranks: int) -> None:
    done = programs.run(*JOBS, "sums", "--nproc", ranks)
    said = [f"{what}: {words}" for what, words in SAID.items() for _ in range(ranks)]
    assert sorted(done.stdout.splitlines()) == sorted(said)


# What is made up is a large set.
LARGE = tuple((f"common/{file}.py", "LARGE = 1 << 24", "LARGE = 100") for file in ("data/samplers", "train/seen"))
TRAIN = ("-m", "examples.imagenet_ddp", "--dummy", "--dummy-images", 250, "--image-size", 16, "-b", 24, "--epochs", 2)


def test_a_large_set_trains_and_resumes(programs: Programs, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch and resumed, also by fewer ranks, and the proof holds."""
    code = tiny_imagenet(tmp_path / "code", *LARGE)

    def train(out: str, *more: object, ranks: int = 2, cwd: Path = code) -> str:
        programs.run(*TRAIN, "--nproc", ranks, "--out", tmp_path / out, *more, cwd=cwd)
        return str(result(tmp_path / out)["parameter_hash"])

    expected = train("whole")
    train("cut", "--limit-steps", 15)  # of 11 in an epoch
    shutil.copytree(tmp_path / "cut", tmp_path / "fewer")
    assert train("cut", "--resume", "auto") == expected
    train("fewer", "--resume", "auto", ranks=1)
    small = tiny_imagenet(tmp_path / "small")
    assert train("listed", cwd=small) != expected, "the order of small sets is another"


def test_a_doubled_sample_of_a_large_set_ends_the_run(programs: Programs, tmp_path: Path) -> None:
    change = ("common/data/samplers.py", "+ self.rank) % samples", "+ self.rank) % samples * 0")
    code = tiny_imagenet(tmp_path / "code", *LARGE, change)
    done = programs.run(*TRAIN, "--nproc", 2, "--out", tmp_path / "out", cwd=code, code=1)
    assert "of 250 samples of the epoch, as many were lost as were trained on more than once" in done.stderr
