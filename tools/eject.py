"""Copy an example into a folder that runs without this repository.

    python -m tools.eject examples/your_model my_project
    cd my_project
    pip install -r requirements.txt
    torchrun --standalone --nproc-per-node 2 -m your_model

The folder contains the example, the files from `common` that it needs, LICENSE, requirements.txt,
README.md and .gitignore.
"""

import ast
import re
import shutil
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from importlib.util import resolve_name
from pathlib import Path

import tyro
from tyro.conf import Positional

ROOT = Path(__file__).parents[1]
README = "Run `pip install -r requirements.txt`, then `python -m {name} --nproc 2`.\n"


def imported_names(file: Path) -> Iterator[str]:
    """Yield the absolute names that a file imports, or passes to functions like `find_spec`."""
    package = ".".join(file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            yield str(node.value)


def modules_of(name: str) -> Iterator[Path]:
    """Yield the files in this repository that `import NAME` runs: the module and its packages."""
    path = ROOT
    for part in name.split("."):
        path /= part
        yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())


def requirements(names: set[str]) -> list[str]:
    """Return this project's dependencies that provide the imported names."""
    distributions = packages_distributions()  # maps sklearn to scikit-learn, for example
    parts = {part for name in names for part in name.split(".")}  # packages and submodules
    used = {found.lower() for part in parts for found in distributions.get(part, [])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line for line in project["dependencies"] if re.split(r"[\[<>=;]", line)[0] in used]


def eject(example: Positional[Path], target: Positional[Path]) -> None:
    """Copy an example into a folder that runs without this repository.

    Args:
        example: a folder in this repository, such as examples/your_model.
        target: the new folder.
    """
    name = example.resolve().name
    target.mkdir(parents=True)
    shutil.copytree(example, target / name, ignore=shutil.ignore_patterns("__pycache__", "README*"))
    for script in (target / name).rglob("*.sbatch"):  # the copy is not in `examples`
        script.write_text(re.sub(r"\bexamples[./]", "", script.read_text()))
    files, names = sorted(example.resolve().rglob("*.py")), set[str]()
    for file in files:  # grows during the loop
        names |= set(imported_names(file))
        files += {module for each in names for module in modules_of(each)}.difference(files)
    (target / "common").mkdir()
    for file in set(files).intersection(ROOT.glob("common/*.py")):
        shutil.copy(file, target / "common")
    shutil.copy(ROOT / "LICENSE", target)
    (target / "requirements.txt").write_text("\n".join(requirements(names)) + "\n")
    (target / "README.md").write_text(README.format(name=name))
    (target / ".gitignore").write_text("/runs/\n/data/\n__pycache__/\n")


if __name__ == "__main__":
    tyro.cli(eject, prog="python -m tools.eject")
