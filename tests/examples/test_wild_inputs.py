"""Folders as users have them, through whole programs: names of another encoding, broken files, what a run leaves."""

import csv
import json
import os
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from tests.conftest import Programs
from tests.make_data import draw_folder
from tests.runs import NO_GPU, SMALL_RESNET, losses, predictions, result, tiny_imagenet

ODD = os.fsdecode("公.jpg".encode("gb18030"))
IMAGENET = ("-m", "examples.imagenet_ddp", "-b", 12, "--image-size", 32, "--lr", 0.05, "--precision", "fp32")
PIPELINE = (
    *("-m", "examples.resnet_pipeline", "-a", "resnet18", "--image-size", 32, "-b", 8, "-m", 2),
    *("--norm", "group", "--balance", "even", "--precision", "fp32", "--threads", 1),
)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_imagenet(tmp_path_factory.mktemp("code"), SMALL_RESNET)


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes; a name of another encoding, a broken file at the end of a class, and others that are no images."""
    folder = tmp_path_factory.mktemp("wild")
    draw_folder(folder, train=40, val=13, size=40)
    first = sorted((folder / "val").iterdir())[0]
    min(first.iterdir()).rename(first / ODD)
    last = max(sorted((folder / "train").iterdir())[0].iterdir())
    last.write_bytes(last.read_bytes()[:500])
    for part in ("train", "val"):
        (folder / part / ".ipynb_checkpoints").mkdir()
        (folder / part / "empty").mkdir()
        (folder / part / first.name / "clip.mp4").touch()
    return folder


@pytest.fixture(scope="module")
def trained(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory, code: Path, wild: Path) -> Path:
    out = tmp_path_factory.mktemp("trained")
    done = shared_programs.run(
        *IMAGENET, "--epochs", 3, "--nproc", 2, "--skip-broken", "--cache", out / "cache", "--out", out, wild, cwd=code
    )
    assert f"{wild}/train: 1 .mp4 passed over, no file in empty: not counted as classes\n" in done.stdout
    assert "40 images, 40 decoded in " in done.stdout
    assert done.stdout.count(" s by 2 rank(s)\n") == 2, "the cache was built by both"
    assert done.stderr.count("warning: skipped image") == 1
    return out


def test_names_of_another_encoding_reach_the_table_of_predictions(trained: Path, wild: Path) -> None:
    head, *rows = predictions(trained)
    assert head == ["index", "label", "prediction", "label_name", "prediction_name", "file"]
    names = sorted(path.name for path in (wild / "val").iterdir() if any(path.glob("*.jpg")))
    assert result(trained)["class_names"] == names
    assert all(row[3:5] == [names[int(row[1])], names[int(row[2])]] for row in rows)
    assert rows[-1][5].startswith(names[-1])
    assert [row[5] for row in rows if "\\" in row[5]] == [rf"{names[0]}/\xb9\xab.jpg"]
    with safe_open(trained / "best.safetensors", "pt") as weights:
        about = weights.metadata()
    assert json.loads(about["class_names"]) == names
    assert json.loads(about["arguments"])["arch"] == "resnet18"


def test_predict_says_of_files_what_the_best_model_says(
    programs: Programs, trained: Path, wild: Path, code: Path, tmp_path: Path
) -> None:
    """Of the test set, the rows of predictions.csv, by one process and by two; a broken file has a row of its own."""
    words = ("-m", "examples.imagenet_ddp.predict", "--weights", trained / "best.safetensors")
    broken = wild / "val" / "broken.png"
    broken.write_bytes(b"no image")
    outs = []
    try:
        for nproc in (1, 2):
            outs.append(tmp_path / f"{nproc}.csv")
            done = programs.run(*words, "--nproc", nproc, wild / "val", "--out", outs[-1], cwd=code)
            assert f"warning: {broken} cannot be used (it is not an image)\n" in done.stderr
            assert done.stdout.endswith(f"14 images: {outs[-1]}\n")
        done = programs.run(*words, broken, cwd=code, code=2)
        assert done.stderr.replace(NO_GPU, "") == f"error: {broken} cannot be used (it is not an image)\n"
    finally:
        broken.unlink()
    assert outs[0].read_text() == outs[1].read_text()
    rows = {row["file"]: row for row in csv.DictReader(outs[0].read_text().splitlines())}
    assert rows.pop("broken.png") == {"file": "broken.png", "class": "", "probability": ""}
    expected = {row[5]: row[4] for row in predictions(trained)[1:]}
    assert {file: row["class"] for file, row in rows.items()} == expected
    file = next(name for name in rows if "\\" not in name)
    done = programs.run(*words, wild / "val" / file, cwd=code)
    assert done.stdout == f"{rows[file]['class']} {rows[file]['probability']}  {wild}/val/{file}\n"


def test_wrong_weights_are_refused(programs: Programs, trained: Path, wild: Path, code: Path, tmp_path: Path) -> None:
    mnist = ("-m", "examples.mnist_ddp_spawn.predict", wild)
    done = programs.run(*mnist, "--weights", trained / "best.safetensors", code=2)
    assert "best.safetensors is of imagenet_ddp: give best.safetensors of mnist_ddp_spawn\n" in done.stderr
    done = programs.run(*mnist, cwd=tmp_path, env={"PYTHONPATH": str(code)}, code=2)
    assert "error: --weights runs/mnist_ddp_spawn/best.safetensors cannot be read" in done.stderr


@pytest.mark.parametrize("program", ["mnist_ddp_spawn", "mnist_dataparallel", "manual_allreduce_sgd"])
def test_digits_are_named(programs: Programs, tmp_path: Path, program: str) -> None:
    """Files with the pixels of the test set get its predictions."""
    from common.data.idx import digits

    programs.run("-m", f"examples.{program}", "--epochs", 2, "--precision", "fp32", "--out", tmp_path / "out")
    pixels = digits().test.pixels
    (tmp_path / "images").mkdir()
    for number in range(0, 300, 10):
        Image.fromarray(pixels[number, 0].numpy()).save(tmp_path / "images" / f"{number:03}.png")
    weights = tmp_path / "out" / "best.safetensors"
    words = ("-m", f"examples.{program}.predict", tmp_path / "images", "--out", tmp_path / "found.csv")
    programs.run(*words, "--weights", weights)
    found = [row["class"] for row in csv.DictReader((tmp_path / "found.csv").read_text().splitlines())]
    assert found == [row[4] for row in predictions(tmp_path / "out")[1:301:10]]
    assert len(set(found)) > 5


def test_a_pipeline_replaces_broken_images(programs: Programs, tmp_path: Path, code: Path, wild: Path) -> None:
    """By those of the same class, so that the last stage, which reads labels alone, knows them: as un-split."""
    outs = [tmp_path / str(nproc) for nproc in (1, 2)]
    run = (*PIPELINE, "--epochs", 2, "--dataset", wild)
    done = programs.run(*run, "--nproc", 2, "--out", tmp_path / "no", cwd=code, code=2)
    assert "): remove or replace it, or give --skip-broken\n" in done.stderr
    for nproc, out in enumerate(outs, 1):
        done = programs.run(*run, "--skip-broken", "--nproc", nproc, "--out", out, cwd=code)
        assert done.stderr.count("warning: skipped image") == 1
        assert result(out)["skipped_images"] == 1
    assert result(outs[0])["parameter_hash"] == result(outs[1])["parameter_hash"]
    words = ("-m", "examples.resnet_pipeline.predict", "--weights", outs[1] / "best.safetensors")
    programs.run(*words, wild / "val", "--out", tmp_path / "found.csv", cwd=code)
    found = [row["class"] for row in csv.DictReader((tmp_path / "found.csv").read_text().splitlines())]
    assert found == [row[4] for row in predictions(outs[1])[1:]]


def test_training_goes_on_from_ones_own_weights(
    programs: Programs, trained: Path, wild: Path, code: Path, tmp_path: Path
) -> None:
    run = (*IMAGENET, "--nproc", 2, "--skip-broken", wild)
    done = programs.run(*run, "--epochs", 6, "--resume", "auto", "--out", trained, cwd=code, code=2)
    assert "was made with epochs = 3, this run has 6: " in done.stderr
    assert done.stderr.endswith("(to train longer: from these weights, by --init)\n")
    best = trained / "best.safetensors"
    more = ("--init", best, "--lr", 1e-6, "--epochs", 1, "--out", tmp_path)
    done = programs.run(*run, *more, cwd=code)
    assert f"weights of {best} loaded\n" in done.stdout
    before, after = load_file(best), load_file(tmp_path / "best.safetensors")
    assert all((before[name] - after[name]).abs().max() < 1e-3 for name in before)
    assert losses(tmp_path)[0] < losses(trained)[0]
    assert result(tmp_path)["metrics"]["accuracy"] == pytest.approx(
        result(trained)["metrics"]["best_accuracy"], abs=0.1
    )
