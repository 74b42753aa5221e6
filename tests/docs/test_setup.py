"""`make setup` says what went wrong if it fails, and is silent about warnings if it does not."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

PIP = """#!/bin/sh
echo "WARNING: an index was not asked" >&2
echo "ERROR: $2 $3" >&2
exit {code}
"""
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p .venv/bin && cp pip .venv/bin/python && cp pip .venv/bin/uv
"""


@pytest.mark.parametrize("code", [0, 1])
def test_warnings_are_shown_only_if_setting_up_fails(tmp_path: Path, code: int) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in (("pip", PIP.format(code=code)), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    command = ["make", "--no-print-directory", "setup", "PYTHON=./python"]
    made = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert (made.returncode != 0) == (code != 0)
    assert ("WARNING: an index" in made.stderr) == (code != 0)
    assert ("ERROR: pip install" in made.stderr) == (code != 0)
    assert (tmp_path / ".venv" / ".ready").exists() == (code == 0)
    assert made.stdout == "setting up .venv (a minute or two with an empty download cache)\n"
