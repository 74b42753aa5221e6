"""The notebook: it runs on a CPU from its first cell to its last, and its comparisons can fail."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.conftest import ROOT, Programs
from tests.runs import mutated

PAGE = ROOT / "examples" / "notebook.ipynb"
NOTEBOOK = nbformat.read(PAGE, as_version=4)
CODE = {cell.id: cell.source for cell in NOTEBOOK.cells if cell.cell_type == "code"}
PROSE = "\n".join(cell.source for cell in NOTEBOOK.cells if cell.cell_type == "markdown")

# In a process of its own, because these libraries warn of themselves: it leaves what was executed in the second file.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
try:
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": sys.argv[3]}}).execute()
finally:
    nbformat.write(notebook, sys.argv[2])
"""


def files(folder: Path) -> set[Path]:
    """Everything in a folder but what git ignores."""
    found = {path.relative_to(folder) for path in folder.rglob("*")}
    return {path for path in found if path.parts[0] != "runs" and "__pycache__" not in path.parts}


def executed(
    programs: Programs, folder: Path, *changes: tuple[str, str], only: Collection[str] = (), code: int = 0
) -> tuple[NotebookNode, str]:
    """A copy of the notebook in a copy of the project, after it was executed, and what the kernel's client said.

    Each change, (before, after), must be possible; `only` names the cells that are executed, in place of all.
    """
    project = mutated(folder / "project")
    notebook = nbformat.from_dict(NOTEBOOK)
    notebook.cells = [cell.copy() for cell in NOTEBOOK.cells if not only or cell.id in only]
    for old, new in changes:
        assert sum(old in cell.source for cell in notebook.cells) == 1, old
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    nbformat.write(notebook, folder / "before.ipynb")
    before, after = files(project), folder / "after.ipynb"
    done = programs.run(
        *("-c", EXECUTE, folder / "before.ipynb", after, project / "examples"),
        env={"IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder), "OMP_WAIT_POLICY": "passive"},
        code=code,
        limit=240,
        cold=True,
    )
    assert files(project) == before
    return nbformat.read(after, as_version=4), done.stderr


def failed(notebook: NotebookNode) -> list[tuple[str, str]]:
    """The cells that raised an error, and what it said."""
    return [
        (cell.id, output.evalue)
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "error"
    ]


def test_it_is_committed_without_outputs() -> None:
    nbformat.validate(NOTEBOOK)
    assert len({cell.id for cell in NOTEBOOK.cells}) == len(NOTEBOOK.cells)
    for cell in NOTEBOOK.cells:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert cell.metadata == {}


@pytest.mark.parametrize("name", CODE)
def test_a_cell_is_python(name: str) -> None:
    compile(CODE[name], name, "exec")


def test_its_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PROSE)
    assert "../docs/en/your-model.md" in links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


# ------------------------------------------------------------------------------------------------- it runs


@pytest.mark.timeout(300)
def test_it_runs_on_a_cpu(programs: Programs, tmp_path: Path) -> None:
    notebook, _ = executed(programs, tmp_path)
    assert failed(notebook) == []
    cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
    assert [cell.execution_count for cell in cells.values()] == list(range(1, len(cells) + 1))
    drawn = [name for name, cell in cells.items() for output in cell.outputs if "image/png" in output.get("data", {})]
    assert drawn == ["draw-curves", "draw-digits", "draw-confusion"]
    said = {name: "".join(output.get("text", "") for output in cell.outputs) for name, cell in cells.items()}
    assert "installed: nothing, all packages are there" in said["find-repository"]
    assert "batch 120 = 1 rank x 120" in said["train-one"]
    assert "batch 120 = 2 ranks x 60" in said["train-two"]
    assert "stopped by SIGTERM" in said["stop"]
    assert "resumed from" in said["go-on"]


# ------------------------------------------------------------------------------------------------- it can fail


@pytest.mark.timeout(300)
def test_another_training_is_seen(programs: Programs, tmp_path: Path) -> None:
    """Two ranks with another seed: the run is in order, and is not that of one rank."""
    changes = (("--epochs 10", "--epochs 2"), ("--out runs/notebook/two", "--seed 1 --out runs/notebook/two"))
    notebook, error = executed(programs, tmp_path, *changes, code=1)
    assert failed(notebook) == [("compare-losses", "the first losses differ by more than rounding")]
    assert "AssertionError" in error


@pytest.mark.timeout(300)
def test_a_run_that_starts_afresh_is_seen(programs: Programs, tmp_path: Path) -> None:
    """It would end with the same parameters, too. (The run of one rank is left out.)"""
    changes = ((" --resume auto", ""), ('run(f"python', '(f"python'))
    cells = ("find-repository", "train-one", "stop", "go-on")
    notebook, _ = executed(programs, tmp_path, *changes, only=cells, code=1)
    assert [name for name, _ in failed(notebook)] == ["go-on"]


@pytest.mark.timeout(300)
def test_a_command_that_fails_is_seen(programs: Programs, tmp_path: Path) -> None:
    cells = ("find-repository", "train-one")
    notebook, _ = executed(programs, tmp_path, ('FLAGS = "', 'FLAGS = "--no-such-flag '), only=cells, code=1)
    assert failed(notebook) == [("train-one", "the command above ended with exit code 2")]


# ------------------------------------------------------------------------------------------------- its first cell


def first_cell(folder: Path, *flags: str, answer: str = "", path: str = "") -> str:
    """What the first cell says when it is run in a folder, given an answer if it asks."""
    script = folder / "cell.py"
    script.write_text(CODE["find-repository"])
    words = [sys.executable, *flags, script]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": path}
    return subprocess.run(
        words, cwd=folder, env=env, input=answer, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_outside_of_a_clone_it_makes_one(tmp_path: Path) -> None:
    source, elsewhere = mutated(tmp_path / "source"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    author = ("-c", "user.name=name", "-c", "user.email=name@example.org")
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}  # no hooks, no signatures
    for words in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *words], cwd=source, env=env, check=True)
    said = first_cell(elsewhere, answer=f"file://{source}\n")
    assert said.endswith(f"in {elsewhere / 'repository'}, installed: nothing, all packages are there\n")
    assert (elsewhere / "repository" / "examples" / "notebook.ipynb").read_bytes() == PAGE.read_bytes()
    assert first_cell(elsewhere).startswith("in "), "the second time, it must not ask"


def test_it_installs_what_is_missing(tmp_path: Path) -> None:
    """With a pip that only notes what it is asked for, and a Python that sees no packages."""
    asked = tmp_path / "asked"
    (tmp_path / "pip.py").write_text(f"import sys\nopen({str(asked)!r}, 'w').write(' '.join(sys.argv[1:]))\n")
    project = mutated(tmp_path / "project")
    first_cell(project, path=str(tmp_path))
    assert not asked.exists()
    said = first_cell(project, "-S", path=str(tmp_path))
    command, quiet, *packages = asked.read_text().split()
    assert (command, quiet) == ("install", "--quiet")
    assert said == f"in {project}, installed: {', '.join(packages)}\n"
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {"torch", "tyro", "scikit-learn"} <= set(packages) <= {re.split(r"\W*[><=]", name)[0] for name in ours}
