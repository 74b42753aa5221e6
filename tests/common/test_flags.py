"""Flags: answered before torch is imported, mistakes in one line."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, Programs

PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "examples").glob("*/*.py")
    if "begin(Args" in path.read_text()
)
NO_TORCH = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "sklearn", "matplotlib", "pandas", "torchvision", "transformers"):
            raise AssertionError(f"{name} is imported before the flags are read")
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_mistakes_answer_without_heavy_imports(programs: Programs, program: str) -> None:
    text = programs.run("-c", NO_TORCH, program, "--help").stdout
    assert "--nproc" in text
    for words, line in (
        (["--nprok", "2"], "error: Unrecognized options: --nprok, 2; perhaps you meant --nproc .*\n"),
        (["--nproc", "0"], "error: --nproc 0: at least 1 process is needed\n"),
        (["--dist-backend", "mpi"], "error: invalid choice 'mpi' for argument '--dist-backend'.*\n"),
        (["--world-size", "2", "--rank", "5", "--dist-url", "tcp://h:1"], "error: --rank 5 with --world-size 2: .*\n"),
    ):
        done = programs.run("-c", NO_TORCH, program, *words, code=2)
        assert re.fullmatch(line, done.stderr), done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_the_main_rank_reports_a_mistake(programs: Programs, program: str) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}
    assert programs.run("-m", program, "--nprok", 2, env=place, code=2).stderr == ""


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_flag_is_read(program: str) -> None:
    """A field of Args that the program never mentions is a dead flag."""
    source = (ROOT / program.replace(".", "/")).with_suffix(".py").read_text()
    fields = re.findall(r"^    (\w+): .*=", source.split("class Args")[1].split("\n\n\n")[0], re.MULTILINE)
    assert fields
    fields.remove("launch")  # read by `begin`
    assert [name for name in fields if f"args.{name}" not in source and f'"{name}"' not in source] == []


@pytest.mark.parametrize("module", ["launcher", "precision", "flags"])
def test_every_shared_flag_is_read(module: str) -> None:
    sources = [path.read_text() for path in (ROOT / "common").glob("*.py")]
    source = Path(ROOT / "common" / f"{module}.py").read_text()
    for name in re.findall(r'^    (\w+): (?:Annotated|Literal|bool).*= .*\n    """', source, re.MULTILINE):
        assert any(f".{name}" in text for text in sources), name
