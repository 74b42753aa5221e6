"""Reading idx files and the embedded digits, every way in which the files can be wrong; which rank gets what."""

import gzip
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from common.data.digits import load_digits, stratified_split
from common.data.idx import digits, idx_folder, image_data, read_idx
from common.data.samplers import GlobalBatchSampler, Shard
from common.launch.errors import UserError
from common.launch.flags import Launch
from common.train import loader
from common.train.loader import default_workers, local_batch, local_samples, rest_of_epoch
from common.train.state import TrainState
from tests.make_data import write_idx


def test_digits_are_split_fixed_and_stratified() -> None:
    data = digits()
    assert (len(data.train), len(data.test), data.classes, data.size) == (1436, 361, 10, 8)
    assert data.train.pixels.dtype == torch.uint8
    assert int(data.train.pixels.max()) == 255
    share = data.test.labels.bincount() / data.train.labels.bincount()
    assert share.max() - share.min() < 0.01
    assert torch.equal(data.train.pixels, digits().train.pixels)
    assert str(data) == "digits (1436 train, 361 test)"


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    ours, our_labels = load_digits()
    assert np.array_equal(ours, pixels)
    assert np.array_equal(our_labels, labels)


@settings(deadline=None)  # the first import of scikit-learn
@given(st.lists(st.integers(2, 40), min_size=2, max_size=12), st.integers(0, 1000), st.data())
def test_the_split_is_that_of_scikit_learn(counts: list[int], seed: int, data: st.DataObject) -> None:
    from sklearn.model_selection import train_test_split

    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    test = data.draw(st.integers(len(counts), len(labels) - len(counts)))
    reference = train_test_split(np.arange(len(labels)), test_size=test, stratify=labels, random_state=seed)
    for ours, theirs in zip(stratified_split(labels, test, seed), reference, strict=True):
        assert ours.tolist() == theirs.tolist()


def test_clothes_have_names_and_constants_of_their_own(tmp_path: Path) -> None:
    from torchvision.datasets import FashionMNIST

    write_idx(tmp_path, train=23, test=17, size=9, classes=10)
    data = idx_folder(tmp_path, "fashion-mnist")
    assert data.class_names == FashionMNIST.classes
    assert (data.mean, data.std) == (0.2860, 0.3530)


@pytest.mark.parametrize("packed", [False, True])
def test_any_idx_folder(tmp_path: Path, packed: bool) -> None:
    write_idx(tmp_path, train=23, test=7, size=9, classes=3, packed=packed)
    data = idx_folder(tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.size) == (23, 7, 3, 9)
    assert image_data(str(tmp_path), tmp_path / "unused").identity == {"train_samples": 23, "classes": 3}


@pytest.mark.parametrize("rare", ["train", "t10k"])
def test_the_classes_are_those_of_both_parts(tmp_path: Path, rare: str) -> None:
    """One of them may lack the last class: an output for it would be missing, or labels would be out of range."""
    write_idx(tmp_path / "few", train=23, test=17, size=9, classes=3)
    write_idx(tmp_path / "many", train=23, test=17, size=9, classes=5)
    for file in (tmp_path / "many").glob(f"{rare}-*"):
        shutil.copy(file, tmp_path / "few")
    data = idx_folder(tmp_path / "few")
    assert {int(part.labels.max()) for part in (data.train, data.test)} == {2, 4}
    assert (data.classes, data.class_names) == (5, ["0", "1", "2", "3", "4"])


def test_an_unknown_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dataset cifar: give digits, mnist, fashion-mnist, or a folder with idx"):
        image_data("cifar", tmp_path)


def damage(folder: Path, kind: str) -> None:
    images, labels = folder / "train-images-idx3-ubyte.gz", folder / "t10k-labels-idx1-ubyte.gz"
    content = images.read_bytes()
    match kind:
        case "missing":
            images.unlink()
        case "gzip cut short":
            images.write_bytes(content[: len(content) // 2])
        case "gzip with a flipped bit":
            middle = len(content) // 2
            images.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
        case "idx cut short":
            images.write_bytes(gzip.compress(gzip.decompress(content)[:-1]))
        case "wrong magic":
            images.write_bytes(gzip.compress(b"\0\0\x09\x03" + gzip.decompress(content)[4:]))
        case "a web page":
            images.write_bytes(b"<html>404</html>")
        case "empty":
            images.write_bytes(gzip.compress(b""))
        case "one label less":
            labels.write_bytes(gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, 6) + bytes(6)))
        case "no image":
            for prefix in ("train", "t10k"):
                (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03" + bytes(12)))
                (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01" + bytes(4)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "train-images-idx3-ubyte.* is missing"),
        ("gzip cut short", "damaged"),
        ("gzip with a flipped bit", "damaged"),
        ("idx cut short", "announces 1863 bytes and holds 1862"),
        ("wrong magic", "not an idx file"),
        ("a web page", "damaged"),
        ("empty", "not an idx file"),
        ("one label less", "6 labels for the 7 images"),
        ("no image", "holds no image"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, kind: str, words: str) -> None:
    write_idx(tmp_path, train=23, test=7, size=9, classes=3, packed=True)
    damage(tmp_path, kind)
    with pytest.raises(UserError, match=words) as caught:
        idx_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_read_idx_returns_the_bytes(tmp_path: Path) -> None:
    write_idx(tmp_path, train=5, test=3, size=8, classes=2, packed=False)
    _, pixels = read_idx(tmp_path, "t10k-images-idx3-ubyte", 3)
    raw = (tmp_path / "t10k-images-idx3-ubyte").read_bytes()[16:]
    assert pixels.numpy().tobytes() == raw
    assert pixels.shape == (3, 8, 8)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_shards_hold_each_position_once(size: int) -> None:
    shards = [list(Shard(11, rank, size)) for rank in range(size)]
    assert sorted(position for shard in shards for position in shard) == list(range(11))
    assert [len(Shard(11, rank, size)) for rank in range(size)] == [len(shard) for shard in shards]
    assert np.ptp([len(shard) for shard in shards]) <= 1


# ------------------------------------------------------------------------------------------------- order of samples


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_each_batch_of_one_permutation(size: int) -> None:
    samplers = [GlobalBatchSampler(203, 24, 3, number, size) for number in range(size)]
    whole = GlobalBatchSampler(203, 24, 3, 0, 1)
    for sampler in (*samplers, whole):
        sampler.set_epoch(5)
    steps = [list(sampler) for sampler in samplers]
    assert len(whole) == 9
    for step, expected in enumerate(whole):
        parts = [part[step] for part in steps]
        assert len({len(part) for part in parts}) == 1, "DDP needs all ranks in every step"
        dealt = [key for position in zip(*parts, strict=True) for key in position]
        assert dealt[: len(expected)] == expected
        assert set(dealt[len(expected) :]) <= set(expected), "padding, which is last"
        counts = [local_samples(len(expected), number, size) for number in range(size)]
        assert sum(counts) == len(expected)
        own = [key for number, part in enumerate(parts) for key in part[: counts[number]]]
        assert sorted(own) == sorted(expected), "without the padding, each sample once"
    indices = [index for batch in whole for _, index in batch]
    assert sorted(indices) == list(range(203))
    whole.set_epoch(6)
    assert [index for batch in whole for _, index in batch] != indices


def test_the_permutation_follows_from_seed_and_epoch() -> None:
    sampler = GlobalBatchSampler(203, 24, 3, 0, 1)
    sampler.set_epoch(5)
    expected = torch.randperm(203, generator=torch.Generator().manual_seed(3_000_014))  # 3 x 1,000,003 + 5
    assert [key for batch in sampler for key in batch] == [(5, index) for index in expected.tolist()]


def test_any_step_can_be_the_first() -> None:
    sampler = GlobalBatchSampler(203, 24, 3, 1, 3)
    sampler.set_epoch(2)
    everything = list(sampler)
    for start in range(9):
        sampler.skip(start)
        assert sampler.seen().nonzero().flatten().tolist() == sorted(
            index for batch in everything[:start] for _, index in batch[: 24 // 3]
        )
        assert list(sampler) == everything[start:]
        assert list(sampler) == everything, "the epoch after the resumed one is whole again"
        assert sampler.seen().sum() == 0


@pytest.mark.parametrize(("length", "most", "smallest"), [(203, 8, 4), (203, 3, 1), (192, 8, 8), (194, 8, 1)])
def test_the_smallest_part_of_an_epoch_is_found(length: int, most: int, smallest: int) -> None:
    sampler = GlobalBatchSampler(length, 24, 3, 1, 3)
    parts = [len(batch[first : first + most]) for batch in sampler for first in range(0, len(batch), most)]
    assert min(parts) == smallest == sampler.smallest(most)


def test_a_batch_that_cannot_be_divided_is_named() -> None:
    assert local_batch(24, 3) == 8
    with pytest.raises(
        UserError, match=r"^--batch-size 25 \(global\) cannot be divided by 3 ranks; use 24, for example$"
    ):
        local_batch(25, 3)
    with pytest.raises(UserError, match=r"by 2 ranks x 2 backward passes; use 4, for example$"):
        local_batch(1, 4, "2 ranks x 2 backward passes")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("given", "then"), [(0, Launch().timeout), (7, 7)])
def test_a_loader_without_a_time_out_gets_that_of_the_ranks(given: int, then: float) -> None:
    samples = TensorDataset(torch.arange(4), torch.arange(4))
    for workers in (0, 1):
        its = DataLoader(samples, 2, num_workers=workers, timeout=given * workers)
        batches, _ = rest_of_epoch(its, 0, TrainState(), 2, (0, 1))
        assert len(list(batches)) == 2
        assert its.timeout == then * workers, "without workers, torch allows none"


@pytest.mark.parametrize(("cores", "gpu", "cpu"), [(1, 1, 0), (4, 3, 0), (16, 15, 2), (128, 16, 16)])
def test_loaders_leave_a_core_to_their_rank(monkeypatch: pytest.MonkeyPatch, cores: int, gpu: int, cpu: int) -> None:
    monkeypatch.setattr(loader, "core_share", lambda: cores)
    assert (default_workers(torch.device("cuda")), default_workers(torch.device("cpu"))) == (gpu, cpu)
