"""Flags: answered before torch is imported, mistakes in one line."""

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from common.launcher import Launch
from common.precision import Precision
from tests.conftest import ROOT, Programs
from tests.runs import shown

PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "examples").glob("*/*.py")
    if "begin(Args" in path.read_text()
)
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
        for program in PROGRAMS
        for words in (["--help"], *(words for words, _ in MISTAKES))
    ]
    found: Answers = {}
    said = json.loads(shared_programs.run("-c", NO_TORCH, json.dumps(commands), cold=True).stdout)
    for command, answer in zip(commands, said, strict=True):
        found.setdefault(command[0], []).append(tuple(answer))
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_mistakes_answer_without_heavy_imports(answers: Answers, program: str) -> None:
    (code, text, _), *others = answers[program]
    assert code == 0
    assert "--nproc" in text
    for (code, out, err), (_, line) in zip(others, MISTAKES, strict=True):
        assert (code, out) == (2, ""), err
        assert re.fullmatch(line, err), err


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_the_main_rank_reports_a_mistake(programs: Programs, program: str) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}
    assert programs.run("-m", program, "--nprok", 2, env=place, code=2).stderr == ""


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_flag_is_read(program: str) -> None:
    """A field of Args that the program never mentions is a dead flag."""
    source = (ROOT / program.replace(".", "/")).with_suffix(".py").read_text()
    names = re.findall(r"^    (\w+): .*=", source.split("class Args")[1].split("\n\n\n")[0], re.MULTILINE)
    names.remove("launch")  # read by `begin`
    assert names
    assert [name for name in names if f"args.{name}" not in source and f'"{name}"' not in source] == []


@pytest.mark.parametrize(("flags", "reader"), [(Launch, r"flags\.{}\b"), (Precision, r"self\.{}\b")])
def test_every_shared_flag_is_read(flags: type[Launch | Precision], reader: str) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "common").glob("*.py"))
    assert [field.name for field in fields(flags) if not re.search(reader.format(field.name), sources)] == []


def test_a_wrong_place_is_reported_whoever_finds_it(programs: Programs) -> None:
    for place, line in (
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "error: RANK='x' in the environment is not a number"),
        ({"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}, "error: RANK=8 with WORLD_SIZE=8: ranks go from 0 to 7"),
    ):
        assert line in programs.run("-m", "examples.mnist_ddp_spawn.train", env=place, code=2).stderr


def test_a_mistake_is_one_line_on_a_terminal_too() -> None:
    """There the library that reads the flags draws a coloured box."""
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "examples.mnist_ddp_spawn.train", "--epoch", "3"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=its_end, stdout=its_end, stderr=its_end)
    os.close(its_end)
    said = shown(terminal)
    assert process.wait(10) == 2
    assert re.fullmatch(r"error: Unrecognized options: --epoch, 3; perhaps you meant --epochs \([^\n]*\)\r\n", said), (
        said
    )
