"""bert_dp's model folder: saved, loaded, damaged, without the network; and what predict.py makes of it."""

import csv
import json
import re
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import pipeline
from transformers.models.bert.modeling_bert import BertForSequenceClassification, BertModel
from transformers.models.bert.tokenization_bert import BertTokenizer

from common.launch.errors import UserError
from common.train.precision import Precision
from examples.bert_dp import predict
from examples.bert_dp.args import PredictArgs
from examples.bert_dp.classifier import Classifier
from examples.bert_dp.model import load, save
from examples.bert_dp.reviews import ID2LABEL
from examples.bert_dp.tokens import make_tokenizer, vocabulary
from tests.conftest import Programs
from tests.examples.bert_jobs import BAD, BRIEF, GOOD, PREDICT, ROBUST, TRAIN, default_run, shipped
from tests.runs import result

__all__ = ["default_run"]  # a fixture


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


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_pipeline_computes_in_the_precision_that_was_asked_for(
    default_run: Path, monkeypatch: pytest.MonkeyPatch, precision: Literal["fp32", "bf16"], dtype: torch.dtype
) -> None:
    said, computed = [], set[torch.dtype]()
    monkeypatch.setattr(predict, "say", lambda name, *_: said.append(name))
    amp = Precision(precision=precision, channels_last="no")
    args = PredictArgs(model=default_run / "model", text=GOOD, pipeline=True, amp=amp)
    with register_module_forward_hook(
        lambda module, _, output: computed.add(output.dtype) if isinstance(module, nn.Linear) else None
    ):
        predict.predict_by_pipeline(args, GOOD, torch.device("cpu"))
    assert (said, computed) == (["好评"], {dtype})


def test_a_csv_is_predicted_in_its_order(programs: Programs, tmp_path: Path, default_run: Path) -> None:
    rows = [{"Review": text, "number": str(n)} for n, text in enumerate([GOOD, BAD, "", "  ", BAD * 40, GOOD, "abc😀"])]
    pd.DataFrame(rows).to_csv(tmp_path / "in.csv", index=False, encoding="utf-8-sig")
    written = []
    for nproc in (1, 2, 3):
        out = tmp_path / f"{nproc}.csv"
        done = programs.run(
            *PREDICT,
            "--model",
            default_run / "model",
            "--csv",
            tmp_path / "in.csv",
            "--out",
            out,
            "--nproc",
            nproc,
            "-b",
            2,
        )
        assert "7 rows, 2 without a review left empty" in done.stdout
        assert len(re.findall("warning: 1 of 5 reviews have more than 128 tokens", done.stdout + done.stderr)) == 1
        written.append(out.read_bytes())
    assert written[0] == written[1] == written[2]
    found = list(csv.DictReader(written[0].decode().splitlines()))
    assert [row["number"] for row in found] == list("0123456")
    assert [row["prediction"] for row in found][:6] == ["好评", "差评", "", "", "差评", "好评"]
    assert [bool(row["probability"]) for row in found] == [True, True, False, False, True, True, True]


def test_weights_that_were_saved_in_halves_are_trained_in_full(tmp_path: Path, default_run: Path) -> None:
    bert, tokenizer = load(default_run / "model")
    bert.half().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load(tmp_path)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}


def test_a_folder_that_asks_for_another_attention_has_the_same_scores(tmp_path: Path, default_run: Path) -> None:
    """Eager attention would add 1 to the scores of tokens and 0 to those of padding, and so attend to padding."""
    own = shutil.copytree(default_run / "model", tmp_path / "eager")
    edit(own / "config.json", attn_implementation="eager")
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    models = (load(folder)[0].eval() for folder in (own, default_run / "model"))
    one, other = (Classifier(model)(ids) for model in models)
    assert torch.equal(one, other)


def break_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors there$"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "no model.safetensors there; pickled",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no vocabulary there"),
        (lambda folder: make_tokenizer(vocabulary(["另一个"]), 128).save_pretrained(folder), "are not of one model"),
        (lambda folder: edit(folder / "config.json", vocab_size=9), "are not of one model"),
        (lambda folder: edit(folder / "config.json", model_type="roberta"), "of the type roberta, not a BERT"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded"),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=3), r"16 tensor\(s\) of its config"),
        (
            lambda folder: break_weights(folder, lambda weights: weights.pop("bert.embeddings.LayerNorm.weight")),
            r"1 tensor\(s\) of its config.json are not .* \(bert.embeddings.LayerNorm.weight",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be loaded"),
    ],
)
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
        for program in (TRAIN, BRIEF, ROBUST):
            out = tmp_path / program[1]
            programs.run(*program, "--model", folder, "--epochs", 1, "--out", out, env=hub, cold=True)
            if program == BRIEF:
                accuracy = json.loads((out / "checkpoints/eval_results.json").read_text())["eval_accuracy"]
            else:
                accuracy = result(out)["metrics"]["accuracy"]
            assert accuracy >= 0.7, "it has learned before"
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


def test_real_reviews_are_learned(programs: Programs, tmp_path: Path, real_data: Path) -> None:
    """Two thousand of them, one pass; the figure in the README is of all."""
    frame = pd.read_csv(real_data / "chnsenticorp/ChnSentiCorp_htl_all.csv")
    pd.concat([part.head(1200) for _, part in frame.groupby("label")]).to_csv(tmp_path / "some.csv", index=False)
    programs.run(
        *TRAIN,
        "--nproc",
        2,
        "--csv",
        tmp_path / "some.csv",
        "--vocab",
        real_data / "bert-base-chinese/vocab.txt",
        "--max-length",
        64,
        "--epochs",
        3,
        "--out",
        tmp_path / "out",
        limit=200,
    )
    assert result(tmp_path / "out")["metrics"]["accuracy"] > 0.75
    for text, label in (
        ("房间很干净，服务也很热情，非常满意。", "好评"),
        ("房间又脏又臭，服务态度极差，太失望了。", "差评"),
    ):
        said = programs.run(*PREDICT, "--model", tmp_path / "out" / "model", "--text", text).stdout
        assert said.startswith(label), said
