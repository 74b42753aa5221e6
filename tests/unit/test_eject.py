"""tools.eject: the folder has what the example imports; tests/test_copy.py trains it."""

from pathlib import Path

import pytest

from tools import eject

SOURCES = {
    "examples/__init__.py": "",
    "examples/one/__init__.py": "",
    "examples/one/train.py": "import torch\nfrom common.a import f\nfrom .args import Args",
    "examples/one/args.py": 'from importlib.util import find_spec\nfind_spec("sklearn")',
    "examples/one/data.csv": "1,2",
    "examples/one/job.sbatch": "# sbatch examples/one/job.sbatch\nsrun python -m examples.one",
    "examples/one/__pycache__/train.pyc": "",
    "examples/one/further/more.py": "from .. import args\nfrom common import d",
    "examples/two/train.py": "from common import e",
    "common/__init__.py": "",
    "common/a.py": "def f():\n import common.b\n from torch.utils.tensorboard import SummaryWriter",
    "common/b.py": "from .c import g",
    "common/c.py": "import common.a",
    "common/d.py": "from PIL import Image",
    "common/e.py": "import pandas",
    "LICENSE": "Apache",
}
DEPENDENCIES = [
    "torch>=2.11",
    "pandas>=3",
    "scikit-learn[x]>=1.7",
    "tensorboard; os == 'a'",
    "pillow",
]
PROJECT = f"[project]\ndependencies = {DEPENDENCIES}\n"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root, target = tmp_path / "root", tmp_path / "target"
    for name, text in (SOURCES | {"pyproject.toml": PROJECT}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(eject, "ROOT", root)
    eject.eject(root / "examples" / "one", target)
    return target


def test_what_is_imported_comes_along(copy: Path) -> None:
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert files == {
        *("LICENSE", "README.md", "requirements.txt", ".gitignore", "one/__init__.py"),
        *("one/train.py", "one/args.py", "one/data.csv", "one/job.sbatch", "one/further/more.py"),
        *(f"common/{name}.py" for name in ("__init__", "a", "b", "c", "d")),
    }
    unchanged = [f"common/{name}.py" for name in "abcd"]
    assert all((copy / name).read_text() == SOURCES[name] for name in unchanged)
    assert (copy / "one/job.sbatch").read_text() == "# sbatch one/job.sbatch\nsrun python -m one"


def test_requirements_are_those_of_the_imports(copy: Path) -> None:
    lines = (copy / "requirements.txt").read_text().splitlines()
    assert lines == [line for line in DEPENDENCIES if not line.startswith("pandas")]


def test_nothing_is_overwritten(copy: Path) -> None:
    (repository := copy.parent / "mine").mkdir()
    with pytest.raises(FileExistsError):
        eject.eject(eject.ROOT / "examples" / "two", repository)
    assert not [*repository.iterdir()]
