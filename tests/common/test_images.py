"""Crops and pixels against torchvision's, broken files, loaders, the cache of decoded pixels."""

import gc
import importlib.util
import io
import os
import shutil
import signal
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from torch import Tensor
from torch.utils.data import TensorDataset
from torchvision import transforms
from torchvision.transforms import functional as F

from common.images import cache as image_cache
from common.images import decode as decoder
from common.images.args import ImageArgs
from common.images.cache import CHUNK, pixel_cache
from common.images.crop import random_crop, resize
from common.images.decode import BrokenImageError, decode, dimensions
from common.images.folder import ImageFolder, LabelsOnly
from common.images.loader import eval_loader, train_loader
from common.images.sets import image_folders, load_images, synthetic_images
from common.images.shapes import drawn_images
from common.launch.errors import UserError
from common.train.amp import MixedPrecision
from common.train.precision import Precision
from tests.conftest import Programs
from tests.make_data import draw_folder

AMP = MixedPrecision(Precision("fp32", "yes"), torch.device("cpu"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    draw_folder(folder, train=130, val=23, size=80)
    return folder


# ------------------------------------------------------------------------------------------- as torchvision does it


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (100, 1000), (900, 60)])
def test_crops_are_distributed_as_those_of_random_resized_crop(height: int, width: int) -> None:
    torch.manual_seed(0)
    empty = torch.empty(3, height, width)
    count = 4000
    theirs = [transforms.RandomResizedCrop.get_params(empty, [0.08, 1], [3 / 4, 4 / 3]) for _ in range(count)]
    ours, flips = zip(*(random_crop(1, 0, index, height, width) for index in range(count)), strict=True)
    for column in range(4):  # top, left, height, width
        assert ks_2samp([box[column] for box in theirs], [box[column] for box in ours], method="asymp").pvalue > 1e-3
    areas = [[box[2] * box[3] for box in boxes] for boxes in (theirs, ours)]
    assert ks_2samp(*areas, method="asymp").pvalue > 1e-3
    assert abs(np.mean(flips) - 0.5) < 0.03
    assert all(t >= 0 and left >= 0 and t + h <= height and left + w <= width for t, left, h, w in ours)


@pytest.mark.parametrize(("height", "width"), [(2, 2), (3, 4), (8, 5)])
def test_crops_of_small_images_reach_every_row_and_column(height: int, width: int) -> None:
    """Where an image has few places for a crop, to lose the last one is to lose a part of the image."""
    boxes = {random_crop(0, 0, index, height, width)[0] for index in range(3000)}
    for rows in {box[2] for box in boxes}:
        assert {box[0] for box in boxes if box[2] == rows} == set(range(height - rows + 1)), f"{rows} rows"
    for columns in {box[3] for box in boxes}:
        assert {box[1] for box in boxes if box[3] == columns} == set(range(width - columns + 1)), f"{columns} columns"
    assert min(box[2] for box in boxes) < height
    assert min(box[3] for box in boxes) < width


def test_a_crop_follows_from_seed_epoch_and_index_alone() -> None:
    crops = {(s, e, i): random_crop(s, e, i, 375, 500) for s in (0, 1) for e in (0, 1) for i in range(50)}
    assert len({str(crop) for crop in crops.values()}) == len(crops)
    assert random_crop(1, 1, 49, 375, 500) == crops[1, 1, 49]


@pytest.mark.parametrize("kind", ["png", "4:4:4", "4:2:2", "4:2:0"])
def test_pixels_are_torchvisions(drawn: Path, tmp_path: Path, kind: str) -> None:
    """Decoded, they are the same; resized, within rounding."""
    path = tmp_path / ("same.png" if kind == "png" else "same.jpg")
    options: dict[str, Any] = {} if kind == "png" else {"quality": 85, "subsampling": kind}
    for file in sorted((drawn / "train").rglob("*.jpg"))[:12]:
        Image.open(file).save(path, **options)
        content, picture = path.read_bytes(), Image.open(path).convert("RGB")
        for index in range(10):
            box, _ = random_crop(0, 0, index, *dimensions(content))
            pixels = decode(content, box)
            assert np.array_equal(pixels, np.asarray(F.crop(cast("Any", picture), *box)))
            ours = torch.from_numpy(resize(pixels, 48).copy()).permute(2, 0, 1).int()
            difference = ours - F.pil_to_tensor(F.resized_crop(cast("Any", picture), *box, [48, 48])).int()
            assert difference.abs().max() <= 2
            assert difference.abs().double().mean() < 0.2, "half a pixel apart"


def test_a_batch_is_totensor_and_normalize(drawn: Path) -> None:
    data = ImageFolder(drawn / "val", 64, training=False)
    images, labels, indices = next(iter(eval_loader(data, 5, AMP, workers=0, rank=1, world_size=3)))
    assert indices.tolist() == [1, 4, 7, 10, 13]
    assert labels.tolist() == data.labels[indices].tolist()
    to_tensor = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    )
    raw = data.__getitems__(indices.tolist()).images
    for image, pixels in zip(images, raw, strict=True):
        torch.testing.assert_close(image, to_tensor(pixels.permute(1, 2, 0).numpy()), rtol=0, atol=1e-5)


def test_images_come_in_the_precision_of_the_first_convolution(drawn: Path) -> None:
    """Rounded as autocast would round them, and so with the same result."""
    data, half = ImageFolder(drawn / "val", 64, training=False), MixedPrecision(Precision("bf16", "yes"), AMP.device)
    images, rounded = (next(iter(eval_loader(data, 5, amp, workers=0, rank=0, world_size=1)))[0] for amp in (AMP, half))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, images.to(torch.bfloat16))
    convolution = torch.nn.Conv2d(3, 4, 3)
    with half.autocast():
        assert torch.equal(convolution(rounded), convolution(images))


# ----------------------------------------------------------------------------------------------------- files


def test_a_decoded_region_is_a_part_of_the_whole(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run with a cache equals one without."""
    data = ImageFolder(drawn / "train", 64, training=True)
    for index in range(0, len(data), 5):
        content = data.file(index).read_bytes()
        (top, left, rows, columns), _ = random_crop(0, 0, index, *dimensions(content))
        whole = data.pixels(index)
        np.testing.assert_array_equal(
            decode(content, (top, left, rows, columns)), whole[top : top + rows, left : left + columns]
        )
        with monkeypatch.context() as patch:  # where nvimgcodec has no wheel
            patch.setattr(decoder, "DECODER", "simplejpeg")
            other = data.pixels(index)
        np.testing.assert_array_equal(whole, other)


def test_an_image_that_is_too_large_is_not_called_something_else() -> None:
    """Pillow opens none of more than 179 million pixels: a small file could fill the memory."""
    content = io.BytesIO()
    Image.new("1", (14_000, 13_000)).save(content, "png")
    with pytest.raises(BrokenImageError, match="it has more than 178,956,970 pixels: make it smaller"):
        dimensions(content.getvalue())


@pytest.mark.parametrize("place", [5, 7, 9])
def test_a_jpeg_without_rows_columns_or_components_is_broken(drawn: Path, place: int) -> None:
    content = bytearray(next(drawn.rglob("*.jpg")).read_bytes())
    frame = content.index(b"\xff\xc0")
    content[frame + place : frame + place + 2] = bytes(2)
    with pytest.raises(BrokenImageError, match="a JPEG without pixels"):
        dimensions(bytes(content))


@pytest.mark.usefixtures("each_decoder")
def test_every_cut_of_a_jpeg_is_noticed(drawn: Path) -> None:
    content = next((drawn / "val").rglob("*.jpg")).read_bytes()
    for length in range(0, len(content) - 1, 7):
        with pytest.raises(BrokenImageError):
            decode(content[:length], (0, 0, *dimensions(content[:length])))


def folder_with_broken(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    files = sorted((folder / "val").rglob("*.jpg"))
    files[3].write_bytes(files[3].read_bytes()[:700])
    files[3].with_name("._companion.jpg").write_bytes(b"\0\5\26\7")
    return files[3]


def mistake_of(loader: Any) -> str:
    """What a loader says; nothing here holds the error, and with it the loader, any longer."""
    try:
        list(loader)
    except UserError as error:
        return str(error)
    raise AssertionError("no mistake was found")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_ends_the_run_with_its_name_or_is_replaced(drawn: Path, tmp_path: Path, workers: int) -> None:
    broken = folder_with_broken(drawn, tmp_path / "broken")
    root = tmp_path / "broken/val"
    said = mistake_of(eval_loader(ImageFolder(root, 32, training=False), 4, AMP, workers, 0, 1))
    assert said == f"{broken} cannot be used (it is truncated): remove or replace it, or give --skip-broken"
    loader = eval_loader(ImageFolder(root, 32, training=False, skip_broken=True), 4, AMP, workers, 0, 1)
    images = torch.cat([batch[0] for batch in loader])
    assert len(images) == 23, "companions are no samples"
    torch.testing.assert_close(images[3], images[4], rtol=0, atol=0)
    assert loader.broken == {f"{broken} (it is truncated)"}


def test_the_workers_of_a_loader_that_failed_end_with_the_error(drawn: Path, tmp_path: Path) -> None:
    """At once: found by the garbage collector, a loader waits 5 s for each of them, twice, as a notebook would see."""
    folder_with_broken(drawn, tmp_path / "broken")
    before = set(active_children())
    gc.disable()
    try:
        mistake_of(eval_loader(ImageFolder(tmp_path / "broken/val", 32, training=False), 4, AMP, 2, 0, 1))
        assert set(active_children()) <= before
    finally:
        gc.enable()


LEFT_OPEN = """
import sys
import torch
from pathlib import Path
from common.images.folder import ImageFolder
from common.images.loader import eval_loader
from common.train.amp import MixedPrecision
from common.train.precision import Precision
amp = MixedPrecision(Precision(), torch.device("cpu"))
batches = iter(eval_loader(ImageFolder(Path(sys.argv[1]), 32, training=False), 4, amp, 2, 0, 1))
next(batches)
raise SystemExit(3)
"""


def test_a_loader_left_open_does_not_keep_its_process(programs: Programs, drawn: Path) -> None:
    """Its workers ignore SIGTERM, which they get from whoever stops the job, and with which Python ends children."""
    done = programs.run("-c", LEFT_OPEN, drawn / "val", code=3, limit=60)
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", r"train must be a folder with one folder of images per class"),
        ("no class", r"train must be a folder with one folder of images per class"),
        ("no image", r"train holds no image in its 2 folders \(\.jpg"),
        ("another class", r"val/zebra: the training set has no such class, it has cat, dog"),
    ],
)
def test_wrong_folders_are_named(tmp_path: Path, change: str, words: str) -> None:
    folders = {
        "missing": [],
        "no class": ["train"],
        "no image": ["train/cat", "train/dog"],
        "another class": ["train/cat", "train/dog", "val/zebra"],
    }
    for folder in folders[change]:
        (tmp_path / folder).mkdir(parents=True)
    if change == "another class":
        for folder in folders[change]:
            Image.new("RGB", (8, 8)).save(tmp_path / folder / "x.png")
    with pytest.raises(UserError, match=words):
        image_folders(tmp_path, 32, seed=0)


# --------------------------------------------------------------------------------------------- loaders and data sets


def batches(loader: Any) -> Iterator[tuple[Tensor, ...]]:
    return iter([tuple(tensor.clone() for tensor in batch) for batch in loader])


def test_a_run_on_the_cpu_leaves_the_gpus_alone(monkeypatch: pytest.MonkeyPatch, drawn: Path) -> None:
    """Entering a stream, even none, makes torch take memory of a GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("a GPU was asked"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert len(list(eval_loader(ImageFolder(drawn / "val", 32, training=False), 12, AMP, 0, 0, 1))) == 2


def test_workers_change_nothing_and_outlive_epochs(drawn: Path) -> None:
    data = ImageFolder(drawn / "train", 32, training=True, seed=1)
    found = []
    for workers in (0, 2):
        loader = train_loader(data, 24, AMP, 1, workers, 0, 2)
        found.append([])
        for epoch, start in ((0, 4), (1, 0)):
            loader.batch_sampler.set_epoch(epoch)
            loader.batch_sampler.skip(start)
            found[-1] += list(batches(loader))
    assert len(found[0]) == 2 + 6
    for alone, by_workers in zip(*found, strict=True):
        for one, other in zip(alone, by_workers, strict=True):
            assert torch.equal(one, other)


def test_synthetic_images_differ_by_class() -> None:
    data = synthetic_images(40, 30, seed=0)
    batch = data.train.__getitems__([(0, index) for index in range(40)])
    assert batch.images.shape == (40, 3, 30, 30)
    assert batch.labels.tolist() == [index % 10 for index in range(40)]
    means = batch.images.double().reshape(4, 10, -1)
    between = (means[0, 0] - means[0, 1]).abs().mean()
    within = (means[0, 0] - means[1, 0]).abs().mean()
    assert between > within
    assert data.train.labels.tolist() == batch.labels.tolist()


def test_a_dataset_without_batches_is_refused_before_the_first_step() -> None:
    with pytest.raises(UserError, match=r"^TensorDataset: give it __getitems__\(keys\), which returns a Batch "):
        train_loader(TensorDataset(torch.zeros(8, 3)), 4, AMP, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ({"nvidia", "nvidia.nvimgcodec", "simplejpeg"}, "nvimgcodec"),
        ({"nvidia", "simplejpeg"}, "simplejpeg"),  # nvidia: torch's own libraries
        ({"simplejpeg"}, "simplejpeg"),
        (set(), "Pillow"),
    ],
)
def test_the_fastest_decoder_that_is_installed_is_chosen(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], chosen: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed)
    assert decoder.fastest_decoder() == chosen


def test_labels_only_are_those_of_the_images_in_their_order(drawn: Path) -> None:
    data = ImageFolder(drawn / "train", 16, training=True)
    both = [train_loader(part, 24, AMP, 1, 0, 1, 3) for part in (data, LabelsOnly(data))]
    sizes = []
    for (images, *expected), (none, *labels) in zip(*both, strict=True):
        sizes.append(len(images))
        assert none.shape == (len(images), 3, 0, 0)
        assert all(torch.equal(one, other) for one, other in zip(expected, labels, strict=True))
    assert sizes == [8, 8, 8, 8, 8, 4], "130 images on 3 ranks"


@pytest.mark.usefixtures("alone")
def test_without_a_folder_ten_shapes_are_drawn_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = load_images(ImageArgs(image_size=24), 0, tmp_path)
    assert (len(data.train), len(data.val), len(data.classes), data.size) == (480, 160, 10, 24)
    numbers = f"(480 train, 160 val, 10 classes, 24 px, decoded by {decoder.DECODER})"
    assert str(data) == f"{tmp_path}/images/shapes-480-160-80 {numbers}"
    assert np.bincount(cast("Any", data.train).labels).tolist() == [48] * 10
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jpg")}
    again = load_images(ImageArgs(image_size=24, cache=tmp_path / "cache"), 0, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jpg")} == before
    assert again.identity == data.identity
    assert str(again).endswith(", cached)")
    assert capsys.readouterr().out.count(" decoded in ") == 2
    keys = [(1, index) for index in range(0, 480, 37)]
    assert torch.equal(again.train.__getitems__(keys).images, data.train.__getitems__(keys).images)
    with pytest.raises(UserError, match="--dummy makes images up"):
        ImageArgs(dummy=True, directory=tmp_path)


PLACES = {"centre": (0.5, 0.5), "left": (0.5, 0.05), "above": (0.25, 0.5), "corner": (0.04, 0.04), "foot": (0.96, 0.05)}
DRAWN = {
    "circle": {"centre", "left", "above"},
    "ring": {"left"},
    "square": set(PLACES),
    "frame": {"left", "corner", "foot"},
    "triangle": {"centre", "above", "foot"},
    "cross": {"centre", "corner", "foot"},
}


@pytest.mark.usefixtures("alone")
def test_shapes_are_what_they_are_called(tmp_path: Path) -> None:
    folder = drawn_images(tmp_path, train=30, val=0, size=160) / "train"
    for file in sorted(folder.rglob("*.jpg")):
        shape, bright = file.parent.name, np.asarray(Image.open(file)).max(axis=2) > 110
        rows, columns = (np.flatnonzero(bright.mean(axis=axis) > 0.03) for axis in (1, 0))
        found = bright[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        height, width = found.shape
        if shape in DRAWN:
            assert abs(height - width) <= 3
            assert (found == found[:, ::-1]).mean() > 0.9
            filled = {name for name, (y, x) in PLACES.items() if found[int(y * height), int(x * width)]}
            assert filled == DRAWN[shape], shape
        else:
            across, down = found.mean(axis=1).std(), found.mean(axis=0).std()
            assert {"stripes-across": across > 5 * down, "stripes-down": down > 5 * across}.get(shape, True)


# -------------------------------------------------------------------------------------------------------- cache


def cached(data: ImageFolder, folder: Path) -> tuple[Any, int]:
    return pixel_cache(folder, data.root, data.names, data.pixels, threads=2)


def test_the_cache_holds_the_pixels_and_is_shared(drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ImageFolder(drawn / "train", 32, training=True)
    cache, decoded = cached(data, tmp_path)
    assert decoded == 130
    for index in (0, CHUNK - 1, CHUNK, 129):
        np.testing.assert_array_equal(cache.pixels(index), data.pixels(index))
    monkeypatch.setattr(image_cache, "MOST_MAPS", 2)
    few, _ = cached(data, tmp_path)
    first = few.pixels(0)
    for index in (129, CHUNK, 0, 129, CHUNK, 0):
        np.testing.assert_array_equal(few.pixels(index), data.pixels(index))
        assert len(few._maps) <= 2
    np.testing.assert_array_equal(first, data.pixels(0))
    monkeypatch.chdir(drawn)  # the same images by another path
    again, decoded = cached(ImageFolder(Path("train"), 32, training=True), tmp_path)
    assert (again.folder, decoded) == (cache.folder, 0)
    assert sorted(path.name for path in cache.folder.iterdir()) == [f"chunk-{n:06d}.pixels" for n in range(3)]


@pytest.mark.usefixtures("alone")
def test_a_link_to_nothing_is_a_broken_image_for_the_cache_too(drawn: Path, tmp_path: Path) -> None:
    broken = folder_with_broken(drawn, tmp_path / "broken")
    broken.unlink()
    broken.symlink_to("nowhere.jpg")
    root, cache = tmp_path / "broken", tmp_path / "cache"
    with pytest.raises(UserError, match=f"^{broken} cannot be used .*: remove or replace it, or give --skip-broken$"):
        image_folders(root, 32, 0, cache=cache)
    val = image_folders(root, 32, 0, skip_broken=True, cache=cache).val
    images = val.__getitems__([3, 4]).images
    torch.testing.assert_close(images[0], images[1], rtol=0, atol=0)


def test_damage_of_the_cache_is_noticed(drawn: Path, tmp_path: Path) -> None:
    data = ImageFolder(drawn / "train", 32, training=True)
    cache, _ = cached(data, tmp_path)
    first, second, last = (cache.folder / f"chunk-{n:06d}.pixels" for n in range(3))
    content = bytearray(first.read_bytes())
    content[-1000] ^= 4  # a bit of the last image's pixels
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-1])
    content = bytearray(last.read_bytes())
    content[24] ^= 1  # where the first image lies, by the table
    last.write_bytes(content)
    again, decoded = cached(data, tmp_path)
    assert decoded == CHUNK + 2, "the file that was cut short is made anew, and that with the damaged table"
    again.pixels(0)
    with pytest.raises(UserError, match=rf"chunk-000000.pixels is damaged \(image {CHUNK - 1}\): delete it"):
        again.pixels(CHUNK - 1)
    first.write_bytes(first.read_bytes()[:20])  # in the middle of the header
    last.write_bytes(b"pixels02" + last.read_bytes()[8:])  # of another version
    assert cached(data, tmp_path)[1] == CHUNK + 2


def test_an_image_that_is_made_up_does_not_depend_on_its_batch() -> None:
    train = synthetic_images(32, 16, 0).train
    keys = [(epoch, index) for epoch in (0, 1) for index in (0, 5, 7)]
    together = train.__getitems__(keys).images
    for key, image in zip(keys, together, strict=True):
        assert torch.equal(train.__getitems__([key]).images[0], image), key
    assert len({image.numpy().tobytes() for image in together}) > 3


def test_a_cache_keeps_no_file_open(drawn: Path, tmp_path: Path) -> None:
    data = ImageFolder(drawn / "train", 32, training=True)
    cache, _ = cached(data, tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    pixels = [cache.pixels(index) for index in range(len(data))]
    assert len(pixels) == 130
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_changed_images_are_another_cache(drawn: Path, tmp_path: Path) -> None:
    shutil.copytree(drawn / "val", tmp_path / "val")
    data = ImageFolder(tmp_path / "val", 32, training=False)
    before, _ = cached(data, tmp_path / "cache")
    os.utime(data.file(7), (1, 1))
    after, decoded = cached(data, tmp_path / "cache")
    assert before.folder != after.folder
    assert decoded == 23


BUILD = """
import sys
from pathlib import Path
from common.images.cache import pixel_cache
from common.images.folder import ImageFolder
data = ImageFolder(Path(sys.argv[1]), 32, training=True)
print(pixel_cache(Path(sys.argv[2]), data.root, data.names * 8, lambda i: data.pixels(i % len(data)), 2)[1])
"""


def test_several_processes_build_it_together_and_may_be_killed(
    programs: Programs, drawn: Path, tmp_path: Path, eventually: Any
) -> None:
    killed = programs.start("-c", BUILD, drawn / "train", tmp_path)
    eventually(lambda: list(tmp_path.rglob("chunk-*")), 60, "a chunk")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    there = [int(path.name[6:12]) for path in tmp_path.rglob("chunk-*")]
    builders = [programs.start("-c", BUILD, drawn / "train", tmp_path) for _ in range(3)]
    decoded = [int(programs.finish(builder).stdout) for builder in builders]
    rest = 130 * 8 - sum(min(CHUNK, 130 * 8 - CHUNK * chunk) for chunk in there)
    assert sum(decoded) == rest, "each image is decoded once"
    assert not list(tmp_path.rglob("*.tmp")), "no half file is left"
