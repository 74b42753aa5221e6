"""bert_dp by the Hugging Face Trainer: the brief program, and the robust one against itself."""

import gzip
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.metrics import precision_recall_fscore_support, roc_auc_score

from common.train.checks import parameter_hash
from examples.bert_dp.model import load
from examples.bert_dp.reviews import SHIPPED
from examples.bert_dp.trainer_parts import evaluation
from tests.conftest import Programs
from tests.examples.bert_jobs import BRIEF, FP32, GOOD, PREDICT, ROBUST, TORCHRUN, largest_difference
from tests.runs import NO_GPU, Eventually, losses, mutated, predictions, result

EVEN = ("--epochs", 3, "-b", 36, "--hidden", 64, "--logging-steps", 1, *FP32)
RANKS = {nproc: ("--nproc", nproc, "--profile", 2 * (nproc == 2)) for nproc in (1, 2)}  # which changes no number
CSV = "label,review\n" + "".join(f"1,好{n}\n1,差{n}\n" for n in range(12))  # one label only


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 reviews, 180 to train on: 5 batches of 36, so that the Trainer has nothing to pad."""
    path = tmp_path_factory.mktemp("even") / "even.csv"
    frame = pd.read_csv(SHIPPED)
    pd.concat([part.head(100) for _, part in frame.groupby("label")]).to_csv(path, index=False)
    return path


# --------------------------------------------------------------------------------------------- the brief program


def history(out: Path, name: str) -> list[float]:
    """What the Trainer has logged of a loss or metric."""
    state = json.loads((out / "checkpoints/trainer_state.json").read_text())
    return [entry[name] for entry in state["log_history"] if name in entry]


@pytest.fixture(scope="module")
def brief(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory, even: Path) -> dict[int, Path]:
    outs = {nproc: tmp_path_factory.mktemp(f"brief-{nproc}") for nproc in (1, 2)}
    for nproc, out in outs.items():
        shared_programs.run(*BRIEF, *RANKS[nproc], *EVEN, "--csv", even, "--out", out)
    return outs


def test_the_brief_trainer_with_two_ranks_equals_one(
    programs: Programs, tmp_path: Path, even: Path, brief: dict[int, Path]
) -> None:
    one, two = (history(brief[nproc], "loss") for nproc in (1, 2))
    assert len(one) == 15
    torch.testing.assert_close(two, one, rtol=5e-4, atol=0)
    for name in ("eval_accuracy", "eval_f1"):
        assert history(brief[2], name) == pytest.approx(history(brief[1], name), abs=1e-6)
    written = []
    for nproc, out in brief.items():
        file = tmp_path / f"{nproc}.csv"
        programs.run(*PREDICT, "--model", out / "model", "--csv", even, "--out", file)
        written.append(pd.read_csv(file))
    assert written[0]["prediction"].tolist() == written[1]["prediction"].tolist()
    torch.testing.assert_close(
        torch.tensor(written[0]["probability"]), torch.tensor(written[1]["probability"]), rtol=0, atol=5e-4
    )


def test_the_brief_trainer_trains_as_the_robust_one(brief: dict[int, Path], robust: dict[int, Path]) -> None:
    torch.testing.assert_close(history(brief[1], "loss"), losses(robust[1]), rtol=5e-4, atol=0)


def test_the_brief_trainer_learns_and_keeps_the_best_model(programs: Programs, tmp_path: Path) -> None:
    """The shipped reviews, all defaults, under torchrun with two ranks."""
    out = tmp_path / "out"
    programs.run(*TORCHRUN, "--nproc-per-node", 2, *BRIEF, *FP32, "--out", out)
    found = json.loads((out / "checkpoints/eval_results.json").read_text())
    assert found["eval_f1"] == max(history(out, "eval_f1")) > 0.8
    assert history(out, "loss")[-1] < 0.3
    assert programs.run(*PREDICT, "--model", out / "model", "--text", GOOD).stdout.startswith("好评")


def test_mutation_the_loss_times_the_ranks_in_the_brief_trainer(
    programs: Programs, tmp_path: Path, even: Path, brief: dict[int, Path]
) -> None:
    source = "average_tokens_across_devices=False,"
    broken = mutated(tmp_path / "broken", ("examples/bert_dp/trainer.py", source, ""))
    programs.run(*BRIEF, "--nproc", 2, *EVEN, "--csv", even, "--out", tmp_path / "out", cwd=broken)
    assert largest_difference(history(tmp_path / "out", "loss"), history(brief[1], "loss")) > 1e-2


# --------------------------------------------------------------------------------------------- the robust program


@pytest.fixture(scope="module")
def robust(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory, even: Path) -> dict[int, Path]:
    outs = {nproc: tmp_path_factory.mktemp(f"trainer-{nproc}") for nproc in (1, 2)}
    for nproc, out in outs.items():
        done = shared_programs.run(*ROBUST, *RANKS[nproc], *EVEN, "--csv", even, "--out", out)
        (out / "stdout").write_text(done.stdout)
    return outs


def test_the_trainer_with_two_ranks_equals_one(robust: dict[int, Path]) -> None:
    one, two = (losses(robust[nproc]) for nproc in (1, 2))
    assert len(one) == 15
    torch.testing.assert_close(two, one, rtol=5e-4, atol=0)
    first, second = (result(robust[nproc]) for nproc in (1, 2))
    assert second["metrics"] == pytest.approx(first["metrics"], abs=1e-6)
    assert predictions(robust[1]) == predictions(robust[2])
    assert (first["parallel_mode"], second["parallel_mode"]) == ("not_parallel", "distributed")
    weights = [load_file(robust[nproc] / "model/model.safetensors") for nproc in (1, 2)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=2e-4)


def test_the_trainers_metrics_are_those_of_two_classes() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(40, 2), torch.arange(40) % 2
    found = evaluation(logits, targets)
    precision, recall, f1, _ = precision_recall_fscore_support(targets, logits.argmax(1), average="macro")
    expected = {
        "accuracy": (logits.argmax(1) == targets).double().mean().item(),
        "precision": precision,
        "recall": recall,
    }
    expected |= {"f1": f1, "auc": roc_auc_score(targets, logits.softmax(1)[:, 1])}
    assert found.metrics == pytest.approx(expected, abs=1e-6)
    alone = evaluation(torch.tensor([[1.0, 0.0]] * 4), torch.zeros(4, dtype=torch.long)).metrics
    assert alone["recall"] == 0.5, "the class that is not there counts as 0"
    assert found.loss == pytest.approx(F.cross_entropy(logits, targets).item(), abs=1e-6)


def test_both_trainers_are_recorded(brief: dict[int, Path], robust: dict[int, Path]) -> None:
    """Two steps of each rank, with the waits for their data."""
    for out in (brief[2], robust[2]):
        events = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
        for rank in (0, 1):
            names = [event["name"] for event in events if event["pid"] == rank]
            assert [name for name in names if name.startswith("step ")] == ["step 3", "step 4"]
            assert names.count("waits for data") >= 2
        assert (out / "profile.png").exists()
    ranks = [rank for step in result(robust[2])["profile"]["steps"] for rank in step["ranks"]]
    assert min(rank["data"] for rank in ranks) > 0
    assert sum(rank["computing"] for rank in ranks) > sum(rank["data"] for rank in ranks)


def test_the_trainer_keeps_the_contract(programs: Programs, robust: dict[int, Path], tmp_path: Path) -> None:
    out = robust[2]
    found = result(out)
    assert found["metrics"].keys() == {"accuracy", "precision", "recall", "f1", "auc", "best_f1"}
    assert found["metrics"]["f1"] == found["metrics"]["best_f1"], "the best model is loaded at the end"
    assert (found["steps"], found["train_samples"], found["eval_samples"]) == (15, 180, 20)
    assert all(found["seconds"][name] > 0 for name in ("startup", "train", "eval", "total"))
    trained = found["samples_per_second"] * found["seconds"]["train"]
    assert trained == pytest.approx(found["epochs"] * found["train_samples"], rel=0.02), "without the evaluations"
    model, _ = load(out / "model")
    assert parameter_hash(model) == found["parameter_hash"]
    assert len(list((out / "checkpoints").glob("checkpoint-*/seal.json"))) == 3
    text = programs.run(*PREDICT, "--model", out / "model", "--text", GOOD).stdout
    assert text.startswith(("好评", "差评"))


def test_the_trainer_under_torchrun_stops_and_resumes(
    programs: Programs, tmp_path: Path, even: Path, robust: dict[int, Path], eventually: Eventually
) -> None:
    """A signal in the middle of an epoch, a damaged checkpoint: the same weights as undisturbed."""
    flags = (*TORCHRUN, "--nproc-per-node", 2, *ROBUST, *EVEN, "--csv", even, "--out", tmp_path, "--resume", "auto")
    step = "self.run.state.step = state.global_step"
    wait = "while state.global_step == 7 and not self.stop._signum: __import__('time').sleep(0.01)"
    waits = mutated(  # for the signal, on both ranks; the last step would otherwise be over before it comes
        tmp_path / "waits",
        ("examples/bert_dp/trainer_parts.py", step, f"{step}\n        {wait}"),
        ("common/train/stop.py", "seconds: float = 0.2", "seconds: float = 0.0"),  # ask the other ranks at every step
    )
    process = programs.start(*flags, cwd=waits)
    eventually(lambda: (tmp_path / "checkpoints/checkpoint-5/seal.json").exists(), 100, "the first epoch")
    os.killpg(process.pid, signal.SIGTERM)
    done = programs.finish(process, 1)  # torchrun's own code
    assert re.search(r"stopped by SIGTERM: checkpoint at step [78];", done.stderr), done.stderr
    saved = sorted((tmp_path / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(saved) > 1, "stopped before its end"
    half = tmp_path / "checkpoints/checkpoint-99"
    shutil.copytree(saved[0], half)
    (half / "optimizer.pt").write_bytes(b"cut")
    done = programs.run(*flags)
    assert f"checkpoint {half} is damaged (optimizer.pt does not match its digest)" in done.stdout
    assert f"resumed from {saved[-1]}" in done.stdout
    assert result(tmp_path)["parameter_hash"] == result(robust[2])["parameter_hash"]
    assert losses(tmp_path) == losses(robust[2])


def test_mutation_the_models_own_loss_in_the_trainer(
    programs: Programs, tmp_path: Path, even: Path, robust: dict[int, Path]
) -> None:
    """With it and the Trainer's default, gradients are as many times too large as there are ranks."""
    broken = mutated(
        tmp_path / "broken",
        ("examples/bert_dp/trainer_robust.py", "compute_loss_func=mean_loss,", ""),
        ("examples/bert_dp/trainer.py", "average_tokens_across_devices=False,", ""),
    )
    programs.run(*ROBUST, "--nproc", 2, *EVEN, "--csv", even, "--out", tmp_path / "out", cwd=broken)
    assert largest_difference(losses(tmp_path / "out"), losses(robust[1])) > 1e-2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc", 2, "-b", 7], r"--batch-size 7 \(global\) cannot be divided by 2 ranks"),
        (["--nproc", 2, "--csv", "CSV"], r"\S+ has 0 usable review\(s\) with the label 0"),
        (["--save-total-limit", 2], "--save-total-limit 2: give at least 3"),
        (["--resume", "nothing"], "checkpoint nothing does not exist"),
        (["--resume", "/dev/null"], "checkpoint /dev/null is damaged .*, or not a checkpoint of this program"),
    ],
)
def test_bad_input_of_the_trainer_is_one_line(
    programs: Programs, tmp_path: Path, flags: list[object], words: str
) -> None:
    (tmp_path / "CSV").write_text(CSV)
    done = programs.run(
        *ROBUST, *(tmp_path / "CSV" if flag == "CSV" else flag for flag in flags), "--out", tmp_path / "out", code=2
    )
    line = done.stderr.replace(NO_GPU, "")
    assert re.fullmatch(rf"error: .*{words}.*\n", line), line
    assert not (tmp_path / "out/result.json").exists()


def several() -> dict[str, str]:
    """One GPU, and with several all of them."""
    count = torch.cuda.device_count()
    return {"one": "0"} | ({"all": ",".join(map(str, range(count)))} if count > 1 else {})


@pytest.mark.gpu
def test_the_trainer_on_cuda_devices_equals_the_cpu(
    programs: Programs, tmp_path: Path, even: Path, robust: dict[int, Path]
) -> None:
    """It counts the GPUs itself, and the global batch is divided by them."""
    for name, visible in several().items():
        flags = (*ROBUST, *EVEN, "--csv", even, "--out", tmp_path / name)
        count = len(visible.split(","))
        if 36 % count:  # the batch of EVEN
            programs.run(*flags, env={"CUDA_VISIBLE_DEVICES": visible}, code=2)
            continue
        done = programs.run(*flags, env={"CUDA_VISIBLE_DEVICES": visible})
        assert f"{count} device(s) per process" in done.stdout
        found = result(tmp_path / name)
        assert found["parallel_mode"] == ("not_parallel" if count == 1 else "not_distributed")
        assert found["steps"] == 15
        torch.testing.assert_close(losses(tmp_path / name), losses(robust[1]), rtol=2e-3, atol=0)
