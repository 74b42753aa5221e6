"""Folders of images as people have them, repeatable crops, and loaders."""

import os
import shutil
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.utils.data import DistributedSampler
from torchvision import datasets, transforms
from torchvision.transforms import v2

from common import images
from common.image_folder import ImageFolder, center_crop, decode
from common.images import ResumableSampler, image_loaders, normalize
from common.launch import UserError
from tests import ranks

DATA = os.environ.get("DDP_TEST_DATA", Path(__file__).parents[3] / "shared/data")
CPU = torch.device("cpu")

# torchvision 0.29 deprecates its decoders.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def picture(path: Path, level: int = 0, size: tuple[int, int] = (8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, level, level)).save(path)
    return path


def noise(path: Path, seed: int, size: tuple[int, int] = (50, 40)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Three images of cats and of dogs in train and in val; their gray level is a number."""
    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            for file in range(3):
                picture(tmp_path / part / name / f"{file}.png", 100 * number + file)
    return tmp_path


def listed(folder: Path) -> list[str]:
    return [str(Path(path).relative_to(folder)) for path, _ in ImageFolder(folder, 8).samples]


# --------------------------------------------------------------------------------------- folders


def test_order_is_that_of_torchvision(tmp_path: Path) -> None:
    root = tmp_path / "root"
    names = ("b/10.png", "b/9.png", "b/a/0.png", "b/c/1.png", "b/Z.PNG", "a/x.jpg", "a.b/1.webp")
    for name in names:
        picture(root / name)
    picture(tmp_path / "elsewhere/2.png")
    (root / "b/linked").symlink_to(tmp_path / "elsewhere")
    expected = datasets.ImageFolder(str(root))
    found = ImageFolder(root, 8)
    assert (found.samples, found.classes) == (expected.samples, expected.classes)
    assert found.targets == expected.targets


def test_hidden_names_are_no_classes_and_no_images(animals: Path) -> None:
    before = listed(animals / "train")
    hidden = (".ipynb_checkpoints", "@eaDir", "#recycle", "__MACOSX", "System Volume Information")
    for name in hidden:
        picture(animals / "train" / name / "0.png")
        picture(animals / "train/dog" / name / "0.png")
    picture(animals / "train/cat/._0.png")
    (animals / "train/notes.txt").touch()
    (animals / "train/dog/notes.txt").touch()
    assert listed(animals / "train") == before


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("train/cat/cat", "."),  # `ln -s` run twice
        ("train/cat/up", ".."),
        ("train/cat/top", "../.."),
        ("train/cat/other", "../dog"),
        ("train/dog/other", "../cat"),
        ("train/kitten", "cat"),
        ("train/aardvark", "cat"),
        ("train/cat/4.png", "0.png"),
        ("train/cat/4.png", "../dog/0.png"),
        ("train/dog/4.png", "../cat/0.png"),
        ("train/cat/4.png", "../dog/more/0.png"),
        ("train/dog/4.png", "../cat/more/0.png"),
    ],
)
def test_links_that_repeat_images_are_refused(animals: Path, link: str, target: str) -> None:
    for name in ("cat", "dog"):
        picture(animals / "train" / name / "more/0.png")
    assert len(listed(animals / "train")) == 8
    (animals / link).symlink_to(target)
    with pytest.raises(UserError, match=str(animals / link)):
        ImageFolder(animals / "train", 8)


def test_links_to_other_places_are_followed(animals: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name in ("eel", "fox", "more/0.png"):
        picture(store / name / "0.png" if "/" not in name else store / name)
    (animals / "train/eel").symlink_to(store / "eel")
    (animals / "train/fox").mkdir()
    (animals / "train/fox/1.png").symlink_to(store / "fox/0.png")
    (animals / "train/fox/more").symlink_to(store / "more")
    assert listed(animals / "train")[6:] == ["eel/0.png", "fox/1.png", "fox/more/0.png"]


def test_names_that_begin_like_hidden_ones_are_data(animals: Path) -> None:
    names = ["#recycled", "@eaDirs", "$", "__MACOSX2"]
    for name in names:
        picture(animals / "train" / name / f"{name}.png")
    assert ImageFolder(animals / "train", 8).classes == sorted([*names, "cat", "dog"])
    assert len(listed(animals / "train")) == 10


@pytest.mark.parametrize("name", ["train/eel", "val/dog/0.png"])
def test_link_to_what_is_missing_is_named(animals: Path, name: str) -> None:
    """Of a disk that is not mounted; torchvision would train without the class."""
    (animals / name).unlink(missing_ok=True)
    (animals / name).symlink_to("/no/such/disk")
    with pytest.raises(UserError, match=name):
        ImageFolder(animals / Path(name).parts[0], 8)[3]


def test_unicode_forms_of_a_name_are_one_class(animals: Path) -> None:
    names = [unicodedata.normalize(form, "écu") for form in ("NFC", "NFD")]  # after and before fox
    for part, name in zip(("train", "val"), names, strict=True):
        picture(animals / part / name / "0.png")
        picture(animals / part / "fox/0.png")
    train = ImageFolder(animals / "train", 8)
    val = ImageFolder(animals / "val", 8, classes=train.classes)
    assert val.classes == ["cat", "dog", "fox", names[0]]
    assert val.targets == [0, 0, 0, 1, 1, 1, 2, 3]
    picture(animals / "train" / names[1] / "0.png")
    with pytest.raises(UserError, match="two Unicode forms"):
        ImageFolder(animals / "train", 8)


def test_names_that_are_not_utf8_can_be_written(animals: Path) -> None:
    name = os.fsdecode("狗".encode("gb18030"))
    picture(animals / "train" / name / "0.png", level=7)
    folder = ImageFolder(animals / "train", 8)
    assert folder.classes[0] == r"\xb9\xb7"
    assert folder[0][0].unique().tolist() == [7]
    "".join(folder.classes).encode()


def test_labels_of_val_are_those_of_train(animals: Path) -> None:
    shutil.rmtree(animals / "val/cat")
    train = ImageFolder(animals / "train", 8)
    val = ImageFolder(animals / "val", 8, classes=train.classes)
    assert (val.targets, val.classes) == ([1, 1, 1], ["cat", "dog"])
    picture(animals / "val/Dog/0.png")
    with pytest.raises(UserError, match="val/Dog is not a class of the training set"):
        ImageFolder(animals / "val", 8, classes=train.classes)


@pytest.mark.parametrize("content", [[], ["1.HEIC", "notes.txt"]])
def test_class_without_images_is_refused(animals: Path, content: list[str]) -> None:
    (animals / "train/bear").mkdir()
    for name in content:
        (animals / "train/bear" / name).touch()
    with pytest.raises(UserError, match="train/bear has no images"):
        ImageFolder(animals / "train", 8)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("valid", "valid: No such file or directory; expected a folder"),
        ("train/cat", "train/cat has no class folders"),
    ],
)
def test_wrong_folder_is_named(animals: Path, folder: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ImageFolder(animals / folder, 8)


# ---------------------------------------------------------------------------------------- pixels


def odd(folder: str) -> list[Path]:
    """Return files of the real data; without them, the tests name the folder that is missing."""
    root = Path(DATA) / "imagenet_odd" / folder
    return sorted(root.glob("*")) or [root]


@pytest.mark.data
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of damaged EXIF data
@pytest.mark.parametrize("path", [*odd("real"), *odd("made_ok")], ids=lambda path: path.name)
def test_odd_files_have_the_pixels_of_pillow(path: Path) -> None:
    with Image.open(path) as image:
        expected = np.asarray(image if image.mode.startswith("I") else image.convert("RGB"))
    if expected.dtype == np.uint16:  # Pillow would cut off what is above 255
        expected = np.repeat((expected >> 8)[..., None], 3, axis=2)
    found = decode(path)
    assert found.dtype == torch.uint8
    np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), expected)


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (6, 5), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "1.gif", save_all=True, append_images=frames[1:])
    assert decode(tmp_path / "1.gif").flatten(1).unique(dim=1).tolist() == [[255], [0], [0]]


@pytest.mark.parametrize("extra", [b"\0\1\2", b"\xff\xff\xff"], ids=["bytes", "padding"])
def test_bytes_between_the_segments_of_a_jpeg(extra: bytes, tmp_path: Path) -> None:
    noise(tmp_path / "1.jpg", 0)
    content = (tmp_path / "1.jpg").read_bytes()
    start = content.index(b"\xff\xdb")  # of the quantization table
    (tmp_path / "2.jpg").write_bytes(content[:start] + extra + content[start:])
    with Image.open(tmp_path / "2.jpg") as image:
        expected = np.asarray(image)
    np.testing.assert_array_equal(decode(tmp_path / "2.jpg").permute(1, 2, 0).numpy(), expected)


BROKEN = [path for path in odd("made_broken") if path.name != "corrupt_scan.jpeg"]


@pytest.mark.data
@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.name)
def test_damaged_files_are_named(path: Path) -> None:
    with pytest.raises(UserError, match=f"cannot decode .*/{path.name}: .+") as error:
        decode(path)
    assert len(str(error.value).splitlines()) == 1


def test_other_reasons_are_named(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "2.tif")
    for name, reason in {"1.jpg": "git-lfs", "2.tif": "8 bits", "3.jpg": "No such file"}.items():
        with pytest.raises(UserError, match=f"{name}: .*{reason}"):
            decode(tmp_path / name)


def test_normalize_is_torchvisions(tmp_path: Path) -> None:
    noise(tmp_path / "1.png", 0)
    to_tensor = [
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    with Image.open(tmp_path / "1.png") as image:
        expected = transforms.Compose(to_tensor)(image)[None]
    pixels = decode(tmp_path / "1.png")[None]
    found = normalize(pixels, CPU, torch.channels_last)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert pixels.dtype == torch.uint8


def test_evaluation_crops_the_center(tmp_path: Path) -> None:
    noise(tmp_path / "a/1.png", 0, (90, 60))
    pixels = decode(tmp_path / "a/1.png")
    expected = v2.functional.center_crop(v2.functional.resize(pixels, [37]), [32, 32])
    torch.testing.assert_close(ImageFolder(tmp_path, 32)[0][0], expected, rtol=0, atol=0)
    assert center_crop(224)(torch.zeros(3, 300, 500, dtype=torch.uint8)).shape == (3, 224, 224)
    assert center_crop(224).transforms[0].size == [256]


def test_crops_are_those_of_torchvision(tmp_path: Path) -> None:
    """A crop is RandomResizedCrop and RandomHorizontalFlip under a seed of its own."""
    noise(tmp_path / "a/1.png", 0)
    folder, pixels = ImageFolder(tmp_path, 24, seed=3), decode(tmp_path / "a/1.png")
    usual = v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip()])
    before = torch.get_rng_state()
    for epoch in range(5):
        found = folder[epoch, 0][0]
        assert torch.equal(torch.get_rng_state(), before), "the generator of the model is untouched"
        with torch.random.fork_rng():
            torch.manual_seed(hash((3, epoch, 0)))
            torch.testing.assert_close(found, usual(pixels), rtol=0, atol=0)


def test_crops_differ(tmp_path: Path) -> None:
    noise(tmp_path / "a/1.png", 0)
    shutil.copy(tmp_path / "a/1.png", tmp_path / "a/2.png")
    folders = [ImageFolder(tmp_path, 24, seed) for seed in (0, 1, -1)]
    keys = [(epoch, index) for epoch in range(3) for index in range(2)]
    crops = {folder[key][0].numpy().tobytes() for folder in folders for key in keys}
    assert len(crops) == 18


# --------------------------------------------------------------------------------------- loaders


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: Any) -> Any:
        return index


@pytest.mark.parametrize("drop_last", [False, True])
def test_sampler_is_distributed_sampler_that_skips(drop_last: bool) -> None:
    for rank in range(3):
        samplers = [
            cls(Numbers(), 3, rank, seed=5, drop_last=drop_last)
            for cls in (ResumableSampler, DistributedSampler)
        ]
        for epoch in (0, 4):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            ours, torchs = samplers
            expected = [(epoch, index) for index in torchs]
            assert list(ours) == expected
            ours.skip = 5
            assert list(ours) == expected[5:]
            assert len(ours) == len(torchs)
            assert list(ours) == expected, "only one iteration skips"


def batches(
    folder: Path, workers: int, rank: int = 0, replicas: int = 1, skip: int = 0
) -> list[Tensor]:
    train, test = image_loaders(folder, 4 // replicas, 16, 3, workers, rank=rank, replicas=replicas)
    found = []
    for epoch in range(2):
        train.sampler.set_epoch(epoch)
        train.sampler.skip = skip
        found += [torch.cat([images.flatten(1), labels[:, None]], 1) for images, labels in train]
    return [*found, *(images.flatten(1) for images, _ in test)]


@pytest.mark.usefixtures("alone")
def test_batches_do_not_depend_on_workers_ranks_or_interruptions(tmp_path: Path) -> None:
    """The epoch reaches persistent workers, which never see `set_epoch`."""
    for number in range(16):
        part, label = "train" if number < 9 else "val", "ab"[number % 2]
        noise(tmp_path / part / label / f"{number}.png", number)
    whole = batches(tmp_path, 0)
    assert [len(batch) for batch in whole] == [4, 4, 4, 4, 4, 3]
    assert not torch.equal(torch.cat(whole[:2]), torch.cat(whole[2:4]))
    centers = [image.flatten() for image, _ in ImageFolder(tmp_path / "val", 16)]
    torch.testing.assert_close(torch.cat(whole[4:]), torch.stack(centers), rtol=0, atol=0)
    for first, second in zip(whole, batches(tmp_path, 2), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    halves = [batches(tmp_path, 0, rank, 2) for rank in (0, 1)]
    for index, expected in enumerate(whole):
        both = torch.stack([half[index] for half in halves], 1).flatten(0, 1)  # 0, 1, 0, 1, ...
        torch.testing.assert_close(both[: len(expected)], expected, rtol=0, atol=0)
    rest = [whole[1], whole[3], *whole[4:]]
    for first, second in zip(rest, batches(tmp_path, 2, skip=4), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("cores", "threads", "workers"), [(6, 1, 2), (2, 2, 1), (1, 1, 0)])
def test_workers_by_default(
    cores: int, threads: int, workers: int, animals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun may bind a rank to its own cores, as many as its threads."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(images, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    train, _ = image_loaders(animals, 2, 16, 0, -1)
    assert train.num_workers == workers


@pytest.mark.usefixtures("alone")
def test_loaders_leave_the_generator_of_the_model_alone(animals: Path) -> None:
    before = torch.get_rng_state()
    batches(animals, 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("alone")
def test_damaged_file_reaches_the_rank_through_a_worker(animals: Path) -> None:
    (animals / "train/dog/2.png").write_bytes(b"")
    with pytest.raises(UserError) as error:
        batches(animals, 2)
    assert (
        f"UserError: cannot decode {animals}/train/dog/2.png: " in str(error.value).splitlines()[-1]
    )


@pytest.mark.usefixtures("alone")
def test_classes_without_test_images_are_named(
    animals: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.rmtree(animals / "val/cat")
    image_loaders(animals, 2, 8, 0, 0)
    assert capsys.readouterr().out == f"{animals}/val has no test images for 1 class(es): cat\n"


@pytest.mark.usefixtures("alone")
def test_one_class_folder_is_refused(animals: Path) -> None:
    """A folder above the classes, for example; all predictions would be right."""
    (animals / "nested").mkdir()
    for part in ("train", "val"):
        shutil.move(animals / part, animals / "nested" / part / "all")
    with pytest.raises(UserError, match="train has only one class folder"):
        image_loaders(animals / "nested", 2, 8, 0, 0)


def different_files(folder: Path) -> str:
    """Return the error of a rank whose node has one file under another name."""
    own = folder / str(dist.get_rank())
    shutil.copytree(folder / "images", own)
    if dist.get_rank() == 1:
        (own / "val/cat/0.png").rename(own / "val/cat/00.png")
    try:
        image_loaders(own, 2, 8, 0, 0)
    except UserError as error:
        return str(error)
    return ""


def test_nodes_with_different_files_are_refused(animals: Path, tmp_path: Path) -> None:
    shutil.copytree(animals, tmp_path / "jobs/images", ignore=lambda *_: ["jobs"])
    errors = ranks.call(different_files, tmp_path / "jobs", folder=tmp_path / "log", ranks=2)
    assert ["differs between nodes" in error for error in errors] == [True, True]


def test_digits_are_enlarged() -> None:
    train, test = image_loaders(None, 7, 32, 0, 0, rank=0, replicas=1)
    assert (len(train.dataset), len(test.dataset)) == (1437, 360)
    assert test.dataset.classes == [str(digit) for digit in range(10)]
    from sklearn.datasets import load_digits

    digits, labels = load_digits(return_X_y=True)
    pixels, label = test.dataset[1]
    assert label == labels[5]
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, 32, 32))
    small = v2.functional.resize(pixels.float(), [8, 8])[1]
    assert np.corrcoef(small.flatten(), digits[5])[0, 1] > 0.95
    images, _ = next(iter(train))
    assert (images.max(), images.min()) == (255, 0)


def test_dummy_images_need_no_files() -> None:
    train, test = image_loaders(None, 8, 16, 0, 0, rank=1, replicas=2, dummy=True)
    assert (len(train), len(train.dataset), len(test.dataset)) == (100, 1600, 160)
    pixels, labels = next(iter(train))
    assert pixels.shape == (8, 3, 16, 16)
    assert pixels.float().std() > 60
    assert int(labels.max()) < len(train.dataset.classes) == 1000
