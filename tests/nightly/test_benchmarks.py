"""Every benchmark in its quick form, which takes up to two minutes."""

from pathlib import Path

import pytest

from tests import programs
from tests.conftest import DATA

pytestmark = pytest.mark.nightly
FOLDER = Path(__file__).parents[2] / "benchmarks"
DEVICE = ("gpu", "host_waits")
MODULES = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "harness", "report"}
NAMES = [
    pytest.param(name, marks=[pytest.mark.data] * (name in ("bert", "imagenet", "mnist")))
    for name in sorted(MODULES - {*DEVICE})
]


@pytest.mark.parametrize("name", NAMES)
def test_quick_form_measures_and_saves_nothing(name: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}
    words = (f"benchmarks.{name}", "--quick", "--data", DATA)
    done = programs.run(*programs.PYTHON, *words).done()
    assert "round 1/1" in done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}


@pytest.mark.parametrize("name", DEVICE)
def test_without_a_device_there_is_one_line(name: str) -> None:
    done = programs.run(
        *programs.PYTHON, f"benchmarks.{name}", "gan_ddp", env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert (done.code, done.stderr) == (1, "error: torch finds no CUDA device\n")
