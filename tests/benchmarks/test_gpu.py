"""The proof on a GPU, tried on the CPU; and that its checks can fail."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import commands, gpu_speed
from benchmarks.gpu import Args, correctness, one_by_one, ranks
from benchmarks.gpu_checks import (
    TRAININGS,
    Check,
    Failed,
    Machine,
    as_on_the_cpu,
    same_bits,
    same_losses,
    several,
)
from benchmarks.gpu_speed import WAIT, Places, bert, speed, waits
from common.launch.errors import UserError
from tests import warm
from tests.conftest import ROOT, Programs

warm.ALSO += ["transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert"]


@pytest.mark.timeout(660)
def test_every_part_works_on_the_cpu(programs: Programs, tmp_path: Path) -> None:
    """The command of a user; on two quiet cores it takes less than four minutes."""
    out = tmp_path / "proof"
    done = programs.run("-m", "benchmarks.gpu", "--device", "cpu", "--out", out, limit=600)
    found = json.loads((out / "prove-gpu.json").read_text())["checks"]
    rows = [row for part in found.values() for row in part]
    assert [row for row in rows if row["state"] != "ok"] == []
    checked = {part: " ".join(row["check"] for row in rows) for part, rows in found.items()}
    for name in TRAININGS:
        assert f"{name}: killed and resumed, the same bits" in checked["correctness"]
        assert f"{name}: 2 ranks as one" in checked["nccl"] or name == "imagenet_ddp"
    assert "JPEGs decoded in loader workers" in checked["correctness"]
    assert "ResNet-18, made-up images" in checked["speed"]
    assert "a rank is killed" in checked["nccl"]
    assert f"{len(rows)} of {len(rows)} checks passed" in done.stdout


def test_what_a_gpu_is_asked(tmp_path: Path) -> None:
    """The checks that no CPU runs, by their names."""
    machine, examples = Machine("cuda", tmp_path), tuple(TRAININGS)
    variables = dict(os.environ)
    first, *rest = [name for _, name, _ in correctness(machine, examples)]
    assert os.environ == variables, "of the tests that come later"
    assert first == "JPEGs decoded in loader workers", "would end most others"
    asked = {*rest, *(name for _, name, _ in ranks(machine, examples))}
    asked |= {name for _, name, _ in speed(Places(tmp_path, tmp_path, tmp_path), machine, examples)}
    for name in examples:
        each = ("twice, the same bits", "killed and resumed, the same bits", "as on the CPU", "2 ranks as one")
        each = (*each, "3 ranks as one", "2 ranks by gloo as one", "the host waits for the device")
        assert {f"{name}: {what}" for what in each} <= asked
    assert {"torch: three replicas on one device", "toy: both halves on one device", "the tests marked gpu"} <= asked
    assert {"the tour of all collectives, 3 ranks", "a rank is killed", "a rank hangs"} <= asked
    assert {"ResNet-50, bf16, compiled, made-up images", "BERT, 128 tokens, batches of 256"} <= asked
    assert {"ResNet-50 beside the peer, images/s", "MNIST to 99 %, from the command, seconds"} <= asked


def test_a_check_that_breaks_or_is_late_has_failed_and_the_others_go_on(tmp_path: Path) -> None:
    def breaks() -> str:
        raise KeyError("parameter_hash")

    group: list[tuple[str, Check]] = [("broken", breaks), ("good", lambda: "seen")]
    found = one_by_one(time.monotonic() + 60, group)
    assert [(row["state"], row["saw"]) for row in found] == [("FAILED", "KeyError('parameter_hash')"), ("ok", "seen")]
    assert [row["saw"] for row in one_by_one(0, group)] == ["not tried: the minutes of this part are over"] * 2
    machine = Machine("cuda", tmp_path, deadline=time.monotonic() + 0.5)
    with pytest.raises(Failed, match="not done within 0 s"):
        machine.run("slow", "timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)")


def test_waits_are_counted_by_their_place(programs: Programs, tmp_path: Path) -> None:
    """As torch warns of them; which it does only with a GPU."""
    words = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:162.)"
    (tmp_path / "waits.py").write_text(
        "import sys, torch, warnings\nsgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])\n"
        f"for step in range(3):\n    warnings.warn({words!r})\n    warnings.warn({words!r})\n    sgd.step()\n"
        f"for _ in range(9):\n    warnings.warn({words!r})\n"
        "warnings.warn('another thing')\nprint(sys.argv[1:])\n"
    )
    done = programs.run("-m", "benchmarks.host_waits", "waits", "--epochs", "2", env={"PYTHONPATH": str(tmp_path)})
    assert "another thing" in done.stderr
    assert "synchronizing" not in done.stderr
    file = os.path.relpath(tmp_path / "waits.py", ROOT)
    often, *each = WAIT.findall(done.stdout)
    assert often == ("9", f"{file}:8", "1"), "all after the last step"
    assert each == [("3", f"{file}:4", "3"), ("3", f"{file}:5", "3")]
    assert "['--epochs', '2']" in done.stdout


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


def test_of_imagenet_ddp_four_losses_are_compared_and_of_the_others_ten(tmp_path: Path) -> None:
    """With a BatchNorm at 32 pixels, later ones are rounding."""
    machine, same = Machine("cuda", tmp_path), [2.0, 1.9, 1.8, 1.7]
    for name in ("imagenet_ddp", "gan_ddp"):
        several_ranks = f"{name}-nproc-2{'-sync-bn' * (name == 'imagenet_ddp')}"
        for folder, fifth in (name, 1.6), (f"{name}-device-cpu", 1.5), (several_ranks, 1.5):
            left(tmp_path / folder, "a", [*same, fifth])
    assert as_on_the_cpu(machine, "imagenet_ddp") == "losses within 0.0e+00, backend gloo"
    assert several(machine, "imagenet_ddp", 2).startswith("losses within 0.0e+00, backend gloo")
    for check in (partial(as_on_the_cpu, machine, "gan_ddp"), partial(several, machine, "gan_ddp", 2)):
        with pytest.raises(Failed, match=r"the first losses differ by 6.*e-02"):
            check()


@pytest.mark.parametrize(("at", "fails"), [(9, False), (10, True)])
def test_a_wait_at_nearly_every_step_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, fails: bool
) -> None:
    """Of 12 steps, as resnet_pipeline has, whose timeline and ends of epochs wait at nine."""
    said = f"host wait: 500 x start.py:1, at 1 different steps\nhost wait: 40 x train.py:7, at {at} different steps"
    monkeypatch.setattr(Machine, "run", lambda *_: said)
    (tmp_path / "resnet_pipeline-waits").mkdir()
    (tmp_path / "resnet_pipeline-waits" / "result.json").write_text('{"steps": 12}')
    if fails:
        with pytest.raises(Failed, match=r"^in 12 steps: 40 x train.py:7$"):
            waits(Machine("cuda", tmp_path), "resnet_pipeline")
    else:
        assert waits(Machine("cuda", tmp_path), "resnet_pipeline") == "540 in 12 steps, none of them at every step"


def test_no_two_reviews_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are repeated would be left out, and too few steps would be left to measure."""
    monkeypatch.setattr(gpu_speed, "rate", lambda *_: "")
    bert(Machine("cuda", tmp_path), 256)
    reviews = pd.read_csv(tmp_path / "reviews-256.csv")["review"]
    assert (len(set(reviews)), set(map(len, reviews))) == (40 * 256, {126})


def test_memory_is_read_when_it_has_been_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([*(4 * ["900"]), "500", *(5 * ["20"]), "7"])
    monkeypatch.setattr(commands, "query_gpu", lambda *_: [next(used)])
    assert commands.device_memory_at_rest(0.4) == 20
    monkeypatch.setattr(commands, "query_gpu", lambda *_: [])
    assert commands.device_memory_at_rest() is None
