"""The contract of every example: what a run leaves, any number of ranks, any launcher, killed and resumed.

One row of `trainings.EXAMPLES` is all that an example owes here; what is its own is tested in tests/examples.
"""

import math
import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

from tests.conftest import Programs
from tests.contract.trainings import CLASSIFIES_NOTHING, EXAMPLES, Trainings
from tests.runs import Eventually, accounted, losses, newest_step, predictions, result

each_example = pytest.mark.parametrize(
    "example", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in EXAMPLES]
)
FACTS = {
    *("example", "argv", "launcher", "world_size", "nodes", "threads", "device", "backend", "samples_per_second"),
    *("arguments", "settings", "epochs", "steps", "global_batch", "precision", "metrics", "parameter_hash"),
    *("final_loss", "seconds", "versions", "commit", "host", "peak_memory_mb"),
    *("started", "ended", "starts"),
}
FILES = {"result.json", "metrics.jsonl", "curves.png", "tensorboard", "checkpoints"}


@pytest.fixture(scope="session")
def trainings(session_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(session_programs, tmp_path_factory.mktemp("trainings"))


@pytest.mark.smoke
@each_example
def test_two_processes_leave_what_every_run_leaves(trainings: Trainings, example: str) -> None:
    _, out = trainings.one_and_two(example)
    found = result(out)
    assert found.keys() >= FACTS
    assert found["example"] == example
    assert (found["world_size"], found["nodes"], found["threads"]) == (2, 1, 1)
    assert (found["launcher"], found["device"], found["backend"]) == ("spawn", "cpu", "gloo")
    assert len(losses(out)) == found["steps"]
    assert found["final_loss"] == losses(out)[-1] < losses(out)[0]
    assert all(math.isfinite(value) for value in found["metrics"].values() if value is not None)
    assert {path.name for path in out.iterdir()} >= FILES | {"trace.json.gz", "profile.png"}
    assert [len(step["ranks"]) for step in found["profile"]["steps"]] == [2, 2]
    assert newest_step(out) == found["steps"]
    assert found["arguments"]["epochs"] == found["epochs"]
    started, ended = (datetime.fromisoformat(found[name]) for name in ("started", "ended"))
    assert started <= ended
    assert started.utcoffset() == timedelta(0)
    assert found["starts"] == 1
    assert found["arguments"]["lr"] > 0, "the value that was used, also where the flag was left out"


@pytest.mark.smoke
@each_example
def test_two_processes_train_as_one(trainings: Trainings, example: str) -> None:
    one, two = trainings.one_and_two(example)
    compare(two, one)


@each_example
def test_three_processes_train_as_one(trainings: Trainings, example: str) -> None:
    compare(trainings.out(example, 3), trainings.out(example, 1))


@pytest.mark.parametrize("nproc", [1, 2, 3])
@each_example
def test_the_speed_is_that_of_the_whole_job(trainings: Trainings, example: str, nproc: int) -> None:
    """Samples of all ranks, each once, over the seconds of training alone."""
    found = result(trainings.out(example, nproc))
    samples = found["epochs"] * found["train_samples"]
    assert found["samples_per_second"] * found["seconds"]["train"] == pytest.approx(samples, rel=0.01)
    assert sum(found["seconds"][name] for name in ("startup", "train", "eval")) <= found["seconds"]["total"]


def compare(many: Path, one: Path) -> None:
    """The first losses agree up to rounding, which later steps multiply; the world differs and the work does not."""
    assert_allclose(losses(many)[:20], losses(one)[:20], rtol=1e-4, atol=1e-6)
    names = ("epochs", "steps", "global_batch", "settings", "precision")
    assert {name: result(many)[name] for name in names} == {name: result(one)[name] for name in names}


@each_example
def test_torchrun_trains_the_same(trainings: Trainings, example: str) -> None:
    ours, theirs = trainings.out(example, 2), trainings.out(example, 2, torchrun=True)
    assert result(theirs)["launcher"] == "torchrun"
    assert result(theirs)["parameter_hash"] == result(ours)["parameter_hash"]
    assert losses(theirs) == losses(ours)


@pytest.mark.gpu
@each_example
def test_on_gpus_it_trains_as_on_a_cpu(programs: Programs, trainings: Trainings, tmp_path: Path, example: str) -> None:
    """By one rank, and by two, which share the device if there is only one."""
    import torch  # 4 s, which the smoke tests need not wait for

    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(torch.cuda.device_count())))}
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        words = (*trainings.words(example), "--device", "cuda", "--out", out)
        programs.run(*words, *(("--nproc", ranks) if ranks > 1 else ()), cwd=trainings.code, env=env)
        assert (result(out)["device"], result(out)["world_size"]) == ("cuda", ranks)
        assert_allclose(losses(out)[:10], losses(trainings.out(example, 1))[:10], rtol=1e-3, atol=1e-5)


@each_example
def test_killed_and_resumed_it_ends_with_the_same_bits(
    programs: Programs, trainings: Trainings, tmp_path: Path, example: str, eventually: Eventually
) -> None:
    run = (*trainings.words(example), "--nproc", 2, "--resume", "auto", "--out", tmp_path)
    process = programs.start(*run, cwd=trainings.slow_code)
    eventually(lambda: newest_step(tmp_path) >= 6, 60, "step 6")
    os.killpg(process.pid, signal.SIGKILL)
    programs.kill()
    process.communicate()
    killed_at, steps = newest_step(tmp_path), result(trainings.out(example, 2))["steps"]
    assert killed_at < steps, "it was to be killed in the middle"
    done = programs.run(*run, cwd=trainings.code)
    assert f"at step {killed_at}\n" in done.stdout
    assert result(tmp_path)["parameter_hash"] == result(trainings.out(example, 2))["parameter_hash"]
    assert losses(tmp_path) == losses(trainings.out(example, 2))
    assert result(tmp_path)["starts"] == 2


@each_example
def test_another_seed_and_weights_to_start_from(
    programs: Programs, trainings: Trainings, tmp_path: Path, example: str
) -> None:
    """`--seed` changes the order of the samples, and `--init` starts where another run has ended."""
    before = trainings.out(example, 1)
    weights = next(before / name for name in ("best.safetensors", "model") if (before / name).exists())
    flags = ("--seed", 7, "--init", weights, "--limit-steps", 1, "--out", tmp_path)
    words = list(trainings.words(example))
    if weights.name == "model":  # of transformers: the folder says how large it is
        position = words.index("--hidden")
        del words[position : position + 2]
    done = programs.run(*words, *flags, cwd=trainings.code)
    if weights.name != "model":
        assert f"weights of {weights} loaded\n" in done.stdout
    if example != "gan_ddp":  # whose losses are those of two networks against each other
        assert losses(tmp_path)[0] < sum(losses(before)[:3]) / 3
    orders = [accounted(out)[0][: result(tmp_path)["global_batch"]] for out in (tmp_path, before)]
    assert len(orders[0]) == len(orders[1]) > 1
    assert set(orders[0]) != set(orders[1])


@pytest.mark.parametrize("nproc", [1, 2, 3])
@each_example
def test_predictions_are_those_of_the_whole_test_set(trainings: Trainings, example: str, nproc: int) -> None:
    out = trainings.out(example, nproc)
    if example in CLASSIFIES_NOTHING:
        assert not (out / "predictions.csv").exists()
        return
    head, *rows = predictions(out)
    more = {"imagenet_ddp": ["file"], "resnet_pipeline": ["file"], "bert_dp": ["row", "text"]}
    assert head == ["index", "label", "prediction", "label_name", "prediction_name", *more.get(example, [])]
    names = result(out)["class_names"]
    assert all(row[3:5] == [names[int(row[1])], names[int(row[2])]] for row in rows)
    assert len(set(names)) > 1
    assert [int(row[0]) for row in rows] == list(range(result(out)["eval_samples"]))
    right = sum(row[1] == row[2] for row in rows)
    assert result(out)["metrics"]["best_accuracy"] == pytest.approx(right / len(rows), abs=1e-6)
    assert [row[1] for row in rows] == [row[1] for row in predictions(trainings.out(example, 1))[1:]]
