"""tools.compare: what differs between runs, and results that are equal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import compare


def table(capsys: pytest.CaptureFixture[str], *runs: Path) -> dict[str, list[str]]:
    """Return the cells of each row."""
    compare.main(list(runs))
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [str(run) for run in runs]
    ends = {len(line) for line in lines}
    assert ends == {len(head)}, "columns line up"
    return {name: cells for name, *cells in map(str.split, lines)}


def result(lr: str, **changes: Any) -> dict[str, Any]:
    common = {"metrics": {"loss": 0.5, "accuracy": 0.75}, "steps": 8, "epochs": 1, "seconds": 2.5}
    machine = {"host": "gpu1", "commit": "c0ffee", "torch": "2.15", "device": "cpu", "threads": 1}
    args = {"lr": lr, "seed": "0", "batch_size": "48"}
    return {"args": args, "parameter_hash": "abc"} | common | machine | changes


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, unfinished, nothing = (tmp_path / name for name in ("a", "b", "unfinished", "nothing"))
    for folder, values in ((a, result("0.1")), (b, result("0.2", threads=2, parameter_hash="def"))):
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps(values))
    results = {"steps": ["8", "8"], "epochs": ["1", "1"], "seconds": ["2.5", "2.5"]}
    results |= {
        "parameter_hash": ["abc", "def"],
        "loss": ["0.5", "0.5"],
        "accuracy": ["0.75", "0.75"],
    }
    assert table(capsys, a, b) == {"--lr": ["0.1", "0.2"], "threads": ["1", "2"]} | results

    state = {"args": {"lr": "0.1", "seed": "3"}, "metrics": {"loss": 0.25}, "step": 6, "epoch": 0}
    (unfinished / "checkpoints").mkdir(parents=True)
    torch.save(state, unfinished / "checkpoints" / "step-00000006.pt")
    assert table(capsys, a, unfinished, nothing) == {
        "--seed": ["0", "3", "-"],
        "steps": ["8", "6", "-"],
        "epochs": ["1", "0", "-"],
        "seconds": ["2.5", "unfinished", "unfinished"],
        "parameter_hash": ["abc", "-", "-"],
        "loss": ["0.5", "0.25", "-"],
        "accuracy": ["0.75", "-", "-"],
    }
