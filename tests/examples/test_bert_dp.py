"""bert_dp's loop against a plain one, under every launcher, interrupted, broken on purpose."""

import copy
import os
import re
import signal
from pathlib import Path

import pandas
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.models.bert.modeling_bert import BertForSequenceClassification

from common.train.checks import parameter_hash
from common.train.evaluate import classification_metrics
from examples.bert_dp.args import TextArgs
from examples.bert_dp.reviews import SHIPPED
from examples.bert_dp.tokens import LengthSampler, encode
from tests.conftest import Programs
from tests.examples.bert_jobs import (
    FP32,
    SMALL,
    STEPS,
    TORCHRUN,
    TRAIN,
    default_run,
    largest_difference,
    shipped,
    state_of,
)
from tests.runs import NO_GPU, Eventually, check_predictions, losses, mutated, newest_step, result

__all__ = ["default_run"]  # a fixture
PROGRAM = "examples/bert_dp/train.py"
Reference = tuple[BertForSequenceClassification, list[float]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The same training as the documentation of transformers has it: one process, padding, the model's own loss."""
    model, tokenizer, (texts, _), (labels, _) = shipped()
    sampler = LengthSampler(encode(tokenizer, texts, labels, 128).lengths, 24, 0, rank=0, world_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.01)
    options = TextArgs()
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = sampler.order().tolist()
        for start in range(0, len(order), 24):
            chosen = order[start : start + 24]
            batch = tokenizer([texts[i] for i in chosen], padding="max_length", max_length=128, return_tensors="pt")
            optimizer.param_groups[0]["lr"] = 5e-4 * options.factor(len(found), 2 * STEPS)
            loss = model(**batch, labels=torch.tensor([labels[i] for i in chosen])).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
    return model.eval(), found


@pytest.fixture(scope="module")
def undisturbed(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs with 1, 2, 3 and 4 processes, and one by `--fast`, with 3."""
    flags = {"1": (), "2": (), "3": (), "4": (), "3 fast": ("--fast",)}
    outs = {name: tmp_path_factory.mktemp("undisturbed") for name in flags}
    for name, out in outs.items():
        shared_programs.run(*TRAIN, "--nproc", name[0], *flags[name], *SMALL, "--out", out)
    return outs


@pytest.mark.parametrize("name", ["1", "2", "3", "4", "3 fast"])
def test_ranks_equal_a_plain_loop(undisturbed: dict[str, Path], reference: Reference, name: str) -> None:
    """Sums of float32 in other orders: the losses of 24 steps agree to 2e-4, and all decisions are equal."""
    model, expected = reference
    out = undisturbed[name]
    torch.testing.assert_close(losses(out), expected, rtol=2e-4, atol=0)
    _, tokenizer, (_, texts), (_, labels) = shipped()
    with torch.inference_mode():
        scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(dim=1)
    targets = torch.tensor(labels)
    metrics = classification_metrics(scores.argsort(descending=True), targets, 2, scores)
    assert result(out)["metrics"] | {"best_accuracy": 0} == metrics | {"best_accuracy": 0}
    kept = copy.deepcopy(model)
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    places = [pandas.read_csv(SHIPPED)["review"].str.strip().tolist().index(text) + 1 for text in texts]
    check_predictions(out, kept, targets, forward=lambda: kept(**tokens).logits, row=places, text=texts)
    for name, value in state_of(out).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-3, atol=2e-4)


def test_fast_is_another_computation(undisturbed: dict[str, Path]) -> None:
    """If its bits were the stock model's, `--fast` would do nothing."""
    assert len({result(undisturbed[name])["parameter_hash"] for name in ("3", "3 fast")}) == 2


def test_the_contract(default_run: Path) -> None:
    found = result(default_run)
    expected = {
        "example": "bert_dp",
        "world_size": 1,
        "nodes": 1,
        "device": "cpu",
        "backend": "gloo",
        "precision": "fp32",
        "dataset": "shipped reviews",
        "train_samples": 284,
        "eval_samples": 32,
        "epochs": 20,
        "steps": 180,
        "global_batch": 32,
        "cut_texts": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["rows"]["rows"] == 316
    assert found["metrics"]["best_accuracy"] >= 0.8
    assert found["metrics"].keys() == {"accuracy", "precision", "recall", "f1", "auc", "best_accuracy"}
    assert found["final_loss"] == losses(default_run)[-1] < 0.1
    assert found["samples_per_second"] > 0
    assert (default_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((default_run / "tensorboard").iterdir())) == 1
    model = BertForSequenceClassification.from_pretrained(default_run / "model")
    model.load_state_dict(state_of(default_run))
    assert found["parameter_hash"] == parameter_hash(model)
    said = (default_run / "stdout").read_text()
    assert len(re.findall("^  (?:好评|差评)  ", said, re.MULTILINE)) == 5, "five samples are shown"
    assert "no DataParallel: one device\n" in said


def test_every_launcher_trains_the_same(
    programs: Programs, tmp_path: Path, free_port: int, undisturbed: dict[str, Path]
) -> None:
    flags = (*TRAIN, *SMALL)
    programs.run(*TORCHRUN, "--nproc-per-node", 2, *flags, "--out", tmp_path / "torchrun")
    nodes = [
        programs.start(
            *TORCHRUN[:2],
            "--nnodes",
            2,
            "--nproc-per-node",
            1,
            "--node-rank",
            node,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            free_port,
            *flags,
            "--out",
            tmp_path / "nodes",
        )
        for node in (0, 1)
    ]
    for node in nodes:
        programs.finish(node)
    found = [result(tmp_path / name) for name in ("torchrun", "nodes")]
    assert [value["nodes"] for value in found] == [1, 2]
    assert {value["parameter_hash"] for value in found} == {result(undisturbed["2"])["parameter_hash"]}


def test_the_old_name_of_the_program_works(programs: Programs, tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    programs.run("-m", "examples.bert_dp.train", "--nproc", 2, *SMALL, "--out", tmp_path)
    assert result(tmp_path)["parameter_hash"] == result(undisturbed["2"])["parameter_hash"]


# ------------------------------------------------------------------------------------- interruption and resuming


def test_killed_stopped_and_resumed_is_bit_identical(
    programs: Programs, tmp_path: Path, eventually: Eventually
) -> None:
    """With both kinds of dropout, so that the random states count, pairs of characters, and three ranks."""
    size = ("--epochs", 12, "-b", 24, "--hidden", 64)
    base = (*TRAIN, "--nproc", 3, *size, "--dropout", 0.1, "--mask", 0.1, "--pairs", 50, *FP32)
    programs.run(*base, "--out", tmp_path / "whole")
    flags = (*base, "--checkpoint-every", 5, "--out", tmp_path / "cut", "--resume", "auto")
    process = programs.start(*flags)
    eventually(lambda: newest_step(tmp_path / "cut") >= 20, 100, "step 20")
    programs.kill()
    process.communicate()
    stopped = newest_step(tmp_path / "cut")
    process = programs.start(*flags)
    eventually(lambda: newest_step(tmp_path / "cut") >= stopped + 5, 100, "5 steps more")
    os.killpg(process.pid, signal.SIGTERM)
    done = programs.finish(process, 143)
    assert re.search(r"stopped by SIGTERM: checkpoint at step \d+; go on with --resume auto\n$", done.stderr)
    assert programs.gone(within=2)
    programs.run(*flags)
    whole, cut = (result(tmp_path / name) for name in ("whole", "cut"))
    assert cut["parameter_hash"] == whole["parameter_hash"]
    assert cut["metrics"] == whole["metrics"]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert load_file(tmp_path / "cut/model/model.safetensors").keys() == state_of(tmp_path / "cut").keys()
    for flag in (("--seed", 3), ("--fast",)):
        refused = programs.run(*flags, *flag, code=2).stderr.replace(NO_GPU, "")
        words = rf"{flag[0].removeprefix('--')} = .*, this run has .*: give the same flags"
        assert re.search(rf"error: checkpoint .* was made with .*{words}", refused), refused


# --------------------------------------------------------------------------------------------------- mutations


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("all_reduce_mean(parameter.grad for parameter in model.parameters())\n", "pass\n"),
            "the replicas differ: rank(s) 1",
        ),
        (
            (
                "LengthSampler(data.train.lengths, args.batch_size, args.seed)",
                "LengthSampler(data.train.lengths, args.batch_size, args.seed, 0, 1)",
            ),
            "trained on more than once",
        ),
        (
            ("torch.manual_seed(args.seed)  #", "torch.manual_seed(args.seed + rank)  #"),
            "the replicas differ: rank(s) 1",
        ),
    ],
)
def test_mutations_are_noticed_by_the_run_itself(
    programs: Programs, tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    broken = mutated(tmp_path / "broken", (PROGRAM, *change))
    run = (*TRAIN, "--nproc", 3 if "more than once" in words else 2, *SMALL, "--epochs", 1, "--out", tmp_path / "out")
    assert words in programs.run(*run, cwd=broken, code=1).stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("labels[local_samples:] = PADDING", "pass"),
        ("sums.sum() * world_size / batch_samples", "sums.sum() / len(labels)"),
        ("sampler.set_epoch(epoch)", "sampler.set_epoch(0)"),
    ],
)
def test_mutations_are_noticed_by_the_parity_test(
    programs: Programs, tmp_path: Path, reference: Reference, old: str, new: str
) -> None:
    broken = mutated(tmp_path / "broken", (PROGRAM, old, new))
    programs.run(*TRAIN, "--nproc", 3, *SMALL, "--out", tmp_path / "out", cwd=broken)
    assert largest_difference(losses(tmp_path / "out"), reference[1]) > 5e-3


# ----------------------------------------------------------------------------------------------------- with a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [(), ("--fast",)])
def test_cuda_devices_equal_a_plain_loop(
    programs: Programs, tmp_path: Path, reference: Reference, flags: tuple[str, ...]
) -> None:
    """`nn.DataParallel` over one GPU and, with several, over all of them."""
    count = torch.cuda.device_count()
    for devices in sorted({1, count}):
        visible, out = ",".join(map(str, range(devices))), tmp_path / str(devices)
        run = (*TRAIN, *SMALL, *flags, "--deterministic", "--out", out)
        done = programs.run(*run, env={"CUDA_VISIBLE_DEVICES": visible})
        used = ", ".join(f"cuda:{number}" for number in range(devices))
        assert re.search(rf"^DataParallel over {used}(: chunks of .*)?$", done.stdout, re.MULTILINE)
        torch.testing.assert_close(losses(out), reference[1], rtol=1e-3, atol=0)
        assert result(out)["device"] == "cuda"
