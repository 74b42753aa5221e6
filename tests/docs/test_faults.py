"""The tables of docs/faults.md: the tests that they name are there, and done to the programs that it says."""

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.jobs import IN_TURN, PROGRAMS, TURNED
from tests.faults.test_nodes import OTHERS
from tests.faults.test_programs import HARD_LIVES

PAGE = (ROOT / "docs" / "faults.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
FAULTS = [row for row in ROWS if len(row) == 4][1:]
HEADER, *MATRIX = [row for row in ROWS if len(row) == 1 + len(PROGRAMS)]
ONE_PROGRAM = {
    "test_restarts.py": "imagenet_ddp",
    "test_partition.py": "imagenet_ddp",
    "test_trainer.py": "bert_dp.trainer",
}
SURVIVORS = {"imagenet_survive": "imagenet_ddp", "manual_allreduce_survive": "manual_allreduce_sgd"}


def functions() -> dict[str, list[tuple[Path, ast.FunctionDef]]]:
    """The tests by their names, of which several may have the same."""
    found: dict[str, list[tuple[Path, ast.FunctionDef]]] = {}
    for file in (ROOT / "tests").glob("*/test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append((file, node))
    return found


TESTS = functions()
# What the tests are done to, by how they say it.
KNOWN = {
    "PROGRAMS": PROGRAMS, "PROGRAMS[:5]": PROGRAMS[:5], "IN_TURN": IN_TURN, "TURNED": TURNED,
    "OTHERS": OTHERS, "HARD_LIVES": HARD_LIVES,
}  # fmt: skip


def test_no_fault_is_lost() -> None:
    assert len(FAULTS) > 20
    assert len(FAULTS) + len(MATRIX) + 2 == len(ROWS), "two tables, and nothing beside them"


def programs_of(file: Path, test: ast.FunctionDef) -> set[str]:
    """The programs to which a test does something."""
    if file.parent.name == "examples":
        example = file.stem.removeprefix("test_")
        if example.startswith("bert_"):  # several files of tests
            return {f"bert_dp.{'trainer' if 'trainer' in test.name else 'train'}"}
        return {SURVIVORS.get(example, example)}
    if file.parent.name != "faults":
        return set()
    found = {ONE_PROGRAM[file.name]} if file.name in ONE_PROGRAM else set()
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and "parametrize" in ast.unparse(decorator.func):
            names, values = decorator.args
            text, name = ast.unparse(values), ast.literal_eval(names)
            if text in KNOWN:
                found |= {each if isinstance(each, str) else each[0] for each in KNOWN[text]}
            elif "program" in name:
                assert isinstance(values, ast.List)
                at = name.index("program")
                cells = [row.elts[at] if isinstance(row, ast.Tuple) else row for row in values.elts]
                found |= {ast.literal_eval(cell) for cell in cells}
    text = ast.unparse(test)
    if "(PROGRAMS * 4)" in text:
        return set(PROGRAMS)
    return found | {name for name in PROGRAMS if f"jobs['{name}']" in text or f"*{name.split('_')[0].upper()}" in text}


def named(row: list[str]) -> list[str]:
    """The tests that a row names."""
    return re.findall(r"`(\w+)`", row[3])


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[0])
def test_the_tests_are_there(row: list[str]) -> None:
    assert named(row)
    assert [name for name in named(row) if name not in TESTS] == []


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[0])
def test_the_messages_are_those_that_the_tests_assert(row: list[str]) -> None:
    """Word by word, but for what differs from run to run: numbers, names of hosts, and what the page leaves out."""
    tests = [ast.get_source_segment(file.read_text(), node) for name in named(row) for file, node in TESTS[name]]
    asserted = "".join(filter(None, tests)).replace("\\", "")
    for message in re.findall(r"`([^`]+)`", row[1]):
        if " " in message and not message.startswith(("--", "docker/")):
            parts = re.split(r"\.\.\.|[\d,]*\d|HOST0|[()]", message)
            assert [part for part in map(str.strip, parts) if len(part) > 5 and part not in asserted] == [], message


def test_both_tables_have_the_same_faults() -> None:
    assert [name.strip("`") for name in HEADER[1:]] == PROGRAMS
    assert [row[0] for row in MATRIX] == [row[0] for row in FAULTS]
    assert {cell for row in MATRIX for cell in row[1:]} == {"●", "–"}


@pytest.mark.parametrize(("fault", "row"), list(zip(FAULTS, MATRIX, strict=True)), ids=lambda row: row[0])
def test_what_is_said_to_be_done_to_a_program_is_done(fault: list[str], row: list[str]) -> None:
    done = {name for test in named(fault) for each in TESTS[test] for name in programs_of(*each)}
    assert [name for name, cell in zip(PROGRAMS, row[1:], strict=True) if cell == "●"] == [
        name for name in PROGRAMS if name in done
    ]
