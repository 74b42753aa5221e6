"""The project's own rules, each with a sample that breaks it."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
SHARED = sorted((ROOT / "common").rglob("*.py"))
PROGRAMS = sorted((ROOT / "examples").glob("*/*.py"))
# What sends or waits, of torch; what calls it, of ours, says so in its docstring.
OF_TORCH = {
    "all_gather", "all_gather_object", "all_reduce", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "new_group", "recv", "reduce",
    "reduce_scatter", "scatter", "send",
}  # fmt: skip
SAYS_SO = re.compile(r"every rank|all ranks call|both ranks call|every process", re.IGNORECASE)
Function = ast.FunctionDef | ast.AsyncFunctionDef
parsed = cache(ast.parse)  # several rules read the same files


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[Function]:
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def called(node: ast.AST) -> set[str]:
    """The last names of everything that is called inside of a node."""
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls}


def too_long(source: str) -> list[str]:
    return [f.name for f in functions(parsed(source)) if (f.end_lineno or 0) - f.lineno + 1 > 60]


@pytest.mark.parametrize("path", SHARED + PROGRAMS, ids=name)
def test_a_room_is_small(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 250
    assert too_long(source) == []
    assert not re.search(r"fmt: *(skip|off)", source), "the formatter is switched off"


def test_a_long_function_is_seen() -> None:
    assert too_long("def f():\n" + "    x = 1\n" * 60) == ["f"]
    assert too_long("def f():\n" + "    x = 1\n" * 59) == []


# What makes a group of ranks, and so decides how long they wait for each other.
MAKES_A_GROUP = {"init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "init_device_mesh"}
PLAIN_TORCH = {"examples/your_model/plain_ddp.py", "examples/your_model/fsdp.py"}  # without a flag --timeout


def without_timeout(source: str) -> list[int]:
    """The lines of calls that make a group of ranks and do not say how long to wait."""
    calls = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute | ast.Name)
        and (call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id) in MAKES_A_GROUP
        and not {"timeout"} & {word.arg for word in call.keywords}
    ]


@pytest.mark.parametrize("path", SHARED + PROGRAMS, ids=name)
def test_every_group_has_the_time_out_of_the_flags(path: Path) -> None:
    """A group of its own has torch's 30 minutes otherwise, whatever the default group has."""
    if name(path) not in PLAIN_TORCH:
        assert without_timeout(path.read_text()) == []


def test_a_group_without_a_time_out_is_seen() -> None:
    source = "dist.new_group([0], timeout=t)\nnew_group([0])\ndist.init_process_group('gloo')\n"
    assert without_timeout(source) == [2, 3]
    assert all(without_timeout((ROOT / file).read_text()) for file in PLAIN_TORCH)


def hidden_imports(source: str) -> list[str]:
    """Imports inside functions without a comment that says what they save."""
    lines = source.splitlines()
    found = []
    for function in functions(parsed(source)):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                before, line = lines[node.lineno - 2].strip(), lines[node.lineno - 1]
                comment = line.partition("#")[2] or before.startswith("#") * before
                if not re.search(r"\d s\b|second|as above|with torch", comment):
                    found.append(lines[node.lineno - 1].strip())
    return found


@pytest.mark.parametrize("path", SHARED + PROGRAMS, ids=name)
def test_imports_stand_on_top(path: Path) -> None:
    assert hidden_imports(path.read_text()) == []


def test_a_hidden_import_is_seen() -> None:
    assert hidden_imports("def f():\n    import torch\n") == ["import torch"]
    assert hidden_imports("def f():\n    import torch  # 3 s, which most never pay\n") == []


@cache
def communicating() -> set[str]:
    """The functions and methods of the shared package that communicate, and say so."""
    trees = [parsed(path.read_text()) for path in SHARED]
    return {
        function.name
        for tree in trees
        for function in functions(tree)
        if SAYS_SO.search(ast.get_docstring(function) or "") and not function.name.startswith("__")
    }


def silent(source: str) -> list[str]:
    """Public functions that communicate and do not say so; private ones are their callers' business."""
    tree, found = parsed(source), []
    private = {f.name: called(f) for f in functions(tree) if f.name.startswith("_")}
    for function in functions(tree):
        names = called(function)
        for inner in list(names & private.keys()):
            names |= private[inner]
        says = SAYS_SO.search(ast.get_docstring(function) or "")
        if names & OF_TORCH and not says and not function.name.startswith("_"):
            found.append(function.name)
    return found


@pytest.mark.parametrize("path", SHARED, ids=name)
def test_what_communicates_says_so(path: Path) -> None:
    assert silent(path.read_text()) == []


def test_a_silent_communication_is_seen() -> None:
    assert silent('def show(x):\n    """Show."""\n    dist.all_reduce(x)\n') == ["show"]
    assert silent("def show(x):\n    _show(x)\n\ndef _show(x):\n    dist.all_reduce(x)\n") == ["show"]
    assert silent('def show(x):\n    """Show. Every rank calls this."""\n    dist.all_reduce(x)\n') == []


def test_nothing_that_logs_communicates() -> None:
    source = (ROOT / "common" / "train" / "log.py").read_text()
    assert not called(parsed(source)) & OF_TORCH


def one_sided(source: str, names: set[str]) -> list[str]:
    """Calls that communicate, inside of a branch that depends on the rank: the other ranks would wait."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.If | ast.IfExp) and re.search(r"\brank\b|get_rank|local_rank", ast.unparse(node.test)):
            branches = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]
            found += sorted(set().union(*(called(branch) for branch in branches)) & names)
    return found


@pytest.mark.parametrize("path", [path for path in PROGRAMS if path.name == "train.py"], ids=name)
def test_rank_checks_guard_input_and_output_only(path: Path) -> None:
    names = (communicating() | OF_TORCH | {"backward", "step", "init_process_group"}) - {"print0"}
    assert one_sided(path.read_text(), names) == []


def test_a_one_sided_call_is_seen() -> None:
    assert "evaluate" in communicating()
    assert one_sided("if dist.get_rank() == 0:\n    dist.barrier()\n", OF_TORCH) == ["barrier"]
    assert one_sided("if rank == 0:\n    print('done')\n", OF_TORCH) == []


@pytest.mark.parametrize("path", PROGRAMS, ids=name)
def test_there_is_no_mode_without_distribution(path: Path) -> None:
    assert not re.search(r"if.*is_initialized|if.*\bdistributed\b", path.read_text())


@pytest.mark.parametrize(
    ("line", "code"),
    [("import common.data.idx", 0), ("from examples.mnist_ddp_spawn.args import Args", 1)],
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


@pytest.mark.parametrize("number", range(3))  # at least two of them in one of the two workers
def test_what_a_test_sets_ends_with_it(number: int) -> None:
    assert "DDP_TEST_SET" not in os.environ
    os.environ["DDP_TEST_SET"] = str(number)


GROUPED = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("group", [pytest.param(group, marks=pytest.mark.xdist_group(group)) for group in "ab"])
def test_of_a_group(group, number):
    pathlib.Path(f"{group}{number}").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


def test_tests_of_a_group_share_a_worker(tmp_path: Path) -> None:
    """Where pytest-xdist does not know pytest's names of tests, `--dist loadgroup` goes without groups, silently: each
    worker then runs anew what the tests of a group share.
    """
    (tmp_path / "test_grouped.py").write_text(GROUPED)
    words = ("-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:hypothesispytest")
    subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, check=True)
    for group in "ab":
        workers = {file.read_text() for file in tmp_path.glob(f"{group}[0-9]")}
        assert len(workers) == 1, "install what constraints.txt pins: make setup"
