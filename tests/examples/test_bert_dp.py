"""bert_dp against a plain loop, the Trainer against itself, under every launcher; damaged and odd csv files."""

import csv
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import pipeline
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForSequenceClassification, BertModel
from transformers.models.bert.tokenization_bert import BertTokenizer

from common.distributed import World
from common.errors import UserError
from common.metrics import classification_metrics
from common.precision import Precision
from common.proof import parameter_hash
from examples.bert_dp.classifier import Classifier, _attend, _attend_bf16_cpu, data_parallel, load, prepare, save
from examples.bert_dp.options import TextOptions
from examples.bert_dp.reviews import ID2LABEL, SHIPPED, read_reviews, split
from examples.bert_dp.tokens import SPECIAL, LengthSampler, encode, make_tokenizer, read_vocabulary, vocabulary
from tests import warm
from tests.conftest import ROOT, Programs
from tests.cpu_replicas import OnCpus
from tests.runs import NO_GPU, Eventually, losses, mutated, newest_step, predictions, result

warm.ALSO += [
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "transformers.trainer",
]

TRAIN, TRAINER, PREDICT = (("-m", f"examples.bert_dp.{name}") for name in ("train", "trainer", "predict"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
PROGRAM = "examples/bert_dp/train.py"
FP32 = ("--precision", "fp32")
# 284 reviews to train on: 11 batches of 24 and one of 20, which 3 ranks share as 7, 7 and 6
SMALL = ("--epochs", 2, "-b", 24, "--hidden", 64, "--layers", 2, *FP32)
STEPS = 12
ALONE = cast("World", SimpleNamespace(rank=0, size=1, is_main=True))
GOOD, BAD = "房间干净，服务热情，早餐丰富，下次还来。", "房间又脏又吵，服务态度差，再也不来了。"


def shipped(
    small: Path | None = None,
) -> tuple[BertForSequenceClassification, BertTokenizer, list[list[str]], list[list[int]]]:
    """Model, tokenizer, texts and labels (training, validation) as the programs have them with SMALL."""
    reviews = read_reviews(small)
    parts = split(reviews, 0)
    texts = [[reviews.texts[position] for position in part] for part in parts]
    labels = [[reviews.labels[position] for position in part] for part in parts]
    torch.manual_seed(0)
    model, tokenizer, _ = prepare(TextOptions(hidden=64, layers=2), texts[0])
    return model, tokenizer, texts, labels


@pytest.fixture(scope="module")
def reference() -> tuple[BertForSequenceClassification, list[float]]:
    """The same training as the documentation of transformers has it: one process, padding, the model's own loss."""
    model, tokenizer, (texts, _), (labels, _) = shipped()
    sampler = LengthSampler(encode(tokenizer, texts, labels, 128).lengths, 24, ALONE, 0)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.01)
    options = TextOptions()
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
def undisturbed(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs with 1, 2, 3 and 4 processes."""
    outs = {}
    for nproc in (1, 2, 3, 4):
        outs[nproc] = tmp_path_factory.mktemp(f"undisturbed-{nproc}")
        shared_programs.run(*TRAIN, "--nproc", nproc, *SMALL, "--out", outs[nproc])
    return outs


def state_of(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(max((out / "checkpoints").glob("step-*.pt")), weights_only=True)["model"]


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_ranks_equal_a_plain_loop(
    undisturbed: dict[int, Path], reference: tuple[BertForSequenceClassification, list[float]], nproc: int
) -> None:
    model, expected = reference
    out = undisturbed[nproc]
    torch.testing.assert_close(losses(out), expected, rtol=2e-4, atol=0)
    _, tokenizer, (_, texts), (_, labels) = shipped()
    with torch.inference_mode():
        scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(dim=1)
    targets = torch.tensor(labels)
    metrics = classification_metrics(scores.argsort(descending=True), targets, 2, scores)
    assert result(out)["metrics"] | {"best_accuracy": 0} == metrics | {"best_accuracy": 0}
    rows = zip(range(32), labels, scores.argmax(dim=1).tolist(), strict=True)
    assert predictions(out) == [["index", "label", "prediction"], *([str(x) for x in row] for row in rows)]
    for name, value in state_of(out).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-3, atol=2e-4)


@pytest.fixture(scope="module")
def default_run(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("default")
    done = shared_programs.run(*TRAIN, *FP32, "--out", out)
    (out / "stdout").write_text(done.stdout)
    return out


def test_the_contract(default_run: Path) -> None:
    found = result(default_run)
    expected = {
        "example": "bert_dp", "world_size": 1, "nodes": 1, "device": "cpu", "backend": "gloo", "precision": "fp32",
        "dataset": "shipped reviews", "train_samples": 284, "eval_samples": 32, "epochs": 20, "steps": 180,
        "global_batch": 32, "cut_texts": 0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["rows"]["rows"] == 316
    assert found["metrics"]["best_accuracy"] >= 0.8
    assert found["metrics"].keys() == {"accuracy", "top5", "precision", "recall", "f1", "auc", "best_accuracy"}
    assert found["final_loss"] == losses(default_run)[-1] < 0.1
    assert found["samples_per_second"] > 0
    assert (default_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((default_run / "tensorboard").iterdir())) == 1
    model = BertForSequenceClassification.from_pretrained(default_run / "model")
    model.load_state_dict(state_of(default_run))
    assert found["parameter_hash"] == parameter_hash(model)
    told = (default_run / "stdout").read_text()
    assert len(re.findall("^  (?:好评|差评)  ", told, re.MULTILINE)) == 5, "five samples are shown"
    assert "DataParallel over one device, the CPU" in told


def test_the_saved_model_is_the_best_and_loads_plainly(programs: Programs, default_run: Path) -> None:
    folder = default_run / "model"
    assert {file.name for file in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not [file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".py")]
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    assert [found["label"] for found in classify([GOOD, BAD])] == ["好评", "差评"]
    model, tokenizer = BertForSequenceClassification.from_pretrained(folder), BertTokenizer.from_pretrained(folder)
    _, _, (_, texts), (_, labels) = shipped()
    with torch.inference_mode():
        found = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.argmax(dim=1)
    accuracy = (found == torch.tensor(labels)).double().mean().item()
    assert round(accuracy, 6) == result(default_run)["metrics"]["best_accuracy"]
    for flags in ((), ("--pipeline",)):
        for text, label in ((GOOD, "好评"), (BAD, "差评")):
            done = programs.run(*PREDICT, "--model", folder, "--text", text, *flags)
            assert re.fullmatch(rf"{label} 0\.\d{{4}}  {text}\n", done.stdout), done.stdout


def test_a_csv_is_predicted_in_its_order(programs: Programs, tmp_path: Path, default_run: Path) -> None:
    rows = [{"Review": text, "number": str(n)} for n, text in enumerate([GOOD, BAD, "", "  ", BAD * 40, GOOD, "abc😀"])]
    pd.DataFrame(rows).to_csv(tmp_path / "in.csv", index=False, encoding="utf-8-sig")
    written = []
    for nproc in (1, 2, 3):
        out = tmp_path / f"{nproc}.csv"
        done = programs.run(*PREDICT, "--model", default_run / "model", "--csv", tmp_path / "in.csv", "--out", out,
                            "--nproc", nproc, "-b", 2)  # fmt: skip
        assert "7 rows, 2 without a review left empty" in done.stdout
        assert len(re.findall("warning: 1 of 5 reviews have more than 128 tokens", done.stdout + done.stderr)) == 1
        written.append(out.read_bytes())
    assert written[0] == written[1] == written[2]
    found = list(csv.DictReader(written[0].decode().splitlines()))
    assert [row["number"] for row in found] == list("0123456")
    assert [row["prediction"] for row in found][:6] == ["好评", "差评", "", "", "差评", "好评"]
    assert [bool(row["probability"]) for row in found] == [True, True, False, False, True, True, True]


def test_every_launcher_trains_the_same(
    programs: Programs, tmp_path: Path, free_port: int, undisturbed: dict[int, Path]
) -> None:
    flags = (*TRAIN, *SMALL)
    programs.run(*TORCHRUN, "--nproc-per-node", 2, *flags, "--out", tmp_path / "torchrun")
    nodes = [
        programs.start(*TORCHRUN[:2], "--nnodes", 2, "--nproc-per-node", 1, "--node-rank", node, "--master-addr",
                       "127.0.0.1", "--master-port", free_port, *flags, "--out", tmp_path / "nodes")
        for node in (0, 1)
    ]  # fmt: skip
    for node in nodes:
        programs.finish(node)
    found = [result(tmp_path / name) for name in ("torchrun", "nodes")]
    assert [value["nodes"] for value in found] == [1, 2]
    assert {value["parameter_hash"] for value in found} == {result(undisturbed[2])["parameter_hash"]}


# ------------------------------------------------------------------------------------- interruption and resuming


def test_killed_stopped_and_resumed_is_bit_identical(
    programs: Programs, tmp_path: Path, eventually: Eventually
) -> None:
    """With dropout, so that the random states count, and three ranks."""
    base = (*TRAIN, "--nproc", 3, "--epochs", 12, "-b", 24, "--hidden", 64, "--dropout", 0.1, *FP32)
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
    refused = programs.run(*flags, "--seed", 3, code=2).stderr.replace(NO_GPU, "")
    assert re.search(r"error: checkpoint .* was made with \w+ = .*, this run has .*: give the same flags", refused)


# ------------------------------------------------------------------------------------------------- the Trainer


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 reviews, 180 to train on: 5 batches of 36, so that the Trainer has nothing to pad."""
    path = tmp_path_factory.mktemp("even") / "even.csv"
    frame = pd.read_csv(SHIPPED)
    pd.concat([part.head(100) for _, part in frame.groupby("label")]).to_csv(path, index=False)
    return path


EVEN = ("--epochs", 3, "-b", 36, "--hidden", 64, "--logging-steps", 1, *FP32)


@pytest.fixture(scope="module")
def by_trainer(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory, even: Path) -> dict[int, Path]:
    outs = {nproc: tmp_path_factory.mktemp(f"trainer-{nproc}") for nproc in (1, 2)}
    for nproc, out in outs.items():
        done = shared_programs.run(*TRAINER, "--nproc", nproc, *EVEN, "--csv", even, "--out", out)
        (out / "stdout").write_text(done.stdout)
    return outs


def test_the_trainer_with_two_ranks_equals_one(by_trainer: dict[int, Path]) -> None:
    one, two = (losses(by_trainer[nproc]) for nproc in (1, 2))
    assert len(one) == 15
    torch.testing.assert_close(two, one, rtol=5e-4, atol=0)
    first, second = (result(by_trainer[nproc]) for nproc in (1, 2))
    assert second["metrics"] == pytest.approx(first["metrics"], abs=1e-6)
    assert predictions(by_trainer[1]) == predictions(by_trainer[2])
    assert (first["parallel_mode"], second["parallel_mode"]) == ("not_parallel", "distributed")
    weights = [load_file(by_trainer[nproc] / "model/model.safetensors") for nproc in (1, 2)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=2e-4)


def test_the_trainer_keeps_the_contract(programs: Programs, by_trainer: dict[int, Path], tmp_path: Path) -> None:
    out = by_trainer[2]
    found = result(out)
    assert found["metrics"].keys() == {"accuracy", "top5", "precision", "recall", "f1", "auc", "best_f1"}
    assert found["metrics"]["f1"] == found["metrics"]["best_f1"], "the best model is loaded at the end"
    assert (found["steps"], found["train_samples"], found["eval_samples"]) == (15, 180, 20)
    assert all(found["seconds"][name] > 0 for name in ("startup", "train", "eval", "total"))
    model, _ = load(out / "model")
    assert parameter_hash(model) == found["parameter_hash"]
    assert len(list((out / "checkpoints").glob("checkpoint-*/seal.json"))) == 3
    text = programs.run(*PREDICT, "--model", out / "model", "--text", GOOD).stdout
    assert text.startswith(("好评", "差评"))


def test_the_trainer_under_torchrun_stops_and_resumes(
    programs: Programs, tmp_path: Path, even: Path, by_trainer: dict[int, Path], eventually: Eventually
) -> None:
    """A signal in the middle of an epoch, a damaged checkpoint: the same weights as undisturbed."""
    flags = (*TORCHRUN, "--nproc-per-node", 2, *TRAINER, *EVEN, "--csv", even, "--out", tmp_path, "--resume", "auto")
    step = "self.report.passed(state.global_step)"
    wait = "while state.global_step == 7 and not self.stop._signum: __import__('time').sleep(0.01)"
    waits = mutated(  # for the signal, on both ranks; the last step would otherwise be over before it comes
        tmp_path / "waits",
        ("examples/bert_dp/trainer_parts.py", step, f"{step}\n        {wait}"),
        ("common/distributed.py", "seconds: float = 0.2", "seconds: float = 0.0"),  # ask the other ranks at every step
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
    assert result(tmp_path)["parameter_hash"] == result(by_trainer[2])["parameter_hash"]
    assert losses(tmp_path) == losses(by_trainer[2])


def test_mutation_the_models_own_loss_in_the_trainer(
    programs: Programs, tmp_path: Path, even: Path, by_trainer: dict[int, Path]
) -> None:
    """With it and the Trainer's default, gradients are as many times too large as there are ranks."""
    broken = mutated(
        tmp_path / "broken",
        ("examples/bert_dp/trainer.py", "compute_loss_func=mean_loss,", ""),
        ("examples/bert_dp/trainer.py", "average_tokens_across_devices=False,", ""),
    )
    programs.run(*TRAINER, "--nproc", 2, *EVEN, "--csv", even, "--out", tmp_path / "out", cwd=broken)
    expected = losses(by_trainer[1])
    assert max(abs(a - b) / b for a, b in zip(losses(tmp_path / "out"), expected, strict=True)) > 1e-2


# --------------------------------------------------------------------------------------------------- mutations


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("average_gradients(model)\n", "pass\n"), "the replicas differ: rank(s) 1"),
        (("mine = dealt(total, world)", "mine = len(labels)"), "trained on more than once"),
        (("seed_everything(args.seed, 0,", "seed_everything(args.seed, world.rank,"), "the replicas differ: rank(s) 1"),
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
        ("labels[mine:] = -100", "pass"),
        ("loss = sums.sum() / total", "loss = sums.sum() / len(labels) / world.size"),
        ("sampler.set_epoch(epoch, ", "sampler.set_epoch(0, "),
    ],
)
def test_mutations_are_noticed_by_the_parity_test(
    programs: Programs, tmp_path: Path, reference: tuple[BertForSequenceClassification, list[float]], old: str, new: str
) -> None:
    broken = mutated(tmp_path / "broken", (PROGRAM, old, new))
    programs.run(*TRAIN, "--nproc", 3, *SMALL, "--out", tmp_path / "out", cwd=broken)
    found = losses(tmp_path / "out")
    assert max(abs(a - b) / b for a, b in zip(found, reference[1], strict=True)) > 5e-3


# --------------------------------------------------------------------------------------------- model and tokens


def test_batches_of_like_lengths() -> None:
    lengths = torch.from_numpy(np.random.default_rng(0).integers(5, 128, 1003))
    worlds = [cast("World", SimpleNamespace(rank=rank, size=3, is_main=True)) for rank in range(3)]
    samplers = [LengthSampler(lengths, 16, world, 0) for world in worlds]
    orders = []
    for epoch in (0, 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders.append(samplers[0].order())
        assert all(torch.equal(sampler.order(), orders[-1]) for sampler in samplers)
        assert torch.equal(orders[-1].sort().values, torch.arange(1003))
        found = [[[index for _, index in batch] for batch in sampler] for sampler in samplers]
        for batch, *shares in zip(orders[-1].split(16), *found, strict=True):
            assert {index for share in shares for index in share} == set(batch.tolist())
    assert not torch.equal(*orders)
    whole = orders[0][: 62 * 16].view(62, 16)
    longest = lengths[whole].amax(dim=1)
    assert (longest * 16).sum() < 1.2 * lengths[whole].sum(), "a random order has 1.8 times"
    assert abs(torch.corrcoef(torch.stack([torch.arange(62.0), longest.float()]))[0, 1]) < 0.4, "not short ones first"
    groups = [{frozenset(batch.tolist()) for batch in order[: 62 * 16].view(62, 16)} for order in orders]
    assert not groups[0] & groups[1], "other texts meet in another epoch"
    assert len(LengthSampler(lengths[:5], 16, worlds[0], 0).order()) == 5


NUMERICS = Precision(precision="fp32", channels_last="no").on(torch.device("cpu"))


def odd_batch(seed: int, most: int = 40) -> torch.Tensor:
    random = np.random.default_rng(seed)
    lengths = [*random.integers(2, most, 7).tolist(), 2, most]
    rows = [torch.from_numpy(random.integers(1, 50, length)) for length in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_scores_and_gradients_are_the_models_own(layers: int) -> None:
    torch.manual_seed(layers)
    config = BertConfig(vocab_size=50, hidden_size=128, num_hidden_layers=layers, num_attention_heads=2,
                        intermediate_size=256, max_position_embeddings=40)  # fmt: skip
    bert = BertForSequenceClassification(config).eval().double()
    classifier = Classifier(bert, NUMERICS).double()
    ids = odd_batch(layers)
    found = classifier(ids)
    expected = bert(ids, (ids != 0).long()).logits
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in bert.named_parameters()}
    bert.zero_grad()
    (classifier(ids) * weights).sum().backward()
    for name, parameter in bert.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("asking", [1, 9])
def test_attention_by_products_is_torchs_own(asking: int) -> None:
    """In bfloat16 on a CPU the example multiplies matrices; both stay as near to float64 as bfloat16 goes."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(3, 2, length, 8, generator=generator, dtype=torch.float64) for length in (asking, 9, 9)]
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]]))[:, None, None, :]  # [3, 1, 1, 9]

    def results(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [each.clone().to(dtype).requires_grad_() for each in exact]
        mixed = attend(*inputs, mask, 0.0)
        mixed.square().sum().backward()
        return [mixed.detach(), *(each.grad for each in inputs if each.grad is not None)]

    right = results(_attend, torch.float64)
    assert len(right) == 4
    for ours, theirs in zip(results(_attend_bf16_cpu, torch.float64), right, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(results(_attend_bf16_cpu, torch.bfloat16), right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.05, atol=0.05)


def test_sums_are_right_for_unequal_chunks_and_means_are_not() -> None:
    """DataParallel's chunks of 5 reviews on 4 devices: 2, 2 and 1."""
    model = Classifier(shipped()[0].eval(), NUMERICS)
    ids, labels = odd_batch(5)[:5], torch.tensor([0, 1, 1, 0, 1])
    whole = F.cross_entropy(model(ids), labels)
    chunks = list(zip(ids.chunk(4), labels.chunk(4), strict=True))
    assert [len(part) for part, _ in chunks] == [2, 2, 1]
    sums = torch.cat([model(*chunk) for chunk in chunks])
    torch.testing.assert_close(sums.sum() / 5, whole)
    means = torch.stack([F.cross_entropy(model(part), targets) for part, targets in chunks]).mean()
    assert abs(means - whole).item() > 1e-4


@pytest.mark.parametrize("labels", [[0, 1, 1, 0, 1], [0, 1, 1, -100, -100]], ids=["labels", "padding"])
def test_two_replicas_equal_one_device(monkeypatch: pytest.MonkeyPatch, labels: list[int]) -> None:
    """5 reviews are 3 and 2: loss and gradients of the model itself, also where a replica has nothing but padding."""
    monkeypatch.setattr(nn, "DataParallel", OnCpus)
    ids, targets = odd_batch(5)[:5], torch.tensor(labels)
    one, model = shipped()[0], Classifier(shipped()[0], NUMERICS)
    loss = one(ids, (ids != 0).long(), labels=targets).loss
    loss.backward()
    parallel = data_parallel(model, [0, 1])
    assert isinstance(parallel, OnCpus)
    sums = parallel(ids, targets)  # [2]
    assert (sums.shape, parallel.chunks) == ((2,), [[3, 2]])
    found = sums.sum() / (targets >= 0).sum()
    found.backward()
    torch.testing.assert_close(found, loss)
    gradients = {name: parameter.grad for name, parameter in one.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    torch.testing.assert_close(
        {name: parameter.grad for name, parameter in model.bert.named_parameters()}, gradients, rtol=1e-4, atol=1e-6
    )
    with torch.inference_mode():
        torch.testing.assert_close(parallel(ids), one(ids, (ids != 0).long()).logits)
        assert parallel(ids[:1]).shape == (1, 2), "fewer reviews than devices"


FIVES = ("--epochs", 1, "-b", 5, "--hidden", 64, "--layers", 2, *FP32)  # 56 batches of 5 reviews and one of 4
MEANS = (('reduction="sum"', 'reduction="mean"', "classifier"), ("sums.sum() / total", "sums.mean()", "train"))


@pytest.fixture(scope="module")
def fives(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program on one device."""
    out = tmp_path_factory.mktemp("fives")
    shared_programs.run(*TRAIN, *FIVES, "--out", out)
    return out


@pytest.mark.parametrize("means", [False, True], ids=["sums", "mutation"])
def test_the_program_on_two_replicas(programs: Programs, tmp_path: Path, fives: Path, means: bool) -> None:
    """Two replicas train as one device does; not so with the mean of the replicas' means."""
    path = "examples/bert_dp/classifier.py"
    changed = mutated(
        tmp_path / "changed",
        (path, "import torch\n", "import cpu_replicas\nimport torch\n"),
        (path, "LABEL2ID =", "cpu_replicas.install()\nLABEL2ID ="),
        (path, "        return []\n", "        return [0, 1]\n"),
        *((f"examples/bert_dp/{file}.py", old, new) for old, new, file in MEANS if means),
    )
    shutil.copy(ROOT / "tests" / "cpu_replicas.py", changed)
    out = tmp_path / "out"
    done = programs.run(*TRAIN, *FIVES, "--out", out, cwd=changed)
    assert re.findall(r"trained on chunks of (.*)", done.stdout) == ["[3, 2]"] * 56 + ["[2, 2]"]
    found, expected = losses(out), losses(fives)
    if means:
        assert max(abs(a - b) / b for a, b in zip(found, expected, strict=True)) > 5e-3
        return
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=0)
    torch.testing.assert_close(state_of(out), state_of(fives), rtol=1e-3, atol=2e-4)
    assert predictions(out) == predictions(fives)
    names = ("metrics", "steps", "train_samples")
    assert [result(out)[name] for name in names] == [result(fives)[name] for name in names]


def test_the_inner_model_is_reached_through_module() -> None:
    wrapped = nn.DataParallel(shipped()[0])
    with pytest.raises(AttributeError, match="config"):
        _ = wrapped.config
    assert wrapped.module.config.id2label == ID2LABEL, "set before wrapping"


def test_tokenised_once_is_what_the_tokenizer_says() -> None:
    texts = ["房间很好", "Wi-Fi 很慢 ABC", "好" * 300, "", "a[PAD]b"]
    tokenizer = make_tokenizer(vocabulary(texts), 16)
    data = encode(tokenizer, texts, [0, 1, 0, 1, 0], 16)
    expected = tokenizer(texts, truncation=True, max_length=16, padding=True, return_tensors="pt")["input_ids"]
    ids, labels, indices = data.__getitems__([0, 1, 2, 3, 4])
    assert torch.equal(ids, expected)
    assert (labels.tolist(), indices.tolist(), data.cut) == ([0, 1, 0, 1, 0], [0, 1, 2, 3, 4], 1)
    short, _, _ = data.__getitems__([(7, 0), (7, 3)])
    assert short.shape == (2, 6), "padded to the longest of the batch"
    assert not (expected == tokenizer.unk_token_id).any(), "the vocabulary has every character of its texts"


def test_the_vocabulary_of_a_real_model(real_data: Path) -> None:
    tokens = read_vocabulary(real_data / "bert-base-chinese/vocab.txt")
    ours, theirs = make_tokenizer(tokens, 128), BertTokenizer.from_pretrained(real_data / "bert-base-chinese")
    text = "酒店位置好，wifi快，房间有12.5平米——不错！"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours("WIFI")["input_ids"] == ours("wifi")["input_ids"], "no capital letters in this vocabulary"


# ------------------------------------------------------------------------------------------------ csv and split


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rows(count: int, first: str = "1,好", second: str = "0,差") -> str:
    return "".join(f"{first}{n}\n{second}{n}\n" for n in range(count))


def test_an_odd_csv_is_read_cleaned_and_counted(tmp_path: Path) -> None:
    text = (
        "\ufeffReview , LABEL,other\r\n"
        + "".join(
            f"很好{n},{label},\r\n"
            for n, label in enumerate(["1", "1.0", "好评", "Positive", "pos", " 正面 ", "true"] * 2)
        )
        + "".join(
            f"很差{n},{label},\r\n"
            for n, label in enumerate(["0", "0.0", "差评", "NEGATIVE", "neg", "负面", "False"] * 2)
        )
        + '"有逗号,还有""引号""\r\n和换行",1,x\r\n'
        + "很好0,1,\r\n"  # repeated
        + " 很好0 ,1,\r\n"  # and with spaces
        + ",1,\r\n   ,0,\r\n,,\r\n"  # no review
        + "没有标签,,\r\n"
        + "又好又坏,1,\r\n又好又坏,0,\r\n"
        + "NA,1,\r\nnull,0,\r\n"  # words, not missing values
    )
    found = read_reviews(written(tmp_path / "odd.csv", text))
    assert found.labels == [1] * 14 + [0] * 14 + [1, 1, 0]
    assert found.texts[28:] == ['有逗号,还有"引号"\r\n和换行', "NA", "null"]
    assert found.counts == {
        "rows": 39,
        "without a review left out": 3,
        "without a label left out": 1,
        "repeated left out": 2,
        "with both labels left out": 2,
    }
    assert str(found) == (
        "odd: 39 rows, 3 without a review left out, 1 without a label left out, 2 repeated left out, "
        "2 with both labels left out; 16 好评, 15 差评"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty; expected a header with label and review"),
        ("label,review\n", r"has 0 usable review\(s\) with the label 0 \(差评\) of 0 row\(s\)"),
        ("text,stars\n好,1\n", "has no column label and no review; it has text, stars"),
        (
            "label,review\n" + rows(10, second="1,差"),
            r"0 usable review\(s\) with the label 0 .* both labels are needed",
        ),
        ("label,review\n" + rows(9), r"9 usable review\(s\) with the label 0"),
        (
            "label,review\n" + rows(10) + "2,还行\n3,嗯\n",
            r"row 21 below the header: the label '2' is none of .*2 such row",
        ),
        ("label,review\n" + rows(10) + "1,很好,真的\n", r"is no table \(Expected 2 fields in line 22, saw 3\)"),
        ("label,review\n" + "".join(f"1,很好{n},真的\n" for n in range(20)), "rows with more fields than the header"),
        ('label,review\n1,"没有结束\n', "is no table"),
        (("label,review\n" + rows(10)).encode("gb18030"), r"is not UTF-8 \(.* at byte \d+\); convert it"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_csv_is_a_users_mistake(tmp_path: Path, content: str | bytes | None, words: str) -> None:
    path = tmp_path / "bad.csv"
    if content is not None:
        written(path, content)
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}.* {words}"):
        read_reviews(path)


def test_the_split_is_seeded_and_stratified(real_data: Path) -> None:
    reviews = read_reviews(real_data / "chnsenticorp/ChnSentiCorp_htl_all.csv")
    assert len(reviews.texts) == 7765
    assert reviews.counts["without a review left out"] == 1
    first, again, other = split(reviews, 0), split(reviews, 0), split(reviews, 1)
    assert first == again != other
    assert sorted(first[0] + first[1]) == list(range(7765))
    assert len(first[1]) == 777
    shares = [np.mean([reviews.labels[position] for position in part]) for part in first]
    assert abs(shares[0] - shares[1]) < 1e-3


def test_the_shipped_reviews_are_our_own(real_data: Path) -> None:
    """No sentence of them stands in the real data, and no review twice."""
    ours = read_reviews(None)
    assert ours.counts["rows"] == len(ours.texts) == 316
    theirs = (real_data / "chnsenticorp/ChnSentiCorp_htl_all.csv").read_text()
    assert [text for text in ours.texts for n in range(len(text) - 11) if text[n : n + 12] in theirs] == []


# ----------------------------------------------------------------------------------------------------- bad input


def test_weights_that_were_saved_in_halves_are_trained_in_full(tmp_path: Path, default_run: Path) -> None:
    bert, tokenizer = load(default_run / "model")
    bert.half().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load(tmp_path)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc", 2, "-b", 7], r"--batch-size 7 \(global\) cannot be divided by 2 ranks"),
        (["--nproc", 2, "--csv", "CSV"], r"\S+ has 0 usable review\(s\) with the label 0"),
        (["--nproc", 2, "--model", "EMPTY"], "--model .*: no config.json there"),
        (["--model", "DIR", "--vocab", "x"], "--vocab with --model: the folder decides that"),
        (["--hidden", 100], "--hidden 100: give a multiple of 64"),
        (["--channels-last", "yes"], "--channels-last is for images"),
        (["--model", "NOWEIGHTS"], "--model .*: no weights there"),
        (["--nproc", 2, "--model", "OTHERVOCAB"], "--model .*: .* they are not of one model"),
        (["--vocab", "EMPTY"], "--vocab .* cannot be read"),
        (["--vocab", "CSV"], "--vocab .* is no vocabulary of a BERT: it lacks"),
        (["--vocab", "TWICE"], "--vocab .* is no vocabulary of a BERT: .* no token twice"),
        (["--max-length", 200, "--model", "MODEL"], "--max-length 200: the model in .* takes at most 128 tokens"),
    ],
)
def test_bad_input_is_one_line(
    programs: Programs, tmp_path: Path, default_run: Path, flags: list[object], words: str
) -> None:
    written(tmp_path / "CSV", "label,review\n" + rows(12, second="1,差"))
    (tmp_path / "EMPTY").mkdir()
    places = {name: tmp_path / name for name in ("CSV", "EMPTY", "NOWEIGHTS", "OTHERVOCAB", "TWICE")}
    places["MODEL"] = default_run / "model"
    for name in ("NOWEIGHTS", "OTHERVOCAB"):
        shutil.copytree(places["MODEL"], places[name])
    next(places["NOWEIGHTS"].glob("*.safetensors")).unlink()
    config = places["OTHERVOCAB"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 77}))
    written(places["TWICE"], "".join(f"{token}\n" for token in (*SPECIAL, "好", "好")))
    done = programs.run(*TRAIN, *(places.get(str(flag), flag) for flag in flags), "--out", tmp_path / "out", code=2)
    line = done.stderr.replace(NO_GPU, "")
    assert re.fullmatch(rf"error: .*{words}.*\n", line), line
    assert not (tmp_path / "out/result.json").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc", 2, "-b", 7], r"--batch-size 7 \(global\) cannot be divided by 2 ranks"),
        (["--nproc", 2, "--csv", "CSV"], r"\S+ has 0 usable review\(s\) with the label 0"),
        (["--save-total-limit", 2], "--save-total-limit 2: give at least 3"),
        (["--resume", "nothing"], "checkpoint nothing is damaged .*, or no checkpoint of this program"),
    ],
)
def test_bad_input_of_the_trainer_is_one_line(
    programs: Programs, tmp_path: Path, flags: list[object], words: str
) -> None:
    written(tmp_path / "CSV", "label,review\n" + rows(12, second="1,差"))
    done = programs.run(
        *TRAINER, *(tmp_path / "CSV" if flag == "CSV" else flag for flag in flags), "--out", tmp_path / "out", code=2
    )
    line = done.stderr.replace(NO_GPU, "")
    assert re.fullmatch(rf"error: .*{words}.*\n", line), line
    assert not (tmp_path / "out/result.json").exists()


def test_a_text_longer_than_the_model_is_counted(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(*TRAIN, *SMALL, "--epochs", 1, "--max-length", 24, "--out", tmp_path)
    cut = result(tmp_path)["cut_texts"]
    assert f"warning: {cut} of 316 reviews have more than 24 tokens and lose their ends\n" in done.stderr
    assert 100 < cut < 250


def break_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights there"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "no weights there"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no vocabulary there"),
        (lambda folder: make_tokenizer(vocabulary(["另一个"]), 128).save_pretrained(folder), "are not of one model"),
        (lambda folder: edit(folder / "config.json", vocab_size=9), "are not of one model"),
        (lambda folder: edit(folder / "config.json", model_type="roberta"), "of the type roberta, not a BERT"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded"),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=3), r"16 tensor\(s\) of its config"),
        (lambda folder: break_weights(folder, lambda weights: weights.pop("bert.embeddings.LayerNorm.weight")),
         r"1 tensor\(s\) of its config.json are not .* \(bert.embeddings.LayerNorm.weight"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be loaded"),
    ],
)  # fmt: skip
def test_a_bad_model_folder_is_a_users_mistake(
    tmp_path: Path, default_run: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(default_run / "model", folder)
    damage(folder)
    with pytest.raises(UserError, match=rf"^--model {re.escape(str(folder))}.*{words}"):
        load(folder, 128, new_head=True)


def test_a_pretrained_model_without_a_head_gets_a_new_one(tmp_path: Path, default_run: Path) -> None:
    """As a real BERT comes: without classifier, perhaps without pooler. For predicting, it is refused."""
    bert, tokenizer = load(default_run / "model")
    BertModel(bert.config, add_pooling_layer=False).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found, _ = load(tmp_path, 64, new_head=True, dropout=0.3)
    assert found.config.id2label == ID2LABEL
    assert found.config.hidden_dropout_prob == 0.3
    with pytest.raises(UserError, match=r"4 tensor\(s\) of its config.json are not"):
        load(tmp_path)


def test_a_pretrained_model_is_fine_tuned_offline(programs: Programs, tmp_path: Path, default_run: Path) -> None:
    """A server stands in for the hub; nobody may ask it."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                asked.append(connection.recv(100))
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HF_HOME": str(tmp_path / "home")}
        folder = default_run / "model"
        for program in (TRAIN, TRAINER):
            out = tmp_path / program[1]
            programs.run(*program, "--model", folder, "--epochs", 1, "--out", out, env=hub, cold=True)
            assert result(out)["metrics"]["accuracy"] >= 0.7, "it has learned before"
        programs.run(*PREDICT, "--model", folder, "--text", GOOD, "--pipeline", env=hub, cold=True)
        server.shutdown(socket.SHUT_RDWR)
    assert asked == []


def test_saving_is_atomic(tmp_path: Path, default_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while the best model is replaced leaves the old one whole."""
    bert, tokenizer = load(default_run / "model")
    save(tmp_path / "model", bert, tokenizer)
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        save(tmp_path / "model", bert, tokenizer)
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before


# -------------------------------------------------------------------------------------------------- the real data


def test_real_reviews_are_learned(programs: Programs, tmp_path: Path, real_data: Path) -> None:
    """Two thousand of them, one pass; the figure in the README is of all."""
    frame = pd.read_csv(real_data / "chnsenticorp/ChnSentiCorp_htl_all.csv")
    pd.concat([part.head(1200) for _, part in frame.groupby("label")]).to_csv(tmp_path / "some.csv", index=False)
    programs.run(
        *TRAIN, "--nproc", 2, "--csv", tmp_path / "some.csv", "--vocab", real_data / "bert-base-chinese/vocab.txt",
        "--max-length", 64, "--epochs", 3, "--out", tmp_path / "out", limit=200,
    )  # fmt: skip
    assert result(tmp_path / "out")["metrics"]["accuracy"] > 0.75
    for text, label in (
        ("房间很干净，服务也很热情，非常满意。", "好评"),
        ("房间又脏又臭，服务态度极差，太失望了。", "差评"),
    ):
        said = programs.run(*PREDICT, "--model", tmp_path / "out" / "model", "--text", text).stdout
        assert said.startswith(label), said


# ----------------------------------------------------------------------------------------------------- with a GPU


def several() -> dict[str, str]:
    """One GPU, and with several all of them."""
    count = torch.cuda.device_count()
    return {"one": "0"} | ({"all": ",".join(map(str, range(count)))} if count > 1 else {})


@pytest.mark.gpu
def test_cuda_devices_equal_a_plain_loop(
    programs: Programs, tmp_path: Path, reference: tuple[BertForSequenceClassification, list[float]]
) -> None:
    """`nn.DataParallel` over one GPU and, with several, over all of them."""
    for name, visible in several().items():
        done = programs.run(
            *TRAIN, *SMALL, "--deterministic", "--out", tmp_path / name, env={"CUDA_VISIBLE_DEVICES": visible}
        )
        used = ", ".join(f"cuda:{number}" for number in range(len(visible.split(","))))
        assert f"DataParallel over {used}\n" in done.stdout
        torch.testing.assert_close(losses(tmp_path / name), reference[1], rtol=1e-3, atol=0)
        assert result(tmp_path / name)["device"] == "cuda"


@pytest.mark.gpu
def test_the_trainer_on_cuda_devices_equals_the_cpu(
    programs: Programs, tmp_path: Path, even: Path, by_trainer: dict[int, Path]
) -> None:
    """It counts the GPUs itself, and the global batch is divided by them."""
    for name, visible in several().items():
        flags = (*TRAINER, *EVEN, "--csv", even, "--out", tmp_path / name)
        count = len(visible.split(","))
        if 36 % count:  # the batch of EVEN
            programs.run(*flags, env={"CUDA_VISIBLE_DEVICES": visible}, code=2)
            continue
        done = programs.run(*flags, env={"CUDA_VISIBLE_DEVICES": visible})
        assert f"{count} device(s) per process" in done.stdout
        found = result(tmp_path / name)
        assert found["parallel_mode"] == ("not_parallel" if count == 1 else "not_distributed")
        assert found["steps"] == 15
        torch.testing.assert_close(losses(tmp_path / name), losses(by_trainer[1]), rtol=2e-3, atol=0)
