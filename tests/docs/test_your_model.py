"""The page 'Your own model': the example is copied and changed as the page says, trains, and is still exact."""

import re
import shlex
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


def change() -> str:
    found = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_the_change_is_as_small_as_the_page_says() -> None:
    new = [line for line in change().splitlines() if re.match(r"\+(?!\+\+ )\s*\S", line)]
    assert f"{len(new)} lines are new" in PAGE
    assert len(new) < 30


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project after the page's first commands and its change."""
    folder = mutated(tmp_path_factory.mktemp("project"))
    for command in shell_blocks(PAGE)[0].commands:
        subprocess.run(["bash", "-c", command], cwd=folder, check=True)
    subprocess.run(["git", "apply", "--verbose", "-"], cwd=folder, input=change(), text=True, check=True)
    return folder


@pytest.fixture(scope="module")
def outs(shared_programs: Programs, copy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The page's other commands, each with a folder of its own; the second in another memory layout."""
    first, *others = shell_blocks(PAGE)
    commands = [command for block in others for command in block.commands]
    assert first.run
    assert len(commands) == 2
    found = []
    for command, more in zip(commands, (FP32, (*FP32, "--channels-last", "yes")), strict=True):
        found.append(tmp_path_factory.mktemp("out"))
        program, *words = shlex.split(command)
        assert program == "python"
        shared_programs.run(*words, *more, "--out", found[-1], cwd=copy)
    return found


def test_one_process_and_two_train_the_same(outs: list[Path]) -> None:
    one, two = map(result, outs)
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["metrics"] == two["metrics"]
    assert one["metrics"]["accuracy"] > 0.95
    torch.testing.assert_close(losses(outs[0]), losses(outs[1]), rtol=1e-3, atol=1e-5)


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
