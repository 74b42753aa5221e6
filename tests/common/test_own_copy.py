"""An example's folder, copied to be changed: it runs itself, or says why not."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, Programs

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
STARTS = {
    "package": ("-m", "mytrain"),
    "module": ("-m", "mytrain.train"),
    "file": ("mytrain/train.py",),
    "torchrun": (*TORCHRUN, "-m", "mytrain"),
    "torchrun, file": (*TORCHRUN, "mytrain/train.py"),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of mnist_ddp_spawn in which training ends at once."""
    shutil.copytree(ROOT / "examples" / "mnist_ddp_spawn", tmp_path / "mytrain")
    train = tmp_path / "mytrain" / "train.py"
    text = train.read_text()
    begins = "def train(args: Args, device: torch.device) -> None:\n"
    assert begins in text
    docstring = text.split(begins)[1].split("\n")[0]
    changed = f'{begins}{docstring}\n    raise UserError("this is the copy")\n'
    text = text.replace(f"{begins}{docstring}\n", changed)
    train.write_text(text.replace("import torch\n", "import torch\nfrom common.launch.errors import UserError\n", 1))
    return tmp_path


@pytest.mark.parametrize("start", STARTS)
def test_a_copy_does_not_run_the_original(programs: Programs, copy: Path, start: str) -> None:
    env, code = {"PYTHONPATH": f"{copy}:{ROOT}"}, 1 if "torchrun" in start else 2
    run = (*STARTS[start], "--dry-run", "--out", copy / "out")
    refused = programs.run(*run, cwd=copy, env=env, code=code)
    lines = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    file = copy / "mytrain" / ("train.py" if start in ("module", "file", "torchrun, file") else "__main__.py")
    original = ROOT / "examples" / "mnist_ddp_spawn" / "train.py"
    assert lines == [
        f"error: {file} is a copy that would run {original}: replace examples.mnist_ddp_spawn by the copy's own name "
        f"in all its files"
    ]
    for path in (copy / "mytrain").glob("*.py"):
        path.write_text(path.read_text().replace("examples.mnist_ddp_spawn", "mytrain"))
    runs = programs.run(*run, cwd=copy, env=env, code=code)
    assert [line for line in runs.stderr.splitlines() if line.startswith("error: ")] == ["error: this is the copy"]


def test_torchrun_does_not_end_rank_0_before_it_has_said_what_is_wrong(programs: Programs, copy: Path) -> None:
    train = copy / "mytrain" / "train.py"
    later = "import os, time\ntime.sleep(2 if os.environ['RANK'] == '0' else 0)\n"
    train.write_text(later + train.read_text())
    refused = programs.run(*STARTS["torchrun, file"], cwd=copy, env={"PYTHONPATH": f"{copy}:{ROOT}"}, code=1)
    assert f"error: {train} is a copy that would run" in refused.stderr
