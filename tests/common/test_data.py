"""Reading idx files and the embedded digits; every way in which the files can be wrong."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from common.data import Shard, digits, idx_folder, read_idx
from common.errors import UserError
from tests.make_data import write_idx


def test_digits_are_split_fixed_and_stratified() -> None:
    data = digits()
    assert (len(data.train), len(data.test), data.classes, data.size) == (1436, 361, 10, 8)
    assert data.train.pixels.dtype == torch.uint8
    assert int(data.train.pixels.max()) == 255
    share = data.test.labels.bincount() / data.train.labels.bincount()
    assert share.max() - share.min() < 0.01
    assert torch.equal(data.train.pixels, digits().train.pixels)


def test_normalise_is_totensor_and_normalize(real_data: Path) -> None:
    from torchvision import transforms

    data = idx_folder(real_data / "mnist/MNIST/raw", "mnist")
    assert (len(data.train), len(data.test), data.classes, data.size) == (60_000, 10_000, 10, 28)
    images, labels, indices = data.normalise(data.train.__getitems__([7, 59_999]))
    reference = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    for image, index in zip(images, (7, 59_999), strict=True):
        torch.testing.assert_close(image, reference(data.train.pixels[index][0].numpy()), rtol=0, atol=1e-6)
    assert labels.tolist() == data.train.labels[[7, 59_999]].tolist()
    assert indices.tolist() == [7, 59_999]


def test_the_constants_of_mnist_are_its_mean_and_deviation(real_data: Path) -> None:
    named, unnamed = (idx_folder(real_data / "mnist/MNIST/raw", name) for name in ("mnist", None))
    assert (named.mean, named.std) == (0.1307, 0.3081)
    assert (round(unnamed.mean, 4), round(unnamed.std, 4)) == (0.1307, 0.3081)


@pytest.mark.parametrize("packed", [False, True])
def test_any_idx_folder(tmp_path: Path, packed: bool) -> None:
    write_idx(tmp_path, train=23, test=7, size=9, classes=3, packed=packed)
    data = idx_folder(tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.size) == (23, 7, 3, 9)


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
        ("wrong magic", "no idx file"),
        ("a web page", "damaged"),
        ("empty", "no idx file"),
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
