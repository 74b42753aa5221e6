"""Folders as users have them: hidden and empty ones, formats that are not read, other names, pixels of 16 bits."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.images.decode import BrokenImageError, decode, dimensions
from common.images.find import find_images, readable
from common.images.folder import ImageFolder, LabelsOnly
from common.images.sets import image_folders
from common.launch.errors import UserError


def picture(path: Path, level: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (level, level, level)).save(path)


def animals(folder: Path) -> Path:
    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            for file in range(3):
                picture(folder / part / name / f"{file}.png", 100 * number + file)
    return folder


@pytest.mark.usefixtures("alone")
def test_hidden_and_empty_folders_are_no_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = image_folders(animals(tmp_path), 8, seed=0)
    picture(tmp_path / "train/.ipynb_checkpoints/0-checkpoint.png")
    picture(tmp_path / "train/cat/.ipynb_checkpoints/0-checkpoint.png")
    (tmp_path / "train/aardvark").mkdir()
    (tmp_path / "train/bear/.cache").mkdir(parents=True)
    (tmp_path / "train/dog/.DS_Store").touch()
    assert capsys.readouterr().out == ""
    data = image_folders(tmp_path, 8, seed=0)
    assert (data.classes, len(data.train)) == (["cat", "dog"], 6)
    assert data.identity == plain.identity, "labels are not shifted"
    assert capsys.readouterr().out == f"{tmp_path}/train: no file in aardvark, bear: not counted as classes\n"


def test_a_class_without_an_image_that_is_read_is_refused(tmp_path: Path) -> None:
    folder = animals(tmp_path) / "train/bear"
    folder.mkdir()
    for name in ("1.HEIC", "2.heic", "3.heic", "notes.txt", "README"):
        (folder / name).touch()
    with pytest.raises(UserError) as error:
        image_folders(tmp_path, 8, seed=0)
    assert str(error.value) == (
        f"{folder} holds no image that can be read (3 .heic, 1 without an ending, 1 .txt): convert them to one of "
        f".jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp, or remove the folder"
    )


@pytest.mark.usefixtures("alone")
def test_files_that_are_passed_over_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    animals(tmp_path)
    for number in range(12):
        (tmp_path / f"val/dog/{number}.avif").touch()
    assert len(image_folders(tmp_path, 8, seed=0).val) == 6
    assert capsys.readouterr().out == f"{tmp_path}/val: 12 .avif passed over\n"


@pytest.mark.parametrize(("other", "said"), [("test", "test, train"), ("valid", "train, valid")])
def test_another_name_of_val_is_found(tmp_path: Path, other: str, said: str) -> None:
    animals(tmp_path)
    (tmp_path / "val").rename(tmp_path / other)
    with pytest.raises(UserError) as error:
        image_folders(tmp_path, 8, seed=0)
    assert str(error.value) == (
        f"{tmp_path}/val must be a folder with one folder of images per class: CLASS/*.jpg; {tmp_path} holds {said}: "
        f"rename {other} to val, or link it (ln -s {other} val)"
    )


@pytest.mark.parametrize(("count", "more"), [(5, ""), (6, " ...")])
def test_the_first_five_folders_beside_are_named(tmp_path: Path, count: int, more: str) -> None:
    for number in range(count):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(UserError) as error:
        image_folders(tmp_path, 8, seed=0)
    assert str(error.value).endswith(f"; {tmp_path} holds 0, 1, 2, 3, 4{more}")


def test_what_is_there_in_place_of_train_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"CLASS/\*\.jpg; {tmp_path}/x/train holds cat, dog$"):
        image_folders(animals(tmp_path / "x") / "train", 8, seed=0)


def test_names_of_another_encoding_can_be_written(tmp_path: Path) -> None:
    r"""As an archive leaves them that was packed on a Chinese Windows: bytes of GB 18030, shown as `\xb9`."""
    animals(tmp_path)
    for part in ("train", "val"):
        (tmp_path / part / "cat").rename(os.fsdecode(os.fsencode(tmp_path / part) + "/狗".encode("gb18030")))
    odd = os.fsdecode("公.png".encode("gb18030"))
    (tmp_path / "val/dog/0.png").rename(tmp_path / "val/dog" / odd)
    data = image_folders(tmp_path, 8, seed=0)
    assert data.class_names == ["dog", r"\xb9\xb7"]
    files = data.test_columns["file"]
    assert r"dog/\xb9\xab.png" in files
    "".join(files).encode()
    pixels = data.val.__getitems__(range(6)).images[:, 0, 0, 0].tolist()
    assert sorted(pixels) == [0, 1, 2, 100, 101, 102], "such files are read"
    escaped = files[data.val.names.index(f"dog/{odd}")]
    raw = escaped.encode("latin-1").decode("unicode_escape").encode("latin-1")
    assert raw == os.fsencode(f"dog/{odd}"), "and their names can be had back"
    assert readable("Straße/猫.jpg") == "Straße/猫.jpg"


@pytest.mark.parametrize("broken", ["dog/2.png", "cat/2.png", "cat/0.png"])
def test_a_replacement_is_of_the_same_class(tmp_path: Path, broken: str) -> None:
    """At the border of two classes, too: so a process that sees no pixels knows the label."""
    animals(tmp_path)
    (tmp_path / "train" / broken).write_bytes(b"")
    data = ImageFolder(tmp_path / "train", 8, training=False, skip_broken=True)
    loaded = data.__getitems__(range(6))
    assert loaded.labels.tolist() == LabelsOnly(data).__getitems__(range(6)).labels.tolist() == [0, 0, 0, 1, 1, 1]
    levels = loaded.images[:, 0, 0, 0]
    assert (levels // 100).tolist() == loaded.labels.tolist()
    assert levels.unique().numel() == 5
    for file in (tmp_path / "train" / broken).parent.iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match=rf"train/{broken[:3]}: no image can be read"):
        data.__getitems__(range(6))


# ----------------------------------------------------------------------------------------------------- pixels


def encoded(array: np.ndarray, kind: str) -> bytes:
    if kind == "pgm":
        height, width = array.shape
        return f"P5 {width} {height} 65535\n".encode() + array.astype(">u2").tobytes()
    content = io.BytesIO()
    if kind == "big-endian tiff":
        image = Image.frombytes("I;16B", array.shape[::-1], array.astype(">u2").tobytes())
        image.save(content, "tiff")
    else:
        Image.fromarray(array).save(content, kind)
    return content.getvalue()


@pytest.mark.parametrize("kind", ["png", "tiff", "big-endian tiff", "pgm"])
def test_grey_of_16_bits_is_scaled_by_its_range(kind: str) -> None:
    """The reference is arithmetic, not Pillow, which makes everything above 255 white."""
    array = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    content = encoded(array, kind)
    found = decode(content, (0, 0, *dimensions(content)))
    expected = np.rint(array / 65535 * 255).astype(np.uint8)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, np.stack([expected] * 3, axis=2))
    np.testing.assert_array_equal(decode(content, (3, 5, 10, 20)), found[3:13, 5:25])


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_unknown_range_are_refused(tmp_path: Path, dtype: type) -> None:
    content = encoded(np.linspace(0, 1e6, 64).reshape(8, 8).astype(dtype), "tiff")
    with pytest.raises(BrokenImageError, match="its pixels have 32 bits, of unknown range: convert it to 8 or 16"):
        decode(content, (0, 0, 8, 8))
    folder = animals(tmp_path) / "train/cat"
    (folder / "9.tif").write_bytes(content)
    with pytest.raises(UserError, match=rf"{folder}/9\.tif cannot be used \(its pixels have 32 bits"):
        ImageFolder(tmp_path / "train", 8, training=False).__getitems__(range(7))


def test_the_order_is_torchvisions(tmp_path: Path) -> None:
    """Or a run of an earlier version could not be resumed. Links to folders are followed, as there."""
    from torchvision.datasets import ImageFolder as Reference

    root = tmp_path / "root"
    for name in ("b/10.png", "b/9.png", "b/a/0.png", "b/a-b/1.png", "b/Z.PNG", "a/x.jpg", "a.b/1.png"):
        picture(root / name)
    picture(tmp_path / "elsewhere/2.png")
    (root / "b/linked").symlink_to(tmp_path / "elsewhere")
    reference = Reference(str(root))
    found = find_images(root)
    assert found.classes == reference.classes
    assert [(str(root / os.fsdecode(file)), label) for file, label in zip(found.files, found.labels, strict=True)] == (
        reference.samples
    )


@pytest.mark.usefixtures("alone")
def test_an_empty_folder_whose_name_is_not_utf_8_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under most locales, standard output takes no other bytes."""
    (animals(tmp_path) / "train" / os.fsdecode("狗".encode("gb18030"))).mkdir()
    (tmp_path / "val/dog" / os.fsdecode(b"odd.\xb9")).touch()
    image_folders(tmp_path, 8, seed=0)
    said = capsys.readouterr().out
    assert said.encode("utf-8", "strict").decode() == (
        f"{tmp_path}/train: no file in \\xb9\\xb7: not counted as classes\n{tmp_path}/val: 1 .\\xb9 passed over\n"
    )


@pytest.mark.parametrize("where", ["train", "train/dog", "train/dog/below"])
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """And is not taken for an empty one. The superuser, as which tests may run, can read all."""
    picture(animals(tmp_path) / "train/dog/below/3.png")
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if Path(path) == tmp_path / where:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError) as error:
        image_folders(tmp_path, 8, seed=0)
    assert str(error.value) == f"{tmp_path / where} cannot be read (Permission denied)"
