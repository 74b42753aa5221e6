"""tools.predict and tools.resize_images: one row, or one file, per image; nothing is lost."""

import csv
import io
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import models
from torchvision.transforms import v2

from common.checkpoint import save_weights
from common.data import DigitNet, image_data
from common.image_folder import ImageFolder, decode
from common.images import normalize
from common.launch import UserError
from tests import programs
from tools import predict, resize_images

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
NAMES = ["cat", 'a "dog", brown', "=eel"]


def noise(path: Path, seed: int, size: tuple[int, int] = (50, 40)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def network() -> nn.Module:
    """A model whose BatchNorm has statistics; otherwise its outputs would hardly differ."""
    torch.manual_seed(0)
    model = models.shufflenet_v2_x0_5(num_classes=3)
    for _ in range(20):
        model(torch.randn(8, 3, 32, 32))
    return model.eval()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights as imagenet_ddp writes them."""
    about = {"model": "shufflenet_v2_x0_5", "classes": NAMES, "size": 32, "options": {}}
    save_weights(tmp_path / "best.safetensors", network().state_dict(), about)
    return tmp_path / "best.safetensors"


def rows(capsys: pytest.CaptureFixture) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out, newline="")))


def test_rows_are_the_files(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "images"
    names = ["1.png", 'a,"b".png', "c\rd.png", "sub/狗.png", "sub/e\nf.png", "z.bmp"]
    for seed, name in enumerate(names):
        noise(folder / name, seed)
    noise(folder / os.fsdecode(b"\xb9.png"), 9)
    (folder / "broken.jpg").write_bytes(b"")
    (folder / "notes.txt").touch()
    noise(folder / ".hidden.png", 9)
    predict.main(folder, weights, batch_size=4)
    captured = capsys.readouterr()
    table = list(csv.DictReader(io.StringIO(captured.out, newline="")))
    (tmp_path / "table.csv").write_text(captured.out, newline="")
    assert len(pd.read_csv(tmp_path / "table.csv")) == len(table) == 8
    expected = {str(folder / name) for name in [*names, "broken.jpg", r"\xb9.png"]}
    assert {row["file"] for row in table} == expected
    empty = [row["file"] for row in table if not row["prediction"]]
    assert empty == [str(folder / "broken.jpg")]
    assert captured.err.count("warning: cannot decode") == 1
    assert {row["prediction"] for row in table if row["prediction"]} <= set(NAMES)


def test_predictions_are_those_of_the_evaluation(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for seed in range(7):
        noise(tmp_path / "root/a" / f"{seed}.png", seed)
    folder = ImageFolder(tmp_path / "root", 32)
    pixels = torch.stack([folder[index][0] for index in range(7)])
    with torch.no_grad():
        best = network()(normalize(pixels, torch.device("cpu"))).softmax(1).max(1)
    predict.main(tmp_path / "root", weights, batch_size=4)
    table = rows(capsys)
    assert [row["prediction"] for row in table] == [NAMES[label] for label in best.indices]
    chances = [float(row["probability"]) for row in table]
    assert chances == pytest.approx(best.values.tolist(), abs=6e-5)
    predict.main(Path(folder.samples[2][0]), weights)
    assert rows(capsys) == [table[2]]


def test_gray_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A digit, saved as a picture, is classified like the digit of the data set."""
    data = image_data("digits", tmp_path)
    torch.manual_seed(0)
    model = DigitNet(8, 10)
    save_weights(tmp_path / "best.safetensors", model.state_dict(), data.about)
    images = data.test.tensors[0][:20]
    for index, image in enumerate(images):
        gray = (255 * (image[0] * data.std + data.mean)).round().byte().numpy()
        Image.fromarray(gray).save(tmp_path / f"{index:02}.png")
    predict.main(tmp_path, tmp_path / "best.safetensors")
    with torch.no_grad():
        best = model(images).softmax(1).max(1)
    table = rows(capsys)
    assert [row["prediction"] for row in table] == [str(label) for label in best.indices.tolist()]
    chances = [float(row["probability"]) for row in table]
    assert chances == pytest.approx(best.values.tolist(), abs=2e-3)


@pytest.mark.parametrize(
    ("about", "arch"),
    [({"norm": "group"}, "resnet18"), ({"options": {"image_size": 64}}, "vit_b_32")],
)
def test_model_is_built_from_the_metadata(about: dict, arch: str) -> None:
    with torch.device("meta"):
        names = predict.build({"model": arch, "classes": NAMES, "size": 64, **about}).state_dict()
    assert "bn1.running_mean" not in names
    if arch == "vit_b_32":
        assert names["encoder.pos_embedding"].shape[1] == 5  # 64 / 32 squared, and one


def test_weights_without_metadata_are_refused(tmp_path: Path) -> None:
    torch.save(models.shufflenet_v2_x0_5().state_dict(), tmp_path / "weights.pth")
    noise(tmp_path / "1.png", 0)
    with pytest.raises(UserError, match="contains no model name"):
        predict.main(tmp_path / "1.png", tmp_path / "weights.pth")


def test_a_path_that_does_not_exist(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        predict.main(tmp_path / "nowhere", weights)
    with pytest.raises(UserError, match="nowhere is not a folder"):
        resize_images.main(tmp_path / "nowhere", tmp_path / "target", 30)


def test_links_that_repeat_images_are_one_line(tmp_path: Path) -> None:
    noise(tmp_path / "cat/1.png", 0)
    (tmp_path / "cat/cat").symlink_to(".")
    for program, word in (("predict", "--weights=x"), ("resize_images", tmp_path / "target")):
        done = programs.run(*programs.PYTHON, f"tools.{program}", tmp_path, word)
        assert (done.code, done.stdout) == (2, "")
        assert done.stderr == f"error: {tmp_path}/cat/cat duplicates images of {tmp_path}/cat; " + (
            "remove the link\n"
        )


def test_folder_is_shrunk_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    noise(source / "train/cat/1.jpg", 1, (90, 60))
    noise(source / "train/cat/1.png", 2, (60, 120))
    small = noise(source / "train/狗/small.jpg", 3, (20, 500))
    (source / "train/cat/notes.txt").touch()
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            resize_images.main(source, target, 30)
        assert "3 images in" in (said := capsys.readouterr().out)
        assert "0 damaged images and 1 other files" in said
    found = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    assert found == ["train/cat/1.jpg", "train/cat/1.png", "train/狗/small.jpg"]
    assert (target / "train/狗/small.jpg").read_bytes() == small.read_bytes()
    assert [decode(target / name).shape for name in found[:2]] == [(3, 30, 45), (3, 60, 30)]
    expected = v2.functional.resize(decode(source / found[1]), [30])
    assert torch.equal(decode(target / found[1]), expected)
    assert ImageFolder(target / "train", 8).classes == ["cat", "狗"]


def test_existing_files_remain_and_damaged_ones_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for number in range(3):
        noise(source / "cat" / f"{number}.jpg", number, (90, 60))
    (source / "cat/1.jpg").write_bytes(b"broken")
    (target / "cat").mkdir(parents=True)
    (target / "cat/0.jpg").write_text("of the user")
    with pytest.raises(SystemExit, match="2"):
        resize_images.main(source, target, 30)
    captured = capfd.readouterr()
    assert f"warning: cannot decode {source}/cat/1.jpg" in captured.err
    assert "2 images in" in captured.out
    assert (target / "cat/0.jpg").read_text() == "of the user"
    assert sorted(path.name for path in (target / "cat").iterdir()) == ["0.jpg", "2.jpg"]
