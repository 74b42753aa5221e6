"""Plant realistic mistakes one at a time, and run the tests that must turn red.

    python -m tests.mutants              # all of tests/mutants/*.toml
    python -m tests.mutants core --only checkpoint --jobs 2

A mutant is a table of the file: `file`, `old` (occurs exactly once), `new`, and either `tests`,
arguments for pytest, or `layer`, one of LAYERS. Each is planted in a copy of the working tree.
The exit code is 0 if at least 95% turn a test red; those that do not are printed with their texts,
and the numbers of each layer.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.conftest import DATA

ROOT = Path(__file__).parents[1]
GOAL = 0.95
LAYERS = {name: f"tests/test_{name}.py" for name in ("parity", "resume", "ends", "launchers")}
LAYERS |= {name: f"tests/{name}" for name in ("form", "deploy", "pages")}
LEFT_OUT = (".git", ".venv", "runs", "site", "__pycache__", ".tox", ".ruff_cache", "*.egg-info")


@dataclass(frozen=True)
class Mutant:
    """One mistake, and where it must be noticed."""

    area: str
    file: str
    old: str
    new: str
    pytest: tuple[str, ...]

    def __str__(self) -> str:
        lines = self.new.strip().splitlines() or ["(deleted)"]
        return f"{self.area}: {self.file}: {lines[0].strip()}"


def read(area: str) -> list[Mutant]:
    """Read the mutants of an area."""
    tables = tomllib.loads((ROOT / f"tests/mutants/{area}.toml").read_text())["mutant"]
    return [Mutant(area, t["file"], t["old"], t["new"], pytest_arguments(t)) for t in tables]


def pytest_arguments(table: dict[str, Any]) -> tuple[str, ...]:
    """Return the tests of a table; those of the layer `unit` are named after the file."""
    if "tests" in table:
        return tuple(table["tests"])
    parts = Path(table["file"]).parts
    folder, file = parts[0], parts[-1]
    if table["layer"] == "unit":
        own = (
            f"examples/test_{parts[1]}" if folder == "examples" else f"unit/test_{Path(file).stem}"
        )
        return (f"tests/{own}.py",)
    select = ("-k", parts[1]) if folder == "examples" else ("-k", "mnist_ddp_spawn")
    return (LAYERS[table["layer"]], *(select if table["layer"] in ("parity", "resume") else ()))


@contextmanager
def planted(tree: Path, mutant: Mutant) -> Generator[None]:
    """Change a file in a copy of the tree, and change it back."""
    path = tree / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{text.count(mutant.old)} times in {path}: {mutant.old}"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(text)


def is_killed(tree: Path, arguments: tuple[str, ...]) -> bool:
    """Return True if a test fails, its module cannot be imported, or the interpreter crashes."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"DDP_TEST_DATA": str(DATA)}  # the copy of the tree has none beside it
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, check=False)
    return done.returncode not in (0, 4, 5)  # 4 and 5: the arguments select no test


def main() -> int:
    """Plant all mutants of the areas."""
    areas = sorted(path.stem for path in (ROOT / "tests/mutants").glob("*.toml"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("areas", nargs="*", default=areas)
    parser.add_argument("--only", default="", help="part of a file's name, or of the new text")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    mutants = [m for area in options.areas for m in read(area)]
    mutants = [m for m in mutants if options.only in m.file + m.new]
    trees: SimpleQueue[Path] = SimpleQueue()

    def plant(mutant: Mutant) -> bool:
        tree, began = trees.get(), time.monotonic()
        with planted(tree, mutant):
            killed = is_killed(tree, mutant.pytest)
        trees.put(tree)
        seconds = time.monotonic() - began
        print(f"{'killed' if killed else 'SURVIVED':8} {seconds:4.0f} s  {mutant}", flush=True)
        return killed

    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.jobs):
            tree = Path(folder) / str(number) / ROOT.name
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
            trees.put(tree)
        with ThreadPoolExecutor(options.jobs) as pool:
            killed = list(pool.map(plant, mutants))
    for mutant in (m for m, k in zip(mutants, killed, strict=True) if not k):
        print(
            f"\nsurvived: {mutant.file}, {' '.join(mutant.pytest)}\n- {mutant.old}\n+ {mutant.new}"
        )
    layers = [Path(mutant.pytest[0]).parts[1].removesuffix(".py") for mutant in mutants]
    for layer in sorted({*layers}):
        own = [k for k, other in zip(killed, layers, strict=True) if other == layer]
        print(f"{layer:14} {sum(own):4} of {len(own)} killed")
    print(f"\n{sum(killed)} of {len(killed)} killed ({sum(killed) / len(killed):.0%})")
    return int(sum(killed) < GOAL * len(killed))


if __name__ == "__main__":
    sys.exit(main())
