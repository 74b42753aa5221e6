"""The project's own rules, each with a sample that breaks it."""

import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = sorted((ROOT / "examples").glob("*/*.py"))
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(source: str) -> int:
    """Lines that hold code: no comment, no blank line, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_lines_of_code_are_counted_without_comments_and_docstrings() -> None:
    assert lines_of_code('"""Doc\n\nstring."""\n# comment\n\nx = (  # why\n    1\n)\n') == 3


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_program_can_be_read_in_one_sitting(program: Path) -> None:
    assert lines_of_code(program.read_text()) <= 150


def rank_checks(source: str) -> list[str]:
    return re.findall(r"(?:rank|get_rank\(\))\s*[=!]=\s*0|if.*is_main|if.*is_initialized|if.*distributed", source)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_rank_checks_live_in_common(program: Path) -> None:
    assert rank_checks(program.read_text()) == []


@pytest.mark.parametrize(
    "line", ["if rank == 0:", "if dist.get_rank() != 0:", "if world.is_main:", "if args.distributed:"]
)
def test_a_rank_check_is_seen(line: str) -> None:
    assert rank_checks(line)


@pytest.mark.parametrize(
    ("line", "code"),
    [("import common.data", 0), ("from examples.mnist_ddp_spawn.train import Args", 1)],
)
def test_examples_cannot_import_each_other(tmp_path: Path, line: str, code: int) -> None:
    for name in ("common", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "examples" / "another").mkdir()
    (tmp_path / "examples" / "another" / "__init__.py").touch()
    (tmp_path / "examples" / "another" / "train.py").write_text(line + "\n")
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr


def test_pre_commit_runs_what_tox_runs() -> None:
    tox = (ROOT / "tox.ini").read_text().split("[testenv:lint]")[1].split("[testenv:")[0]
    commands = re.findall(r"^    (ruff.*|lint-imports|python -m pytest .*)$", tox, re.MULTILINE)
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [
        hook["entry"].removeprefix(".venv/bin/").replace("pytest -q", "pytest") for hook in config["repos"][0]["hooks"]
    ]
    assert hooks == commands


def test_no_address_in_the_constraints() -> None:
    assert "://" not in (ROOT / "constraints.txt").read_text()


def test_every_test_runs() -> None:
    """Nothing passes by skipping, except what needs a GPU."""
    words = re.compile(r"pytest\.(skip|importorskip|xfail)|mark\.(skip|skipif|xfail)")
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert [str(path) for path in files if words.search(path.read_text())] == []
