"""`make demo` installs what runs, `make setup` the rest; warnings are shown only if it fails."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

PIP = """#!/bin/sh
echo "$(basename $0) $* $UV_DEFAULT_INDEX $PIP_INDEX_URL" >> said
echo "WARNING: an index was not asked" >&2
echo "ERROR: $2 $3" >&2
echo "{cause}" >&2
exit {code}
"""
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p .venv/bin && cp pip .venv/bin/python && cp pip .venv/bin/uv
"""


# What `make check` passes on, with CPU=1 or INDEX=URL if they were given to it.
OF_ANOTHER_MAKE = {"CPU", "INDEX", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PIP_INDEX_URL", "UV_DEFAULT_INDEX"}


def made(folder: Path, code: int, *words: str, cause: str = "") -> subprocess.CompletedProcess[str]:
    """make, with a Python and a pip that only write down what they are asked for."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        if not (folder / name).exists():
            shutil.copy(ROOT / name, folder)
    for name, text in (("pip", PIP.format(code=code, cause=cause)), ("python", PYTHON)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command = ["make", "--no-print-directory", "PYTHON=./python", *words]
    env = {name: value for name, value in os.environ.items() if name not in OF_ANOTHER_MAKE}
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True)


@pytest.mark.parametrize("code", [0, 1])
def test_warnings_are_shown_only_if_setting_up_fails(tmp_path: Path, code: int) -> None:
    done = made(tmp_path, code, "setup")
    assert (done.returncode != 0) == (code != 0)
    assert ("WARNING: an index" in done.stderr) == (code != 0)
    assert ("ERROR: pip install" in done.stderr) == (code != 0)
    assert (tmp_path / ".venv" / ".ready").exists() == (code == 0)
    assert done.stdout == "setting up .venv (3 GB to download with CUDA; CPU=1 leaves it out)\n"


REFUSED = "Failed to fetch: https://index.example/whl/cpu/torch/"


@pytest.mark.parametrize(
    ("cause", "words", "named"), [(REFUSED, ["CPU=1"], True), (REFUSED, [], False), ("a full disk", ["CPU=1"], False)]
)
def test_an_index_that_cannot_be_reached_is_named_last(
    tmp_path: Path, cause: str, words: list[str], named: bool
) -> None:
    done = made(tmp_path, 1, "demo", *words, cause=cause)
    assert done.returncode != 0
    last = [line for line in done.stderr.splitlines() if not line.startswith("make:")][-1]
    assert (last == "error: PyTorch's own index cannot be reached: leave CPU=1 out") == named, done.stderr


def test_the_demo_needs_no_tools_of_tests(tmp_path: Path) -> None:
    done = made(tmp_path, 0, "demo")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "next: docs/en/getting-started.md; your own model: examples/your_model"
    first = (tmp_path / "said").read_text()
    assert re.search(r"^uv pip install .*--editable \.", first, re.MULTILINE)
    assert "--group" not in first
    assert "torch-backend" not in first
    assert not (tmp_path / ".venv" / ".ready").exists()
    assert made(tmp_path, 0, "setup").returncode == 0
    added = (tmp_path / "said").read_text().removeprefix(first)
    assert re.findall(r"^uv .*", added, re.MULTILINE) == re.findall(r"^uv .*--group dev.*", added, re.MULTILINE) != []
    assert "venv" not in re.sub(r"\.venv\S*", "", added), "made anew"


def test_without_cuda_and_from_a_mirror(tmp_path: Path) -> None:
    assert made(tmp_path, 0, "demo", "CPU=1", "INDEX=https://mirror.example/simple").returncode == 0
    said = (tmp_path / "said").read_text()
    assert re.search(
        r"^uv pip install .*--torch-backend cpu --editable \. https://mirror\.example/simple", said, re.MULTILINE
    )
    assert said.count("https://mirror.example/simple https://mirror.example/simple\n") >= 2, "uv and pip"
