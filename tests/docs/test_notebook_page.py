"""The page 'From a notebook': its cells are executed by a kernel, and what it says of functions in cells is so."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.conftest import ROOT, Programs
from tests.docs.test_notebook import EXECUTE, failed

CELLS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "en" / "notebook.md").read_text(), re.S)
COMMAND, READ, WRITE, SPAWN = CELLS


def execute(programs: Programs, folder: Path, *cells: str, code: int = 0) -> tuple[nbformat.NotebookNode, str]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    before, after = folder / "before.ipynb", folder / "after.ipynb"
    nbformat.write(notebook, before)
    env = {"IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = programs.run("-c", EXECUTE, before, after, folder, env=env, code=code, limit=200, cold=True)
    return nbformat.read(after, as_version=4), done.stderr


def shown(notebook: nbformat.NotebookNode, cell: int) -> str:
    return notebook.cells[cell].outputs[-1].data["text/plain"]


@pytest.mark.timeout(300)
def test_its_cells_run(programs: Programs, tmp_path: Path, free_port: int) -> None:
    cells = (COMMAND, READ, WRITE, SPAWN.replace("29500", str(free_port)))
    notebook, _ = execute(programs, tmp_path, *cells)
    assert failed(notebook) == []
    assert "'accuracy'" in shown(notebook, 1)
    assert shown(notebook, 3) == "3.0"


@pytest.mark.timeout(300)
def test_a_function_in_a_cell_cannot_be_spawned(programs: Programs, tmp_path: Path, free_port: int) -> None:
    inside = WRITE.replace("%%writefile worker.py\n", "")
    spawn = SPAWN.replace("import worker\n", "").replace("worker.work", "work").replace("29500", str(free_port))
    notebook, said = execute(programs, tmp_path, inside, spawn, code=1)
    assert len(failed(notebook)) == 1
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert "Can't get attribute 'work' on <module '__main__' (built-in)>" in said + printed
