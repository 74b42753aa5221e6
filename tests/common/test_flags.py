"""Flags: answered before torch is imported, mistakes in one line."""

import ast
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import pytest

from common.launch.flags import MAY_CHANGE, Launch, fixed_flags
from common.train.precision import Precision
from tests import warm
from tests.conftest import ROOT, Programs
from tests.machine import here
from tests.runs import shown

EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/__main__.py"))
STARTED = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "examples").glob("*/*.py")
    if re.search(r"^    (start\(Args|runpy)", path.read_text(), re.MULTILINE) and path.name != "__main__.py"
)
# Those whose flags have a file of their own answer before torch is imported.
QUICK = [f"examples.{name}" for name in EXAMPLES]
NEEDED = {"examples.bert_dp.predict": ("--text", "a review")}
MISTAKES = (
    (["--nprok", "2"], "error: Unrecognized options: --nprok, 2; perhaps you meant --nproc .*\n"),
    (["--nproc", "0"], "error: --nproc 0: at least 1 process is needed\n"),
    (["--dist-backend", "mpi"], "error: invalid choice 'mpi' for argument '--dist-backend'.*\n"),
    (["--world-size", "2", "--rank", "5", "--dist-url", "tcp://h:1"], "error: --rank 5 with --world-size 2: .*\n"),
)
# Forks a process for every command: starting Python 65 times takes half a minute.
NO_TORCH = """
import json, os, runpy, sys, tempfile
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "sklearn", "matplotlib", "pandas", "torchvision", "transformers"):
            raise AssertionError(f"{name} is imported before the flags are read")
sys.meta_path.insert(0, Refuse())
import tyro
answers = []
for command in json.loads(sys.argv[1]):
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    if os.fork() == 0:
        for descriptor, file in enumerate(files, 1):
            os.dup2(file.fileno(), descriptor)
        sys.argv = command
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    answers.append([code, *(file.seek(0) or file.read() for file in files)])
print(json.dumps(answers))
"""
Answers = dict[str, list[tuple[int, str, str]]]


@pytest.fixture(scope="module")
def answers(shared_programs: Programs) -> Answers:
    """What each program answers to --help and to each mistake: exit code, standard output, standard error."""
    commands = [
        [program, *words, *NEEDED.get(program, ())]
        for program in QUICK
        for words in (["--help"], *(words for words, _ in MISTAKES))
    ]
    found: Answers = {}
    said = json.loads(shared_programs.run("-c", NO_TORCH, json.dumps(commands), cold=True).stdout)
    for command, answer in zip(commands, said, strict=True):
        found.setdefault(command[0], []).append(tuple(answer))
    return found


@pytest.mark.parametrize("program", QUICK)
def test_help_and_mistakes_answer_without_heavy_imports(answers: Answers, program: str) -> None:
    (code, text, _), *others = answers[program]
    assert code == 0
    assert "--nproc" in text
    for (code, out, err), (_, line) in zip(others, MISTAKES, strict=True):
        assert (code, out) == (2, ""), err
        assert re.fullmatch(line, err), err


@pytest.mark.parametrize("program", STARTED)
def test_only_the_main_rank_reports_a_mistake(programs: Programs, program: str) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}
    assert programs.run("-m", program, "--nprok", 2, env=place, code=2).stderr == ""


def test_all_examples_have_a_front_door() -> None:
    assert len(EXAMPLES) >= 7
    assert sorted(path.parent.name for path in (ROOT / "examples").glob("*/train.py")) == EXAMPLES


def flag_names(source: str) -> list[str]:
    """The fields of all classes of flags in a file."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return [
        field.target.id
        for each in classes
        for field in each.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None
    ]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_flag_is_read(example: str) -> None:
    """A flag that the program never mentions is a dead flag; `Run` reads some."""
    folder = ROOT / "examples" / example
    readers = "".join(path.read_text() for path in folder.glob("*.py"))
    readers += "".join(path.read_text() for path in (ROOT / "common" / "train").glob("*.py"))
    names = flag_names((folder / "args.py").read_text())
    assert names
    assert [name for name in names if not re.search(rf"\.{name}\b|\"{name}\"", readers)] == []


@pytest.mark.parametrize("flags", [Launch, Precision])
def test_every_shared_flag_is_read(flags: type[Launch | Precision]) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    unread = [field.name for field in fields(flags) if not re.search(rf"flags\.{field.name}\b", sources)]
    assert unread == []


def test_a_new_flag_is_compared_on_resuming_unless_it_says_otherwise() -> None:
    @dataclass(frozen=True)
    class Args:
        lr: float = 0.1
        out: Annotated[Path, MAY_CHANGE] = Path("runs")
        launch: Launch = Launch()

    assert dict(fixed_flags(Args(lr=0.5))) == {"lr": 0.5}


def test_a_wrong_place_is_reported_whoever_finds_it(programs: Programs) -> None:
    for place, line in (
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "error: RANK='x' in the environment is not a number"),
        ({"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}, "error: RANK=8 with WORLD_SIZE=8: ranks go from 0 to 7"),
    ):
        assert line in programs.run("-m", "examples.mnist_ddp_spawn", env=place, code=2).stderr


def test_a_mistake_is_one_line_on_a_terminal_too() -> None:
    """There the library that reads the flags draws a coloured box."""
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "examples.mnist_ddp_spawn", "--epoch", "3"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=its_end, stdout=its_end, stderr=its_end)
    os.close(its_end)
    said = shown(terminal)
    assert process.wait(here(10)) == 2
    assert re.fullmatch(r"error: Unrecognized options: --epoch, 3; perhaps you meant --epochs \([^\n]*\)\r\n", said), (
        said
    )


@pytest.mark.parametrize("cold", ["0", "1"])
def test_programs_start_from_nothing_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, cold: str) -> None:
    monkeypatch.setenv(warm.COLD, cold)
    assert warm.possible(["-m", "examples.gan_ddp"], {}) == (cold == "0")
    assert warm.possible(["-m", "examples.gan_ddp"], {warm.SPACE: "a network"})
