"""Gray images: what is read is what the files contain, in every form that people have them in."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchvision
from sklearn.datasets import load_digits
from torchvision.datasets.mnist import read_image_file, read_label_file

from common.data import DigitNet, image_data
from common.launch import UserError

FILES = [
    f"{split}-{kind}" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]


def idx(values: np.ndarray) -> bytes:
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return head + values.astype(np.uint8).tobytes()


def write(folder: Path, train: np.ndarray, test: np.ndarray, size: int = 12) -> list[np.ndarray]:
    """Write random images with the given labels; test images are brighter."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(1)
    train_images = generator.integers(0, 100, (len(train), size, size))
    test_images = generator.integers(150, 256, (len(test), size, size))
    arrays = [train_images, train, test_images, test]
    for name, values in zip(FILES, arrays, strict=True):
        (folder / f"{name}-ubyte").write_bytes(idx(values))
    return arrays


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Folder with 7 training images of the classes 0 to 6, and 5 test images."""
    write(tmp_path / "own", np.arange(7), np.arange(5))
    return tmp_path / "own"


def packed(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def unpacked_by_a_browser(path: Path) -> None:
    path.rename(f"{path}.gz")


def in_a_folder_of_its_name(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.mkdir()
    (path / path.name).write_bytes(content)


def with_a_dot(path: Path) -> None:
    path.rename(path.with_name(path.name.replace("-idx", ".idx")))


def as_on_kaggle(path: Path) -> None:
    in_a_folder_of_its_name(path)
    with_a_dot(path / path.name)


def as_it_is(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    "form",
    [as_it_is, packed, unpacked_by_a_browser, in_a_folder_of_its_name, with_a_dot, as_on_kaggle],
)
def test_idx_files_as_people_have_them(files: Path, form: Callable[[Path], None]) -> None:
    pixels = read_image_file(str(files / "train-images-idx3-ubyte"))
    labels = read_label_file(str(files / "t10k-labels-idx1-ubyte"))
    for path in list(files.iterdir()):
        form(path)
    data = image_data(str(files), Path("unused"))
    expected = (pixels / 255 - data.mean) / data.std
    torch.testing.assert_close(data.train.tensors[0], expected[:, None])
    assert torch.equal(data.test.tensors[1], labels)
    assert (data.size, len(data.class_names), len(data.train), len(data.test)) == (12, 7, 7, 5)


@pytest.mark.parametrize(("train", "test"), [(13, 12), (4, 9)])
def test_classes_are_counted_in_both_sets(tmp_path: Path, train: int, test: int) -> None:
    write(tmp_path, np.arange(1, train), np.arange(1, test))  # like EMNIST's letters: no class 0
    data = image_data(str(tmp_path), Path("unused"))
    assert len(data.class_names) == max(train, test)
    assert data.class_names == [str(label) for label in range(max(train, test))]


def test_classes_without_test_images_are_named(tmp_path: Path) -> None:
    write(tmp_path, np.arange(1, 9), np.array([1, 8]))
    words = "8 training images; no test images for 7 class(es): 0, 2, 3, 4, 5, ..."
    assert str(image_data(str(tmp_path), Path("unused"))) == f"{tmp_path}, {words}"


def test_one_class_is_refused(tmp_path: Path) -> None:
    write(tmp_path, np.zeros(5), np.zeros(5))  # its accuracy would be 1
    with pytest.raises(UserError, match="has only one class"):
        image_data(str(tmp_path), Path("unused"))


def test_mean_and_deviation_are_those_of_the_training_set(tmp_path: Path) -> None:
    train, _, test, _ = write(tmp_path, np.arange(50), np.arange(40))
    data = image_data(str(tmp_path), Path("unused"))
    assert data.mean == pytest.approx(train.mean() / 255)
    assert data.std == pytest.approx(train.std(ddof=1) / 255)
    assert data.test.tensors[0].mean() == pytest.approx(
        (test.mean() - train.mean()) / train.std(), 1e-3
    )
    about = {"model": "DigitNet", "classes": data.class_names, "size": 12}
    assert data.about == about | {"mean": data.mean, "std": data.std}


def test_digits_are_those_of_scikit_learn() -> None:
    data, (images, labels) = image_data("digits", Path("unused")), load_digits(return_X_y=True)
    test = np.arange(1797) % 5 == 0
    assert (str(data), len(data.test)) == ("digits, 1437 training images", 360)
    assert data.train.tensors[1].tolist() == labels[~test].tolist()
    assert data.test.tensors[1].tolist() == labels[test].tolist()
    for dataset, chosen in ((data.train, ~test), (data.test, test)):
        pixels = (dataset.tensors[0].flatten(1) * data.std + data.mean) * 16
        torch.testing.assert_close(pixels, torch.tensor(images[chosen]).float(), rtol=0, atol=0.04)
    assert data.train.tensors[0].mean() == pytest.approx(0, abs=1e-5)
    assert data.train.tensors[0].std() == pytest.approx(1)


IMAGES, LABELS = FILES[:2]
DAMAGES = {
    "truncated": (IMAGES, lambda data: data[:-1]),
    "float32": (IMAGES, lambda data: data[:2] + b"\x0d" + data[3:16] + 4 * data[16:]),
    "int8": (IMAGES, lambda data: data[:2] + b"\x09" + data[3:]),
    "too long": (IMAGES, lambda data: data + b"\0"),
    "header only": (LABELS, lambda data: data[:6]),
    "empty": (LABELS, lambda _: b""),
    "page": (IMAGES, lambda _: b"<!DOCTYPE html><html><title>404</title></html>"),
    "pointer": (LABELS, lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "truncated gzip": (IMAGES, lambda data: gzip.compress(data)[:-9]),
    "flipped gzip": (IMAGES, lambda data: gzip.compress(data)[:-8] + b"12345678"),
    "no gzip": (IMAGES, lambda data: gzip.compress(data)[:2] + data),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files_are_named(files: Path, kind: str) -> None:
    name, change = DAMAGES[kind]
    path = files / f"{name}-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as error:
        image_data(str(files), Path("unused"))
    assert str(path) in str(error.value)
    reasons = {"page": "web page", "pointer": "git lfs pull"}
    assert reasons.get(kind, "unknown format") in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("train", "labels"), [((7, 12, 12), 6), ((7, 12, 13), 7), ((7, 144), 7)])
def test_shapes_that_do_not_fit(files: Path, train: tuple[int, ...], labels: int) -> None:
    (files / f"{IMAGES}-ubyte").write_bytes(idx(np.zeros(train)))
    (files / f"{LABELS}-ubyte").write_bytes(idx(np.zeros(labels)))
    with pytest.raises(UserError, match=f"train images .{train[0]}"):
        image_data(str(files), Path("unused"))


@pytest.mark.parametrize("name", FILES)
def test_missing_files_are_named(files: Path, name: str) -> None:
    (files / f"{name}-ubyte").unlink()
    with pytest.raises(UserError, match=name.partition("-idx")[0]):
        image_data(str(files), Path("unused"))


def test_a_dataset_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="digits, mnist, fashion-mnist"):
        image_data("no/such/folder", Path("unused"))


@pytest.mark.parametrize(
    ("rank", "local_rank", "expected"),
    [
        ("0", "0", ["download", "barrier", "barrier"]),
        ("2", "0", ["barrier", "download", "barrier"]),
        ("2", "0", ["barrier", "barrier"]),  # rank 0 has downloaded the files by now
        ("1", "1", ["barrier", "barrier"]),
    ],
)
def test_one_process_per_folder_downloads(
    rank: str, local_rank: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def download(root: str, download: bool) -> None:
        calls.append("download")
        write(Path(root) / "FashionMNIST" / "raw", np.arange(10), np.arange(10), 28)

    def barrier() -> None:
        if "download" not in expected:
            write(tmp_path / "FashionMNIST" / "raw", np.arange(10), np.arange(10), 28)
        calls.append("barrier")

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", download)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    data = image_data("fashion-mnist", tmp_path)
    assert calls == expected
    assert (data.class_names[0], data.class_names[9]) == ("T-shirt/top", "Ankle boot")
    calls.clear()
    image_data("fashion-mnist", tmp_path)  # the files are there
    assert calls[0] == "barrier"


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(root: str, download: bool) -> None:
        raise RuntimeError("Error downloading x.gz:\nTried a, got:\n<urlopen error no route>\n")

    monkeypatch.setattr(torchvision.datasets, "MNIST", download)
    with pytest.raises(UserError, match=r"cannot download mnist .*no route") as error:
        image_data("mnist", tmp_path)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("size", [8, 12, 16, 20, 28, 32])
def test_digit_net_treats_each_image_by_itself(size: int) -> None:
    """So the result does not depend on how a batch is split over ranks."""
    torch.manual_seed(1)
    model, images = DigitNet(size, 13), torch.randn(5, 1, size, size)
    logits = model(images)
    assert logits.shape == (5, 13)
    parts = torch.cat([model(images[:2]), model(images[2:])])
    torch.testing.assert_close(logits, parts, rtol=1e-4, atol=1e-5)
