"""A checkpoint exists completely or not at all, and damage does not go unnoticed."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from common import checkpoint
from common.launch import UserError

STATE = {
    "parts": {"model": {"weight": torch.arange(2000.0), "bias": torch.ones(3)}},
    "metrics": {"accuracy": 0.5, "name": "値"},
    "random": [None, [1, 2, 3]],
}


def save(path: Path, state: Any = STATE) -> Path:
    checkpoint.save(path, state)
    return path


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


def test_a_checkpoint_can_be_read_back(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "step-00000001.pt")
    assert equal(checkpoint.load(path), STATE)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """150 of them: an error, or a state that is not different (in the padding of the file)."""
    path = save(tmp_path / "step-00000001.pt")
    content, draw, noticed = path.read_bytes(), random.Random(0), 0
    for _ in range(150):
        damaged, position = bytearray(content), draw.randrange(len(content))
        damaged[position] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            assert equal(checkpoint.load(path), STATE), position
        except UserError:
            noticed += 1
    assert noticed > 120


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "step-00000001.pt")
    content = path.read_bytes()
    for size in range(0, len(content), len(content) // 60):
        path.write_bytes(content[:size])
        with pytest.raises(UserError):
            checkpoint.load(path)


@pytest.mark.parametrize(
    "value", [np.float64(1), np.int64(1), np.ones(2), Path("x"), nn.Linear(1, 1)], ids=repr
)
def test_a_save_refuses_what_cannot_be_loaded(value: Any, tmp_path: Path) -> None:
    """torch.save writes it, and a requeued job would start from the beginning for ever."""
    with pytest.raises(TypeError, match="unsupported") as error:
        save(tmp_path / "step-00000002.pt", {"schedule": {"lr": value}})
    assert "safe_globals" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_two_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path / f"step-{step:08}.pt")
    names = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert names == ["step-00000010.pt", "step-00000003.pt"]
    save(tmp_path / "step-00000004.pt")  # of a run that resumed from step 3
    names = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert names == ["step-00000004.pt", "step-00000003.pt"]


def test_damaged_checkpoints_are_passed_over(tmp_path: Path) -> None:
    warnings = list[str]()
    assert checkpoint.newest(tmp_path / "missing", warnings.append) is None
    for step in (1, 2):
        save(tmp_path / f"step-{step:08}.pt", {"step": step})
    (tmp_path / "step-00000003.tmp").write_bytes(b"cut short by a kill")
    (tmp_path / "step-00000002.pt").write_bytes(b"")
    found = checkpoint.newest(tmp_path, warnings.append)
    assert found is not None
    assert found[1] == {"step": 1}
    assert len(warnings) == 1
    assert "step-00000002.pt" in warnings[0]


def test_interrupted_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "step-00000001.pt")

    def half(_: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        save(path)
    assert equal(checkpoint.load(path), STATE)


def test_a_file_is_on_the_disk_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda f: (calls.append("fsync"), sync(f)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (calls.append("rename"), replace(a, b))[1])
    save(tmp_path / "step-00000001.pt")
    assert calls[:2] == ["fsync", "rename"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("full")])
def test_full_disk_leaves_the_one_before(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "step-00000001.pt")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(UserError, match=r"cannot write .*step-00000002.pt: (No space|full)"):
        save(tmp_path / "step-00000002.pt")
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------------------------------- weights

WEIGHTS = {"layer.weight": torch.rand(3, 2), "layer.bias": torch.rand(3)}


def wrapped(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in WEIGHTS.items()}


@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS,
        wrapped("module."),
        wrapped("_orig_mod.module."),
        {"state_dict": wrapped("module."), "epoch": 3},
        {"model_state_dict": WEIGHTS, "optimizer_state_dict": {}},
        {"model": WEIGHTS},
        {"step": 4, "parts": {"model": WEIGHTS, "optimizer": {}}, "about": {}},
        {
            "step": 4,
            "parts": {"model": {}, "ema": wrapped("module.") | {"n_averaged": torch.ones(())}},
        },
    ],
    ids=lambda content: " ".join(content),
)
def test_weights_of_many_files(content: Any, tmp_path: Path) -> None:
    torch.save(content, path := tmp_path / "weights.pt")
    assert equal(checkpoint.load_weights(path)[0], WEIGHTS)


def test_weights_keep_names_and_metadata(tmp_path: Path) -> None:
    tied = {"a": WEIGHTS["layer.weight"], "b": WEIGHTS["layer.weight"], "t": torch.rand(2, 3).T}
    about = {"classes": ["猫", "dog, $x$"], "size": 8}
    checkpoint.save_weights(path := tmp_path / "best.safetensors", tied, about)
    weights, read = checkpoint.load_weights(path)
    assert equal(weights, tied)
    assert read == about
    save_file(WEIGHTS, path, {"format": "pt"})  # of another program
    assert equal(checkpoint.load_weights(path)[0], WEIGHTS)
    with pytest.raises(UserError, match="cannot write"):
        checkpoint.save_weights(tmp_path / "absent" / "best.safetensors", tied, about)


def test_own_names_of_a_model_stay(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    expected, model = Net().state_dict(), Net()
    for prefix in ("", "module.", "_orig_mod.module."):
        content = {prefix + name: value for name, value in expected.items()}
        torch.save(content, path := tmp_path / "weights.pt")
        checkpoint.load_model(path, model, {})
        assert equal(dict(model.state_dict()), dict(expected)), prefix


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "damaged or has an unknown format"),
        (LFS, "git lfs pull"),
        (b"\n<!DOCTYPE html>", "web page"),
        (b"damaged", "damaged or has an unknown format"),
    ],
)
def test_files_without_weights(
    content: bytes | None, message: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"weights{suffix}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        checkpoint.load_weights(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3}, "no weights"),
        ([1, 2], "no weights"),
        (torch.ones(2), "no weights"),
        ({"weight": torch.tensor([1.0, float("nan")])}, "NaN in weight"),
        (nn.Linear(1, 1), "contains Python objects"),
    ],
    ids=["number", "list", "tensor", "nan", "module"],
)
def test_content_without_weights(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, path := tmp_path / "weights.pt")
    with pytest.raises(UserError, match=message) as error:
        checkpoint.load_weights(path)
    assert "weights_only" not in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------- random states


def draw() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return [*numbers, torch.rand(()).item(), torch.randn(()).item(), torch.randn(33).sum().item()]


def test_random_generators_continue_from_a_file(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    path = save(tmp_path / "step-00000001.pt", {"random": checkpoint.random_state()})
    expected = [draw(), draw()]
    checkpoint.restore_random_state(checkpoint.load(path)["random"])
    assert [draw(), draw()] == expected
