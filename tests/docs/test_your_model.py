"""The page 'Your own model': the example is copied and changed as the page says, trains, and is still exact."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, Programs
from tests.docs.markdown import shell_blocks
from tests.runs import losses, mutated, result

pytestmark = pytest.mark.xdist_group("your model")  # which trains it once for all
PAGE = (ROOT / "docs" / "en" / "your-model.md").read_text()
FP32 = ("--precision", "fp32")


OURS, REGRESSION = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)


def lines(change: str) -> int:
    return sum(bool(re.match(r"\+(?!\+\+ )\s*\S", line)) for line in change.splitlines())


def test_the_changes_are_as_small_as_the_page_says() -> None:
    assert f"{lines(OURS)} lines are new" in PAGE
    assert lines(OURS) < 30
    assert f"{lines(REGRESSION)} more lines" in PAGE


def apply(change: str, folder: Path) -> None:
    subprocess.run(["git", "apply", "--verbose", "-"], cwd=folder, input=change, text=True, check=True)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project after the page's first commands and its change."""
    folder = mutated(tmp_path_factory.mktemp("project"))
    for command in shell_blocks(PAGE)[0].commands:
        subprocess.run(["bash", "-c", command], cwd=folder, check=True)
    apply(OURS, folder)
    return folder


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """One process, two processes, and how their losses are compared."""
    first, *others = shell_blocks(PAGE)
    assert first.run
    found = [shlex.split(command) for block in others for command in block.commands]
    assert [words.pop(0) for words in found] == ["python"] * 3
    return found


@pytest.fixture(scope="module")
def outs(shared_programs: Programs, copy: Path, commands: list[list[str]]) -> list[Path]:
    """The folders of the page's runs; the second in another memory layout."""
    one, two, _ = commands
    for words in (one, [*two, "--channels-last", "yes"]):
        shared_programs.run(*words, cwd=copy)
    return [copy / words[-1] for words in (one, two)]


def test_one_process_and_two_train_the_same(outs: list[Path]) -> None:
    one, two = map(result, outs)
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["metrics"] == two["metrics"]
    assert one["metrics"]["accuracy"] > 0.95
    torch.testing.assert_close(losses(outs[0]), losses(outs[1]), rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("outs")
def test_the_comparison_shows_rounding_only(shared_programs: Programs, copy: Path, commands: list[list[str]]) -> None:
    assert 0 <= float(shared_programs.run(*commands[2], cwd=copy).stdout) < 1e-6


def test_the_regression(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory, copy: Path) -> None:
    """The page's second change: one process and two predict the same, and the best model has the smallest error."""
    folder, program = tmp_path_factory.mktemp("regression"), copy / "examples" / "my_training" / "train.py"
    mutated(folder)
    shutil.copytree(program.parent, folder / "examples" / "my_training")
    apply(REGRESSION, folder)
    run = ("-m", "examples.my_training.train", *FP32, "--nproc")
    outs = [folder / "one", folder / "two"]
    for number, out in enumerate(outs, 1):
        shared_programs.run(*run, number, "--out", out, cwd=folder)
    one, two = map(result, outs)
    assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-3)
    assert one["metrics"]["mse"] < 0.8  # 1 is the mean's, for every patient
    points = map(json.loads, (outs[1] / "metrics.jsonl").read_text().splitlines())
    errors = [point["test/mse"] for point in points if "test/mse" in point]
    assert two["metrics"]["best_mse"] == min(errors) < max(errors)
    assert (outs[1] / "best.safetensors").exists()
    assert len((outs[1] / "predictions.csv").read_text().splitlines()) == 1 + 111  # a quarter of 442, and the header

    diverged = shared_programs.run(*run, 2, "--lr", 1e6, "--out", folder / "diverged", cwd=folder, code=2)
    assert re.fullmatch(r"error: training diverged: in epoch 1/20 the test loss is (nan|inf); lower --lr\n",
                        diverged.stderr.splitlines(keepends=True)[-1])  # fmt: skip
    assert not list((folder / "diverged" / "checkpoints").glob("*"))


def test_the_copy_resumes_exactly(shared_programs: Programs, copy: Path, outs: list[Path], tmp_path: Path) -> None:
    run = ("-m", "examples.my_training.train", "--nproc", 2, *FP32, "--channels-last", "yes", "--out", tmp_path)
    shared_programs.run(*run, cwd=copy)
    newest = max((tmp_path / "checkpoints").glob("step-*.pt"))
    newest.unlink()  # as if the run had been killed in its last epoch
    shared_programs.run(*run, "--resume", "auto", cwd=copy)
    assert result(tmp_path)["parameter_hash"] == result(outs[1])["parameter_hash"]


def test_gradients_that_are_not_averaged_are_seen(shared_programs: Programs, copy: Path, tmp_path: Path) -> None:
    """The copy keeps the example's proofs: with the wrapper left out, the run fails."""
    program = copy / "examples" / "my_training" / "train.py"
    source = program.read_text()
    program.write_text(source.replace("logits = ddp(", "logits = model("))
    try:
        run = ("-m", "examples.my_training.train", "--nproc", 2, "--epochs", 1, "--out", tmp_path)
        done = shared_programs.run(*run, cwd=copy, code=1)
    finally:
        program.write_text(source)
    assert "the replicas differ" in done.stderr
