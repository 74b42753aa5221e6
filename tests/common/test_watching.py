"""What a user watches and compares: the line of an epoch, pictures, trackers, results kept aside, comparisons."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from common.compare.page import compare, panels_of
from common.compare.runs import Left, grouped
from common.launch.who.table import columns
from common.top import live
from common.train import meters
from common.train.curves import draw_curves, draw_panels, limits, spread
from common.train.greet import too_large
from common.train.lines import duration, epoch_line, far_above
from common.train.log import Log
from common.train.state import Options, TrainState
from common.train.summary import title
from examples.your_model.args import Args
from tests.conftest import ROOT, Programs
from tests.machine import here

POINTS = [
    *((step, {"loss/train": 3 / step, "loss/same": 0.5, "loss/generator": 0.5}) for step in range(1, 41)),
    *(
        (step, {"loss/test": 2 / step, "test/accuracy": 1 - 1 / step, "test/f1": 0.9, "speed/images_per_second": 9.0})
        for step in (10, 20, 40)
    ),
]


def test_an_epoch_is_a_line_of_80_columns() -> None:
    losses = {"loss": 0.66123, "test": 0.341}
    line = epoch_line("epoch 3/20", losses, ("accuracy", 0.9142), (2750.4, "images"), 12.3, True)
    assert line == "epoch 3/20  loss 0.661  test 0.341  acc 91.42%  2,750 img/s  12 s left  *best*"
    assert len(line) <= 79
    shorter = epoch_line("epoch 100/2000", losses, ("accuracy", 1.0), (1234567, "reviews"), 9e5, True)
    assert shorter == "epoch 100/2000  test 0.341  acc 100.00%  1,234,567 reviews/s  *best*"
    losses = {"loss": 0.504, "test": 0.0818}
    long = epoch_line("epoch 1/2000", losses, ("accuracy", 1.0), (814, "images"), 240, True)
    assert long == "epoch 1/2000  loss 0.504  test 0.0818  acc 100.00%  814 img/s  *best*", "the time is left out first"
    gan = epoch_line(
        "epoch 60/60", {"loss": 1.3862, "test": None}, ("frechet_distance", 1.595), (None, "images"), 0, False
    )
    assert gan == "epoch 60/60  loss 1.39  frechet_distance 1.595"


def test_the_time_left_follows_from_all_evaluations_but_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which imports libraries."""
    clock, left = [0.0], []
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    counted = meters.Meters(Log(tmp_path, active=False), "images")
    counted.seconds["startup"] = 1.0
    for epoch, evaluation in enumerate((90.0, 5.0, 7.0)):
        counted.begin(f"epoch {epoch + 1}/5", 4, 5, TrainState(epoch=epoch, step=4 * epoch))
        for _ in counted.training(iter(range(4))):
            clock[0] += 2.0
            counted.step(6)
        clock[0] += evaluation
        counted.evaluated()
        left.append(counted.seconds_left)
    assert left == [16 * 2.0, 12 * 2.0 + 3 * 5.0, 8 * 2.0 + 2 * 5.0]


def test_steps_of_epochs_that_are_left_out_are_not_left(tmp_path: Path) -> None:
    """--start-epoch 3 of 5, in the middle of the second after it."""
    counted = meters.Meters(Log(tmp_path, active=False), "images")
    counted.begin("epoch 5/5", 4, 5, TrainState(epoch=4, batch=1, step=5))
    assert counted.total_steps == 8


def test_an_evaluation_that_comes_again_is_recorded_once(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss/train": 2.0}, {"step": 2, "loss/train": 1.0}, {"step": 2, "test/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for evaluated in (True, False):
        Log(tmp_path, active=True).start(2, resumed=True, evaluated=evaluated)
        found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert found == lines[: 3 if evaluated else 2]


@pytest.mark.usefixtures("alone")
def test_the_first_line_of_progress_counts_from_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [5.0]
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: clock[0], time=lambda: clock[0]))
    monkeypatch.setattr(meters, "current", lambda: SimpleNamespace(started=0.0))
    counted = meters.Meters(Log(tmp_path, active=True), "images")
    counted.begin("epoch 1/1", 4, 1, TrainState())
    for _ in counted.training(iter(range(4))):
        clock[0] += 2.0
        counted.loss(torch.tensor(0.5))
        counted.step(6)
    counted.progress("epoch 1/1, step 4/4", 4)
    assert capsys.readouterr().out == "epoch 1/1, step 4/4: loss 0.5000, 3.0 images/s, waited 0% for input\n"


def test_columns_are_as_wide_as_their_widest_word() -> None:
    assert columns([("rank", "node"), ("0", "a-long-name"), ("10", "b")]) == "rank  node\n0     a-long-name\n10    b"


def test_speed_and_waiting_are_those_since_the_table_before() -> None:
    """However short that is; of a rank that was not there before, they are not known."""
    state = {"rank": 0, "node": 0, "loads": True, "memory": 2e6, "peak": 0, "loss": 0.5, "step": 9}
    first, second = ({"now": now, "samples": samples, "waited": now / 4} for now, samples in ((1.0, 30), (1.5, 50)))
    row = live([state | second], [state | first]).splitlines()[1].split()
    assert row == ["0", "0", "9", "0.5000", "40.0", "25%", "2", "MB", "-", "data"]
    assert live([state | second], [{"rank": 0}]).splitlines()[1].split()[4:6] == ["-", "-"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (99, "99 s"), (101, "2 min"), (3599, "1 h 00 min"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_batch_larger_than_the_data_is_said() -> None:
    data = SimpleNamespace(facts={"train_samples": 1436})
    assert too_large(2000, data).startswith("batch 2,000 is larger than the training set (1,436 samples): ")
    assert (too_large(1436, data), too_large(5, object())) == ("", "")


def test_a_loss_far_above_the_first_is_said() -> None:
    words = "epoch 1/3: the mean loss is 2.24e+07, that of the first step was 2.5: training diverges; lower --lr"
    assert far_above("epoch 1/3", 2.24e7, 2.5) == words
    assert far_above("epoch 1/3", 25.1, 2.5)
    assert not far_above("epoch 1/3", 24.9, 2.5)
    assert not far_above("epoch 1/3", 2.0, 0.01), "trained weights begin with a small loss"
    assert far_above("epoch 1/3", 10.1, 0.01)
    assert not far_above("epoch 1/3", None, None), "only rank 0 has the losses; a program may log none"


def test_an_epoch_that_diverges_is_said_by_one_rank(programs: Programs, tmp_path: Path) -> None:
    """Its last epoch looks harmless: the loss falls with the learning rate, the accuracy is chance."""
    done = programs.run(
        *("-m", "examples.mnist_ddp_spawn", "--precision", "fp32", "--nproc", 2),
        *("--lr", 3, "--epochs", 3, "--out", tmp_path),
    )
    warned = re.findall(r"^warning: (epoch \d/3): the mean loss is (\S+), that of the first", done.stderr, re.MULTILINE)
    means = {f"epoch {n}/3": float(x) for n, x in re.findall(r"^epoch (\d)/3  loss (\S+)", done.stdout, re.MULTILINE)}
    assert warned == [(label, f"{mean:.3g}") for label, mean in means.items() if mean > 25]
    assert warned
    assert "epoch 3/3" not in dict(warned)


def test_one_outlier_does_not_flatten_a_curve() -> None:
    values = [12.9, 2.3, 2.1, 1.9, 1.8, 1.7, 1.6]
    low, high = limits(values)
    assert low < 1.6
    assert 2.3 < high < 3
    assert limits([2.3, 1.2, 0.8, 0.5, 0.4, 0.3]) == (float("-inf"), float("inf")), "an ordinary descent is shown whole"
    assert limits([1.0, 1.0, 1.0, 1.0, 5.0]) == (float("-inf"), float("inf")), "nothing is left of a flat line"


@pytest.mark.parametrize("places", [[0.5, 0.5, 0.5], [0.0, 1.0, 0.99, 0.98], [-3.0, 0.2, 4.0]])
def test_names_at_the_ends_of_lines_do_not_overlap(places: list[float]) -> None:
    moved = spread(places, 0.07)
    ordered = sorted(moved)
    assert all(above - below > 0.0699 for below, above in pairwise(ordered))
    assert all(-0.01 <= place <= 1.01 for place in moved)
    assert [moved[n] for n in sorted(range(len(places)), key=places.__getitem__)] == ordered


@pytest.mark.usefixtures("alone")
def test_a_title_says_program_model_data_and_ranks() -> None:
    run: Any = SimpleNamespace(args=Args(), options=Options(), parts={"model": nn.Linear(1, 1)}, data="digits")
    assert title(run) == "your_model: Linear on digits, 1 rank"
    run.parts = {"model": nn.ModuleDict()}
    assert title(run) == "your_model: digits, 1 rank"
    run.options = Options(what="a BERT on reviews")
    assert title(run) == "your_model: a BERT on reviews, 1 rank"


def test_a_picture_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accuracy alone, above the losses, whole steps, no legend, the title that is given."""
    figures, save = list[Any](), Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or save(self, *a, **k))
    draw_curves(tmp_path / "curves.png", [*POINTS, (41, {"loss/train": 900.0})], "bert on reviews", 0.1)
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 600
    (figure,) = figures
    above, below = figure.axes
    assert (above.get_title("left"), below.get_title("left")) == (
        "test set",
        "loss (train: with label smoothing 0.1)",
    )
    assert figure.get_suptitle() == "bert on reviews"
    assert [axis.get_legend() for axis in figure.axes] == [None, None]
    assert {text.get_text() for text in above.texts} == {"accuracy"}
    assert {text.get_text() for text in below.texts} == {"train", "generator", "test", "900 ↑"}
    assert list(above.lines[-1].get_ydata()) == pytest.approx([0.9, 0.95, 0.975])
    assert all(float(tick).is_integer() for tick in below.get_xticks())
    assert below.get_ylim()[1] < 4


def test_a_picture_with_a_very_long_name_is_drawn(tmp_path: Path) -> None:
    """A folder's path is the name of a run that is compared."""
    draw_panels(tmp_path / "curves.png", {"loss": {"runs/" + "long" * 50: [(1, 2.0), (2, 1.0)]}}, "two runs")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 600


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Modules in place of the real ones, which note what they are told."""
    said: list[tuple[Any, ...]] = []
    run = SimpleNamespace(
        log=lambda values, step: said.append((step, dict(values))),
        finish=lambda exit_code: said.append(("end", exit_code)),
    )
    wandb = SimpleNamespace(
        init=lambda **more: said.append(("init", more)) or run, teardown=lambda: said.append(("gone",))
    )
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: name,
        create_run=lambda experiment, run_name: SimpleNamespace(info=SimpleNamespace(run_id="7")),
        log_batch=lambda run, params=(), metrics=(): said.extend([*params, *metrics]),
        set_terminated=lambda run, status: said.append(("end", status)),
    )
    entities = SimpleNamespace(Param=lambda *words: words, Metric=lambda name, value, _, step: (step, {name: value}))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda uri: client, entities=entities))
    return said


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
@pytest.mark.parametrize("failed", [False, True])
def test_a_tracker_gets_what_metrics_jsonl_gets(tmp_path: Path, fakes: list[Any], kind: str, failed: bool) -> None:
    log = Log(tmp_path, active=True)
    log.start(0, resumed=False)
    log.tracker.start(kind, "gan_ddp", {"lr": 0.1}, tmp_path)
    for step, values in POINTS[:5]:
        log.scalars(step, values)
    log.write_lines()
    log.write_events()
    for step, values in POINTS[5:]:
        log.scalars(step, values)
    log.close(KeyboardInterrupt() if failed else None)
    sent: dict[int, dict[str, float]] = {}
    for step, *values in fakes:
        if isinstance(step, int):
            sent[step] = sent.get(step, {}) | values[0]
    written: dict[int, dict[str, float]] = {}
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        written[step] = written.get(step, {}) | record
    assert sent == written
    assert len(sent) == 40
    ends = {"wandb": [("end", int(failed)), ("gone",)], "mlflow": [("end", "FAILED" if failed else "FINISHED")]}
    assert fakes[-len(ends[kind]) :] == ends[kind]
    assert ("lr", "0.1") in fakes or fakes[0][1]["config"] == {"lr": 0.1}


def test_a_tracker_that_fails_is_given_up(
    tmp_path: Path, fakes: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    log = Log(tmp_path, active=True)
    log.start(0, resumed=False)
    log.tracker.start("wandb", "gan_ddp", {}, tmp_path)
    log.scalars(1, {"loss/train": 1.0})
    log.close(None)
    warning = "warning: --track wandb ends here (no route to host); metrics.jsonl has all values\n"
    assert capsys.readouterr().err == warning
    assert fakes == []
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss/train": 1.0}\n'


def test_results_of_an_earlier_run_are_kept_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        log = Log(tmp_path, active=True)
        log.start(0, resumed=False)
        log.scalars(1, {"loss/train": float(number)})
        log.close(None)
        (tmp_path / "result.json").write_text(json.dumps(number))
        (tmp_path / "model.safetensors").touch()  # of --survive
        (tmp_path / "mine.txt").write_text("not a result")
    Log(tmp_path, active=True).start(0, resumed=False)
    assert [json.loads((tmp_path / f"results.{n}" / "result.json").read_text()) for n in (1, 2)] == [1, 2]
    for number in (1, 2):
        aside = tmp_path / f"results.{number}"
        moved = {"result.json", "metrics.jsonl", "tensorboard", "model.safetensors"}
        assert {path.name for path in aside.iterdir()} == moved
        assert (aside / "metrics.jsonl").read_text() == f'{{"step": 1, "loss/train": {float(number)}}}\n'
    assert f"results of an earlier run were moved to {tmp_path}/results.2\n" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"results.1", "results.2", "metrics.jsonl", "mine.txt"}
    Log(tmp_path, active=True).start(0, resumed=False)
    assert not (tmp_path / "results.3").exists(), "a run that has not written anything leaves nothing aside"


def a_run(folder: Path, lr: float | None, accuracy: float, host: str) -> Path:
    folder.mkdir(parents=True)
    arguments = {"lr": lr, "epochs": 3, "out": str(folder), "cuts": [], "world_size": -1}
    result = {"arguments": arguments, "metrics": {"accuracy": accuracy}, "host": host, "argv": [str(folder)]}
    result = {**result, "epochs": 3, "world_size": len(host)}
    (folder / "result.json").write_text(json.dumps({**result, "peak_memory_mb": [{"host": 10}, {"host": 12}]}))
    lines = [{"step": step, "loss/test": 1 / step, "test/accuracy": accuracy} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    return folder


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [a_run(tmp_path / "a", 0.1, 0.9, "one"), a_run(tmp_path / "b", None, 0.95, "<two>")]
    compare(runs, tmp_path / "out")
    rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert rows[:3] == [["what differs", "a", "b"], ["arguments"], ["lr", "0.1", "not given"]]
    assert rows[3:5] == [["results"], ["accuracy", "0.9", "0.95"]]
    assert rows[5:8] == [["machine and data"], ["host", "one", "<two>"], ["world_size", "3", "5"]]
    assert rows[9] == ["3 other arguments are the same; the page lists them"]
    assert rows[10] == ["1 other results are the same: peak_memory_mb.host 12"]
    assert [row[0] for row in rows[12:]] == ["curves:", "page:"], "nothing else differs"
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "<tr><td>host<td>one<td>&lt;two&gt;\n" in page
    assert page.index("<td>lr") < page.index("<img") < page.index("<td>world_size<td>-1"), "what differs stands first"
    assert "http" not in page, "it needs nothing but itself"
    with Image.open(tmp_path / "out" / "compare.png") as picture:
        assert picture.height > 500  # two panels
    assert grouped({"peak_memory_mb": [{"host": 10}, {"host": 12}]})["results"] == {"peak_memory_mb.host": "12"}


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        (["accuracy", "f1"], ["test accuracy"]),
        (["frechet_distance", "f1"], ["test frechet_distance", "test f1"]),
    ],
)
def test_of_several_metrics_the_accuracy_alone_is_compared(metrics: list[str], shown: list[str]) -> None:
    line = [(1, 0.5)]
    runs = [Left(name, {}, {f"test/{metric}": line for metric in metrics}) for name in "ab"]
    assert panels_of(runs) == {title: {"a": line, "b": line} for title in shown}


def test_equal_results_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one wants to know of a run that was resumed, and of the other one."""
    runs = [a_run(tmp_path / name, 0.1, 0.9861, "one") for name in ("straight", "resumed")]
    for starts, run in enumerate(runs, 1):
        result = json.loads((run / "result.json").read_text())
        result |= {
            "starts": starts,
            "started": f"2026-11-26T10:0{starts}:00+00:00",
            "steps": 7,
            "seconds": 2,
            "parameter_hash": "0123456789abcdef",
        }
        (run / "result.json").write_text(json.dumps(result))
    compare(runs, tmp_path / "out")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "nothing differs"
    same = "5 other results are the same: accuracy 0.9861, steps 7, parameter_hash 0123456789ab…, ..."
    assert said[2:4] == ["4 other arguments are the same; the page lists them", same]


def test_a_run_that_has_not_finished_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not as a table of everything that it does not say."""
    runs = [a_run(tmp_path / name, 0.1, 0.9, "one") for name in ("a", "b", "resumed")]
    (runs[2] / "result.json").unlink()
    line = "resumed has no result.json: it has not finished, so only its curves are compared"
    compare([runs[0], runs[2]], tmp_path / "out")
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [line, ""]
    assert [word.split()[0] for word in said[2:]] == ["curves:", "page:"]
    page = (tmp_path / "out" / "compare.html").read_text()
    assert f"<p>{line}</p>" in page
    assert "<td>" not in page
    compare(runs, tmp_path / "out")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "nothing differs"
    assert line in said


def test_nobody_has_to_read_a_comparison(tmp_path: Path) -> None:
    for name in "ab":
        a_run(tmp_path / name, 0.1, 0.9, name)
    command = f"{sys.executable} -m common.compare {tmp_path}/a {tmp_path}/b --out {tmp_path}/out | true"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=here(60))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "compare.html").exists()


def test_a_folder_without_a_run_is_named(programs: Programs, tmp_path: Path) -> None:
    said = programs.run("-m", "common.compare", tmp_path, code=2).stderr
    assert said == f"error: {tmp_path} is not the folder of a run: it has no metrics.jsonl\n"
    assert programs.run("-m", "common.compare", code=2).stderr.startswith("error: give the folders of two runs")
