"""The proof on a GPU, tried on the CPU; and that its checks can fail."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import Args
from benchmarks.gpu_checks import TRAININGS, Failed, same_bits, same_losses
from common.launch.errors import UserError
from tests.conftest import ROOT, Programs


def test_it_works_on_the_cpu(programs: Programs, tmp_path: Path) -> None:
    out = tmp_path / "proof"
    done = programs.run(
        *("-m", "benchmarks.gpu", "--device", "cpu", "--out", out, "--examples", "mnist_ddp_spawn"), limit=200
    )
    found = json.loads((out / "prove-gpu.json").read_text())
    assert {part: [row["state"] for row in rows] for part, rows in found["checks"].items()} == {
        "correctness": ["ok"] * 2,  # the same bits twice, and killed and resumed
        "ranks": ["ok"] * 4,  # 2 and 3 ranks, one killed, one stopped
    }
    assert "6 of 6 checks passed" in done.stdout


def test_every_example_is_checked() -> None:
    assert set(TRAININGS) == {path.parent.name for path in ROOT.glob("examples/*/__main__.py")}


def left(folder: Path, parameters: str, losses: list[float]) -> Path:
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"parameter_hash": parameters, "backend": "gloo"}))
    lines = [json.dumps({"step": step, "loss/train": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_a_difference_is_a_failure(tmp_path: Path) -> None:
    one = left(tmp_path / "one", "a" * 64, [2.0, 1.0])
    near = left(tmp_path / "near", "b" * 64, [2.0, 1.0001])
    far = left(tmp_path / "far", "a" * 64, [2.0, 1.01])
    lost = left(tmp_path / "lost", "a" * 64, [2.0, float("nan")])
    assert same_bits(one, far) == "parameters aaaaaaaaaaaa"
    assert same_losses(one, near) == "losses within 1.0e-04, backend gloo"
    with pytest.raises(Failed, match="bbbb"):
        same_bits(one, near)
    for other in (far, lost):
        with pytest.raises(Failed, match="the first losses differ by"):
            same_losses(one, other)


def test_mistakes_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="there is something in it"):
        Args(device="cpu", out=tmp_path)
    with pytest.raises(UserError, match="--examples nothing: choose of mnist_ddp_spawn"):
        Args(device="cpu", examples=("nothing",))
