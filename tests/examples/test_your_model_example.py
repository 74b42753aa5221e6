"""your_model, the template: exact for any number of ranks, resumable, and one frame for two tasks."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, Programs
from tests.runs import Eventually, losses, mutated, newest_step, predictions, result, slow

FOLDER = ROOT / "examples" / "your_model"
PROGRAMS = {"train": "examples.your_model", "language_model": "examples.your_model.language_model"}
SMALL = {
    "train": ("--precision", "fp32", "--epochs", 2),
    "language_model": ("--precision", "fp32", "--limit-steps", 16),
}
PLACES = ("YOUR DATA", "YOUR MODEL", "YOUR LOSS", "YOUR METRIC")


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_train_the_same(programs: Programs, tmp_path: Path, name: str) -> None:
    """3 does not divide the datasets: padding stays out of the loss, and every test sample counts once."""
    for ranks in (1, 2, 3):
        done = programs.run("-m", PROGRAMS[name], "--nproc", ranks, "--out", tmp_path / str(ranks), *SMALL[name])
        assert "find_unused_parameters" not in done.stderr, "torch warns of it where all parameters are used"
    one, *others = (tmp_path / str(ranks) for ranks in (1, 2, 3))
    for other in others:
        torch.testing.assert_close(losses(other), losses(one), rtol=1e-4, atol=1e-6)
        if name == "train":
            assert predictions(other) == predictions(one)
            assert len(predictions(one)) == 1 + 143  # a quarter of 569, and the header
            assert result(other)["metrics"] == result(one)["metrics"]
        else:
            bits = [result(out)["metrics"]["bits_per_character"] for out in (one, other)]
            assert bits[0] == pytest.approx(bits[1], rel=1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_learns(programs: Programs, tmp_path: Path, name: str) -> None:
    epochs = 3 if name == "language_model" else 20
    programs.run("-m", PROGRAMS[name], "--nproc", 2, "--epochs", epochs, "--out", tmp_path)
    metrics = result(tmp_path)["metrics"]
    if name == "train":
        assert metrics["accuracy"] > 0.95
    else:
        assert metrics["bits_per_character"] == metrics["best_bits_per_character"] < 3.5  # at first, 6.6


def test_a_model_that_comes_to_evaluate_is_trained(programs: Programs, tmp_path: Path) -> None:
    """As from_pretrained gives it: the same training, with dropout from the first epoch."""
    layers = "nn.Sequential(nn.Linear(columns, 32), nn.GELU(), nn.Linear(32, 2))"
    hashes = []
    for number, ending in enumerate(("", ".eval()")):
        mine = layers.replace("nn.GELU(), ", "nn.Dropout(), ") + ending
        folder = mutated(tmp_path / f"copy{number}", ("examples/your_model/train.py", layers, mine))
        out = tmp_path / f"out{number}"
        programs.run("-m", "examples.your_model", "--epochs", 1, "--out", out, cwd=folder)
        hashes.append(result(out)["parameter_hash"])
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_resumes_bit_for_bit(programs: Programs, tmp_path: Path, eventually: Eventually, name: str) -> None:
    """Stopped once, then killed once; with three ranks, where the order of additions matters."""
    run = ("-m", PROGRAMS[name], "--nproc", 3, *SMALL[name], "--checkpoint-every", 3, "--out")
    programs.run(*run, tmp_path / "whole")
    broken, slowed = tmp_path / "broken", mutated(tmp_path / "slow", slow(0.25))
    first = programs.start(*run, broken, cwd=slowed)
    eventually(lambda: newest_step(broken) >= 3, 60, "a checkpoint")
    first.send_signal(signal.SIGTERM)
    programs.finish(first, 143)
    step = newest_step(broken)
    second = programs.start(*run, broken, "--resume", "auto", cwd=slowed)
    eventually(lambda: newest_step(broken) > step, 60, "another checkpoint")
    programs.kill()
    second.communicate()
    programs.run(*run, broken, "--resume", "auto")
    assert result(broken)["parameter_hash"] == result(tmp_path / "whole")["parameter_hash"]
    assert losses(broken) == losses(tmp_path / "whole")


def test_an_evaluation_is_recorded_once_even_if_it_is_done_twice(programs: Programs, tmp_path: Path) -> None:
    """Killed after the evaluation, before its checkpoint: it goes on from the one before."""
    run = ("-m", "examples.your_model", "--epochs", 2, "--checkpoint-every", 9, "--out", tmp_path / "out")
    saved = 'list(run.args.out.glob("checkpoints/step-*.pt"))'
    kill = f"    import os, time\n    while not {saved}:\n        time.sleep(0.01)\n    os.kill(os.getpid(), 9)\n"
    folder = mutated(tmp_path / "copy", ("common/train/summary.py", "    return better\n", kill))
    done = programs.run(*run, cwd=folder, code=-signal.SIGKILL)
    assert "epoch 1/2" in done.stdout
    said = programs.run(*run, "--resume", "auto").stdout
    assert "at step 9\n" in said, "of which an epoch has 9"
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "test/accuracy" in line]
    assert steps == [result(tmp_path / "out")["steps"] // 2, result(tmp_path / "out")["steps"]]


def test_a_restart_takes_no_checkpoint_of_an_earlier_run(programs: Programs, tmp_path: Path) -> None:
    """torchrun's second attempt, after one that died before it came to its checkpoints, starts afresh, too."""
    flags = ("-m", "examples.your_model", "--epochs", 1, "--out", tmp_path / "out")
    programs.run(*flags)
    die = "    data = load_data()\n    import os\n    os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os._exit(7)\n"
    folder = mutated(tmp_path / "copy", ("examples/your_model/train.py", "    data = load_data()\n", die))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1)
    said = programs.run(*torchrun, *flags, cwd=folder).stdout
    assert "results of an earlier run were moved to" in said
    assert "resumed from" not in said
    assert "epoch 1/1" in said


def frame(name: str) -> list[str]:
    """A program without its docstring, its imports, its four places, and its name in the last line."""
    text = (FOLDER / f"{name}.py").read_text()
    assert re.findall(r"# \d\. ([A-Z ]+):", text) == list(PLACES)
    text = text[text.index("\nPADDING") :]
    text = re.sub(r"# 1\. YOUR DATA.*?(?=^def main\()", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ +# [34]\. YOUR .*?\n\n", "", text, flags=re.MULTILINE | re.DOTALL)
    return text.replace(f"your_model.{name}:main", "").splitlines()


def test_the_two_programs_differ_in_the_four_places_only() -> None:
    assert frame("train") == frame("language_model")
    assert len(frame("train")) > 60


# Mistakes that a copy makes, as text in the template, and the one line that answers them.
MISTAKES = {
    "no number": (
        ("labels[part], torch.arange(int(part.sum())))", "labels[part])"),
        "a sample's last item must be its number",
    ),
    "a number of the whole table": (
        ("torch.arange(int(part.sum()))", "part.nonzero().squeeze(1) + 200"),
        "from 0 to 425",
    ),
    "a metric of this rank's shard": (
        ("evaluate(model, test_loader, len(data.class_names), run.autocast)", '{"accuracy": dist.get_rank() / 2}'),
        "the ranks disagree on the metrics",
    ),
    "a metric that is not there": (
        ("evaluate(model, test_loader, len(data.class_names), run.autocast)", '{"rmse": 1.0}'),
        "end_epoch(best='accuracy'): the metrics are rmse",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_copy_is_one_line(programs: Programs, tmp_path: Path, mistake: str) -> None:
    change, words = MISTAKES[mistake]
    folder = mutated(tmp_path / "copy", ("examples/your_model/train.py", *change))
    run = ("-m", "examples.your_model", "--nproc", 2, "--epochs", 1, "--out", tmp_path / "out")
    done = programs.run(*run, cwd=folder, code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert words in line
    assert "Traceback" not in done.stderr


def test_the_checkpoint_of_another_model_is_refused(programs: Programs, tmp_path: Path) -> None:
    run = ("-m", "examples.your_model", "--nproc", 2, "--epochs", 1, "--resume", "auto", "--out", tmp_path / "out")
    programs.run(*run)
    file = "examples/your_model/train.py"
    changes = ((file, "columns, 32)", "columns, 31)"), (file, "nn.Linear(32, 2)", "nn.Linear(31, 2)"))
    folder = mutated(tmp_path / "copy", *changes)
    done = programs.run(*run, cwd=folder, code=2)
    assert "does not fit 'model' of this run (" in done.stderr
    assert "Traceback" not in done.stderr
