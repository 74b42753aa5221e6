"""Each example, copied with tools.eject, trains the same without this repository."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from tests import programs, ranks
from tests.programs import ROOT
from tests.reference import Case, cases
from tools.eject import eject

# Removes what `pip install --editable` of this repository has added.
CLEAN = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
"""


def import_all(folder: Path) -> None:
    """Import every module of an ejected example; only that of a missing library may fail."""
    exec(CLEAN)
    for name in [name for name in sys.modules if name.startswith(("common", "examples"))]:
        del sys.modules[name]  # imported by the references
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        try:
            assert importlib.import_module(name).__file__ == str(path)
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            assert missing not in ("common", "examples", "tests", "tools")
            assert importlib.util.find_spec(missing) is None


@pytest.mark.parametrize("case", [case for case in cases() if case.number == 0], ids=str)
def test_a_copy_trains_the_same(case: Case, data: Path, tmp_path: Path) -> None:
    example = case.example
    world_size = 2 if 2 in case.ranks() else 1
    flags = case.flags(data / str(case))
    original = ranks.run(example, world_size, flags, out=tmp_path / "original").done()

    copy, site = tmp_path / "copy", tmp_path / "site"
    eject(ROOT / "examples" / example, copy)
    ranks.call(import_all, copy, folder=tmp_path / "log")
    site.mkdir()
    (site / "sitecustomize.py").write_text(CLEAN)
    words = ["-m", example, "--nproc", str(world_size), "--device", "cpu", "--precision", "fp32"]
    env = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    out = ranks.Training(tmp_path / "out", [], [])
    programs.run(sys.executable, *words, "--out", out.out, *flags, cwd=copy, env=env).done()
    assert out.losses[:10] == original.losses[:10]
    assert len(out.losses) == len(original.losses)
    assert out.result["parameter_hash"] == original.result["parameter_hash"]


def test_bookkeeping_that_touches_the_training_is_seen(tmp_path: Path) -> None:
    flags = ("--epochs", "1")
    meddling = ("common.run", "yield batch", "yield [batch[0] * 1.01, *batch[1:]]")
    runs = [
        ranks.run("your_model", 2, flags, out=tmp_path / str(number), mutate=mutate).done()
        for number, mutate in enumerate(([], [meddling]))
    ]
    assert runs[0].losses[0] != runs[1].losses[0]
