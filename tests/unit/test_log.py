"""Files of a run, also after it was killed and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.launch import UserError
from common.log import Log, draw_curves, read_points


def log(out: Path, step: int) -> Log:
    opened = Log(out, active=True)
    opened.open(step)
    return opened


def test_resumed_run_continues_the_curves(tmp_path: Path) -> None:
    """What was written after the checkpoint comes again, with the values of the resumed run."""
    first = log(tmp_path, 0)
    for step in (1, 2, 3):
        first.add(step, {"loss/train": 1.0 / step})
    first.add(3, {"loss/test": 5.0})
    first.write()
    first._events.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss/tra')  # cut short by a kill
    second = log(tmp_path, 2)
    second.add(3, {"loss/train": 0.25})
    second.write()
    second._events.close()
    points = read_points(tmp_path / "metrics.jsonl")
    expected = [(1, 1.0), (2, 0.5), (3, 0.25)]
    assert [(p["step"], p["loss/train"]) for p in points] == expected
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == expected


def test_earlier_runs_are_moved(tmp_path: Path) -> None:
    users = ["lock", "log.txt", "train.py", "data"]  # --out can be any folder
    for name in users:
        (tmp_path / name).touch()
    for name in ("model", "samples"):
        (tmp_path / name).mkdir()
        log(tmp_path, 0)._events.close()
    assert {path.name for path in tmp_path.iterdir()} == {
        *users,
        *("earlier.0", "earlier.1", "metrics.jsonl", "tensorboard"),
    }
    assert [path.name for path in (tmp_path / "earlier.0").iterdir()] == ["model"]
    (tmp_path / "earlier.0").rename(tmp_path / "elsewhere")
    log(tmp_path, 0)._events.close()
    for number in (1, 2):
        assert (tmp_path / f"earlier.{number}/metrics.jsonl").exists()


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Log(tmp_path, active=False)
    other.open(0)
    other.print0("line")
    other.warn("line")
    other.show_step(1, 2, "epoch")
    other.add(1, {"loss/train": 1.0})
    other.write()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_lines_have_no_colors_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Log(tmp_path, active=True)
    own.print0("a line")
    own.show_step(1, 2, "epoch")
    own.warn("look out")
    assert capsys.readouterr() == ("a line\n", "warning: look out\n")


def test_write_error_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = log(tmp_path, 0)
    own.add(1, {"loss/train": 1.0})

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UserError, match="cannot write .*No space left on device"):
        own.write()
    own._events.close()


@pytest.mark.parametrize(
    "points",
    [
        [{"step": 1, "loss/train": 1.0}],
        [{"step": 1, "loss/train": 1.0}, {"step": 2, "loss/train": 2.0, "test/$a^$": 0.5}],
        [{"step": 1, "test/accuracy": 1.0}],
    ],
    ids=json.dumps,
)
def test_curves(points: list[dict[str, Any]], tmp_path: Path) -> None:
    """Any run has curves, also one that ended early; names may contain what is markup elsewhere."""
    draw_curves(points, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()
