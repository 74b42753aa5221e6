"""Own rules on the form of the sources: ruff, ty and import-linter do not know these."""

import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ranks

ROOT = Path(__file__).parents[2]
COMMON, TOOLS, EXAMPLES = (
    sorted((ROOT / d).rglob("*.py")) for d in ("common", "tools", "examples")
)
PROGRAMS = sorted(path.parent.name for path in EXAMPLES if path.name == "__main__.py")
TREES = {path: ast.parse(path.read_text()) for path in (*COMMON, *TOOLS, *EXAMPLES)}
LINES = {path: len(path.read_text().splitlines()) for path in TREES}


def nodes(path: Path, kind: Any) -> Iterator[Any]:
    return (node for node in ast.walk(TREES[path]) if isinstance(node, kind))


def name(path: Path, line: int = 0) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def cap(path: Path) -> int:
    if "examples" not in path.parts:
        return {"run.py": 365, "launch.py": 255, "rank.py": 270}.get(path.name, 250)
    if path.parent.name == "further":
        return 150
    longer = 150 if path.parent.name == "imagenet_ddp" else 120
    return {"train.py": longer, "args.py": 60}.get(path.name, 250)


def test_files_are_short() -> None:
    assert not [name(path, lines) for path, lines in LINES.items() if lines > cap(path)]


@pytest.mark.parametrize(
    ("folder", "budget"),
    [
        *(("common", 2200), ("tools", 600), ("benchmarks", 2200)),
        ("examples", 532 * len(PROGRAMS)),
        ("tests", 7700 + 100 * len(PROGRAMS)),
    ],
)
def test_folders_keep_their_budget(folder: str, budget: int) -> None:
    files = (ROOT / folder).rglob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) <= budget


def test_common_is_flat_and_has_few_files() -> None:
    assert len([path for path in COMMON if path.stem != "__init__"]) <= 14
    assert {path.parent.name for path in COMMON} == {"common"}


def test_loops_show_the_algorithm() -> None:
    """About 25 statements in a loop with its inner loops; the GAN has two steps in one."""
    loops = [
        (path, loop)
        for path in EXAMPLES
        for loop in nodes(path, (ast.For, ast.While, ast.AsyncFor))
    ]
    size = {
        loop: sum(isinstance(node, ast.stmt) for node in ast.walk(loop)) - 1 for _, loop in loops
    }
    assert not [name(path, loop.lineno) for path, loop in loops if size[loop] > 29]


def test_examples_do_not_import_each_other() -> None:
    """An example imports itself by relative imports, so that a copy of its folder works."""
    wrong = []
    for path in EXAMPLES:
        depth = len(path.relative_to(ROOT / "examples").parts) - 1
        for node in nodes(path, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules = modules or [alias.name for alias in node.names]
            level = getattr(node, "level", 0)
            absolute = level == 0 and any(m.split(".")[0] == "examples" for m in modules)
            upward = path.parent.name != "further" and any("further" in m for m in modules)
            if absolute or upward or level > max(1, depth):
                wrong.append(name(path, node.lineno))
    assert not wrong


def test_no_private_name_of_torch() -> None:
    """Private names change without notice; only the hang report cannot do without them."""
    wrong = []
    for path in TREES.keys() - {ROOT / "common" / "hang.py"}:
        roots = {"torch"}
        for node in nodes(path, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                full = f"{module}.{alias.name}".strip(".")
                if full.split(".")[0] != "torch" or getattr(node, "level", 0):
                    continue
                roots.add(alias.asname or alias.name.split(".")[0])
                if "._" in full:
                    wrong.append(name(path, node.lineno))
        for node in nodes(path, ast.Attribute):
            chain = ast.unparse(node).split(".")
            if chain[0] in roots and re.match("_[^_]", node.attr):
                wrong.append(name(path, node.lineno))
    assert not wrong


def test_docstrings_begin_with_a_verb() -> None:
    """`ruff` (D401) sees the imperative; these beginnings escape it."""
    noun = re.compile(r"(What|Whether|Who|Which|Whose|Of|Where|When|How)\b")
    functions = [
        (path, node)
        for path in TREES
        for node in nodes(path, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert not [
        name(path, node.lineno)
        for path, node in functions
        if noun.match(ast.get_docstring(node) or "")
    ]


def test_examples_use_few_names_of_common() -> None:
    uses = {
        path: sum(
            len(node.names)
            for node in nodes(path, ast.ImportFrom)
            if (node.module or "").startswith("common")
        )
        for path in EXAMPLES
    }
    assert not [name(path, count) for path, count in uses.items() if count > 12]


@pytest.mark.parametrize("program", PROGRAMS)
def test_flags_are_few(program: str) -> None:
    """An example has at most twelve flags of its own; imagenet_ddp owes those of main.py."""
    args_class = importlib.import_module(f"examples.{program}.args").Args
    shared = next(base for base in args_class.__mro__ if base.__module__ == "common.launch")
    own = {f.name for f in dataclasses.fields(args_class)} - {
        f.name for f in dataclasses.fields(shared)
    }
    assert len(own) <= (16 if program == "imagenet_ddp" else 12), own


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_every_example_is_listed(readme: str) -> None:
    rows = re.findall(r"^\| \[`(\w+)`\].*\| !\[.*\]\(.*\) \|$", (ROOT / readme).read_text(), re.M)
    assert sorted(rows) == PROGRAMS
    references = (ROOT / "tests" / "reference").glob("[a-z]*.py")
    assert sorted(path.stem for path in references) == PROGRAMS
    (environments,) = re.findall(r"^env_list = lint, (.*)$", (ROOT / "tox.ini").read_text(), re.M)
    assert sorted(environments.split(", ")) == PROGRAMS


def test_flags_do_not_import_torch(tmp_path: Path) -> None:
    """`--help` answers in a fraction of a second."""
    modules = [path for path in EXAMPLES if path.name in ("args.py", "__main__.py")]
    names = [
        ast.unparse(node) for path in modules for node in nodes(path, (ast.Import, ast.ImportFrom))
    ]
    assert not [line for line in names if re.search(r"\b(torch|torchvision|transformers)\b", line)]


def test_few_functions_of_common_run(tmp_path: Path) -> None:
    """A learner who follows an epoch of mnist_ddp_spawn meets few functions and short files."""
    functions, files = ranks.call(_enter, tmp_path / "out", folder=tmp_path / "log")
    assert len(functions) <= 120, sorted(functions)
    lines = sum(len(Path(file).read_text().splitlines()) for file in files)
    assert len(files) <= 10, sorted(files)
    assert lines <= 1820


def _enter(out: Path) -> tuple[set[str], set[str]]:
    entered = set[str]()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/common/" in frame.f_code.co_filename:
            entered.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    args_class = importlib.import_module("examples.mnist_ddp_spawn.args").Args
    train = importlib.import_module("examples.mnist_ddp_spawn.train")
    args = args_class(epochs=1, out=out, device="cpu")
    sys.setprofile(profile)
    train.main_worker(0, args)
    sys.setprofile(None)
    files = {str(m.__file__) for name, m in sys.modules.items() if name.startswith("common.")}
    return {e for e in entered if "<" not in e.rpartition(".")[2]}, files
