"""The page 'Your own model': its commands make a copy that trains, compares, and works in another repository."""

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
FIRST, COPYING, ELSEWHERE = shell_blocks(PAGE)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project after the page's first commands."""
    folder = mutated(tmp_path_factory.mktemp("project"))
    for command in COPYING.commands[:2]:
        subprocess.run(["bash", "-c", command], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def outs(shared_programs: Programs, copy: Path) -> list[Path]:
    """The folders of the page's runs, with one process and with two."""
    found = []
    for command in COPYING.commands[2:4]:
        python, *words = shlex.split(command)
        assert python == "python"
        shared_programs.run(*words, cwd=copy)
        found.append(copy / words[-1])
    return found


def test_one_process_and_two_train_the_same(outs: list[Path]) -> None:
    one, two = map(result, outs)
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["metrics"] == two["metrics"]
    assert one["metrics"]["accuracy"] > 0.95
    torch.testing.assert_close(losses(outs[0]), losses(outs[1]), rtol=1e-3, atol=1e-5)


def test_the_copy_names_itself(copy: Path) -> None:
    texts = [path.read_text() for path in (copy / "examples" / "my_training").iterdir() if path.is_file()]
    assert len(texts) > 5
    assert [text for text in texts if "your_model" in text] == []


@pytest.mark.usefixtures("outs")
def test_the_comparison_shows_rounding_only(shared_programs: Programs, copy: Path) -> None:
    words = shlex.split(COPYING.commands[4])[1:]
    assert 0 <= float(shared_programs.run(*words, cwd=copy).stdout) < 1e-6


def test_gradients_that_are_not_averaged_are_seen(shared_programs: Programs, copy: Path, tmp_path: Path) -> None:
    """The copy keeps the example's checks: with DDP's wrapper left out, the run fails."""
    program = copy / "examples" / "my_training" / "train.py"
    source = program.read_text()
    assert "outputs = model(inputs)" in source
    program.write_text(source.replace("outputs = model(inputs)", "outputs = model.module(inputs)"))
    try:
        run = ("-m", "examples.my_training", "--nproc", 2, "--epochs", 1, "--out", tmp_path)
        done = shared_programs.run(*run, cwd=copy, code=1)
    finally:
        program.write_text(source)
    assert "the replicas differ" in done.stderr


def test_it_is_used_from_another_repository(shared_programs: Programs, tmp_path: Path) -> None:
    """The page's three lines, with PYTHONPATH in place of the first, which needs a network."""
    assert not ELSEWHERE.run
    assert ELSEWHERE.commands[0].startswith("pip install")
    for command in ELSEWHERE.commands[1:]:
        subprocess.run(["bash", "-c", command.replace("path/to/this/repository", str(ROOT))], cwd=tmp_path, check=True)
    copied = [path for path in (tmp_path / "my_training").iterdir() if path.suffix in (".py", ".md")]
    assert len(copied) > 5
    assert [path.name for path in copied if "your_model" in path.read_text()] == []
    assert [path.name for path in copied if path.suffix == ".py" and "examples" in path.read_text()] == []
    (start,) = re.findall(r"`python (-m my_training .*?)`", PAGE)
    env = {"PYTHONPATH": str(ROOT)}
    shared_programs.run(*start.split(), "--epochs", 1, "--out", tmp_path / "out", cwd=tmp_path, env=env)
    assert result(tmp_path / "out")["world_size"] == 2
