"""What is read from real datasets: MNIST, photographs, odd and broken files, against torchvision and Pillow."""

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from common.data.idx import idx_folder
from common.images.crop import middle, resize
from common.images.decode import BrokenImageError, decode, dimensions


def test_normalise_is_totensor_and_normalize(real_data: Path) -> None:
    data = idx_folder(real_data / "mnist/MNIST/raw", "mnist")
    assert (len(data.train), len(data.test), data.classes, data.size) == (60_000, 10_000, 10, 28)
    images, labels, indices = data.collate(data.train.__getitems__([7, 59_999]))
    reference = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    for image, index in zip(images, (7, 59_999), strict=True):
        torch.testing.assert_close(image, reference(data.train.pixels[index][0].numpy()), rtol=0, atol=1e-6)
    assert labels.tolist() == data.train.labels[[7, 59_999]].tolist()
    assert indices.tolist() == [7, 59_999]


def test_the_constants_of_mnist_are_its_mean_and_deviation(real_data: Path) -> None:
    named, unnamed = (idx_folder(real_data / "mnist/MNIST/raw", name) for name in ("mnist", None))
    assert (named.mean, named.std) == (0.1307, 0.3081)
    assert (round(unnamed.mean, 4), round(unnamed.std, 4)) == (0.1307, 0.3081)


@pytest.mark.usefixtures("each_decoder")
@pytest.mark.parametrize("kind", ["4:4:4", "4:2:2", "4:2:0"])
def test_any_region_of_a_jpeg_is_pillows(real_data: Path, kind: str) -> None:
    """At the borders and of any size, in images of odd and of small size, where colours between are interpolated."""
    photographs = sorted((real_data / "imagenet_superclass/val").rglob("[!.]*.*"))[:2]
    for file, columns, rows in itertools.product(photographs, (1, 2, 17, 24), (1, 3, 16, 19)):
        encoded = io.BytesIO()
        Image.open(file).convert("RGB").resize((columns, rows)).save(encoded, "JPEG", subsampling=kind)
        whole = np.asarray(Image.open(encoded).convert("RGB"))
        for (top, bottom), (left, right) in itertools.product(
            *(itertools.combinations(sorted({0, 1, size // 2, size - 1, size}), 2) for size in (rows, columns))
        ):
            ours = decode(encoded.getvalue(), (top, left, bottom - top, right - left))
            assert np.array_equal(ours, whole[top:bottom, left:right]), f"{top}:{bottom}, {left}:{right}"


def test_evaluation_sees_what_resize_and_center_crop_keep(real_data: Path) -> None:
    reference = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.PILToTensor()])
    for file in sorted((real_data / "imagenet_superclass/val/dog").iterdir()):
        if file.name.startswith("._"):
            continue
        content = file.read_bytes()
        ours = torch.from_numpy(resize(decode(content, middle(*dimensions(content))), 224).copy()).permute(2, 0, 1)
        theirs = reference(Image.open(file).convert("RGB")).double()
        top, left, rows, columns = middle(*dimensions(content))
        beside = torch.from_numpy(resize(decode(content, (top, left - 8, rows, columns)), 224).copy()).permute(2, 0, 1)
        difference = (ours - theirs).abs().mean()
        assert difference < 8, "half a pixel apart"
        assert difference < 0.6 * (beside - theirs).abs().mean()


@pytest.mark.usefixtures("each_decoder")
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of the reference, about damaged EXIF
def test_odd_files_load_and_broken_ones_are_named(real_data: Path) -> None:
    odd = real_data / "imagenet_odd"
    for file in [*(odd / "made_ok").iterdir(), *(odd / "real").iterdir()]:
        if file.name.startswith("._"):
            continue
        content = file.read_bytes()
        height, width = dimensions(content)
        with Image.open(file) as picture:
            grey16 = picture.mode == "I;16"  # which Pillow converts by cutting it off at 255
            reference = np.asarray(picture.convert("RGB"))
            if grey16:
                reference = np.repeat(np.rint(np.asarray(picture) / 257)[:, :, None], 3, axis=2).astype(int)
        assert reference.shape == (height, width, 3)  # so the orientation tag is ignored, as by torchvision
        whole = decode(content, (0, 0, height, width))
        assert np.array_equal(whole, reference)
        assert resize(decode(content, middle(height, width)), 32).shape == (32, 32, 3)
    seen = 0
    for file in (odd / "made_broken").iterdir():
        if file.name == "corrupt_scan.jpeg":  # other pixels, which libjpeg warns of at most
            with Image.open(file) as picture:
                reference = np.asarray(picture.convert("RGB"))
            assert np.array_equal(decode(file.read_bytes(), (0, 0, *reference.shape[:2])), reference)
            continue
        seen += 1
        with pytest.raises(BrokenImageError, match=r"it is (empty|not an image|truncated)"):
            decode(file.read_bytes(), (0, 0, *dimensions(file.read_bytes())))
    assert seen >= 5
