"""bert_dp: tables and folders as people have them, vocabulary, chunks, Trainer, predictions."""

import csv
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any
from unittest import mock

import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, BertForSequenceClassification, RobertaConfig, pipeline

from common.launch import UserError
from examples.bert_dp import predict, trainer
from examples.bert_dp.args import REVIEWS
from examples.bert_dp.data import Reviews
from examples.bert_dp.further import baseline
from examples.bert_dp.model import pretrained, small
from tests import programs, ranks
from tests.ranks import At
from tests.reference import bert_dp as reference

REAL = Path(os.environ.get("DDP_TEST_DATA", Path(__file__).parents[3] / "shared/data"))
ROWS = "".join(f"{n % 2},很好{n}\n" for n in range(12))
TABLE = f"label,review\n{ROWS}"
FIVES = ["--epochs", "1", "--batch-size", "5", "--seed", "1", "--lr", "1e-3", "--max-length", "24"]


def file(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ------------------------------------------------------------------------------------- reviews


def test_reviews_keep_their_rows_when_others_are_left_out(tmp_path: Path) -> None:
    odd = ["\ufeffreview,id,label", '"很好,\r真的""好""",7,1.0', ",8,1", "NA,9,0", "", "   ,10,0"]
    odd += ["没有标签,11,", "又好又坏,12,1", "又好又坏,13,0", "NA,14,0"]
    odd = "\r\n".join([*odd, *(f"房间{n},{n},{n % 2}" for n in range(10))])
    reviews = Reviews(file(tmp_path / "odd.csv", odd))
    assert (reviews[0], reviews[1]) == (('很好,\r真的"好"', 1), ("NA", 0))
    assert reviews.rows == [1, 3, *range(9, 19)]
    assert reviews.about.startswith("odd.csv: 18 rows, 3 incomplete, 1 repeated, 2 with both")
    assert reviews.columns([1, 11]) == {"row": [3, 18], "text": ["NA", "房间9"]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "No columns"),
        (TABLE.replace("label", "stars"), "columns stars, review; expected label"),
        (TABLE.replace("label,review", "label,review,label"), "expected label,review"),
        (TABLE.replace(",", ";"), "columns label;review; expected label,review"),
        (TABLE + "2,还行\n", "row 13: label '2'"),
        (TABLE + "差评,还行\n", "row 13: label '差评'"),
        (TABLE + "1,很好,真的\n", "Expected 2 fields in line 14, saw 3"),
        (TABLE + '1,"没有结束\n1,好\n', "EOF inside string"),
        (TABLE + "1,好\0\n", "NUL byte on line 14; delete it"),
        (TABLE.encode("gbk"), "not valid UTF-8 .line 2.*GB18030"),
        (TABLE.encode("utf-16"), "not valid UTF-8 .line 1.*UTF-16"),
        (TABLE.encode("utf-16-le"), "not valid UTF-8 .line 2.*ENCODING.*UTF-16"),
        (TABLE.replace("0,", "1,"), "both labels"),
        ("label,review\n1,好\n0,坏\n", "needs at least 10"),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (None, "No such file"),
    ],
)
def test_a_table_that_is_none_is_a_users_mistake(
    tmp_path: Path, content: str | bytes | None, words: str
) -> None:
    path = tmp_path / "bad.csv"
    if content is not None:
        file(path, content)
    with pytest.raises(UserError, match=f"bad.csv.*{words}"):
        Reviews(path)


# -------------------------------------------------------------------------- tokenizer and model


@pytest.mark.parametrize(
    "text",
    [
        "방이 깨끗하고 최고예요",
        "ホテルがきれいでした。ガラス",
        "👍👍 👎👎 ❤️👍🏽 👩‍👩‍👧",
        "Café À LA WiFi5",
        "ห้องดีมาก",
        "𠮷野家很好",
    ],
)
def test_the_vocabulary_can_write_its_own_texts(tmp_path: Path, text: str) -> None:
    tokenizer = small([text, "房间"], 64)[1]
    tokenizer.save_pretrained(tmp_path)
    saved: Any = AutoTokenizer.from_pretrained(tmp_path)  # what pipeline uses
    for each in (tokenizer, saved):
        ids = each(text)["input_ids"]
        assert each.unk_token_id not in ids
        kept = [c for c in text.lower() if not c.isspace() and c != "\u200d"]
        assert "".join(each.convert_ids_to_tokens(ids)[1:-1]).replace("##", "") == "".join(kept)
        assert each("👍")["input_ids"] != each("👎")["input_ids"] or "👍" not in text


def test_a_word_may_be_a_whole_sentence(tmp_path: Path) -> None:
    """WordPiece would replace a word of more than 100 characters by [UNK]."""
    bert, tokenizer = small([text := "ห้องดีมาก" * 14], 64)
    bert.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, pretrained(tmp_path, 64, new_head=False)[1]):
        ids = each(text)["input_ids"]
        assert "".join(each.convert_ids_to_tokens(ids)[1:-1]).replace("##", "") == text


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """Return a folder with the names and files of 2018."""
    (tmp_path / "data").mkdir()
    reference.prepare(tmp_path / "data")
    return tmp_path / "data/bert"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def to_pickle(folder: Path, zipped: bool) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)


def without_prefix(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights = {n.removeprefix("bert."): v for n, v in weights.items() if n.startswith("bert.")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("layout", ["as it is", "pickled", "pickled before 1.6", "without prefix"])
def test_old_folders_are_read_and_saved_with_todays_names(
    tmp_path: Path, bert: Path, layout: str
) -> None:
    written = load_file(bert / "model.safetensors")
    file(bert / "tf_model.h5", POINTER)  # not downloaded, and not needed
    if layout == "without prefix":
        without_prefix(bert)
    elif layout != "as it is":
        to_pickle(bert, layout == "pickled")
    model, tokenizer = pretrained(bert, 20)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    for name, value in written.items():
        if name.startswith("bert."):
            new = name.replace(".gamma", ".weight").replace(".beta", ".bias")
            torch.testing.assert_close(saved[new], value, rtol=0, atol=0)
    again, _ = pretrained(tmp_path / "saved", 20, new_head=False)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (model.config.id2label, model.dtype) == ({0: "差评", 1: "好评"}, torch.float32)


def nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["bert.encoder.layer.1.output.dense.bias"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "must contain"),
        (lambda d: (d / "config.json").unlink(), "must contain"),
        (lambda d: (d / "vocab.txt").unlink(), "must contain"),
        (lambda d: (d / "model.safetensors").unlink(), "must contain"),
        (lambda d: os.truncate(d / "model.safetensors", 5000), "damaged"),
        (lambda d: (d / "config.json").write_text("{"), "damaged"),
        (lambda d: [to_pickle(d, True), os.truncate(d / "pytorch_model.bin", 5000)], "damaged"),
        (lambda d: [to_pickle(d, True), file(d / "pytorch_model.bin", "<html>")], "damaged"),
        (lambda d: file(d / "model.safetensors", POINTER), "model.safetensors: it is a git-lfs"),
        (lambda d: file(d / "vocab.txt", POINTER), "vocab.txt: it is a git-lfs"),
        (lambda d: RobertaConfig().save_pretrained(d), "contains a roberta model; use a BERT"),
        (lambda d: change(d / "config.json", vocab_size=8), "no weights for bert.embeddings.word"),
        (lambda d: change(d / "config.json", num_hidden_layers=4), "no weights for .*layer.3"),
        (lambda d: file(d / "vocab.txt", "\n".join(map(str, range(999)))), "embeddings for"),
        (nan, "contains NaN"),
    ],
)
def test_a_folder_that_is_no_bert_is_a_users_mistake(bert: Path, damage: Any, words: str) -> None:
    damage(bert)
    with pytest.raises(UserError, match=words):
        pretrained(bert, 20)


def test_positions_and_head_must_be_there_if_they_are_needed(bert: Path) -> None:
    with pytest.raises(UserError, match="--max-length 600 exceeds the 512"):
        pretrained(bert, 600)
    with pytest.raises(UserError, match="no weights for bert"):
        pretrained(bert, 20, new_head=False)


# -------------------------------------------------------------------------------------- training


def copies(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool) -> list[list[Tensor]]:
    return [[t.detach() if detach else t.clone() for t in tensors] for _ in devices]


class FourCpus(nn.DataParallel):
    """Torch's DataParallel with four CPUs as devices; of CUDA it needs only copies and chunks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device_ids, self.output_device, self.dim = [0, 1, 2, 3], 0, 0
        self.src_device_obj = torch.device("cpu")

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        chunks = inputs[0].chunk(len(device_ids))
        assert [len(chunk) for chunk in chunks] in ([2, 2, 1], [8] * 4, [8] * 3 + [7])
        return [(chunk,) for chunk in chunks], [{}] * len(chunks)

    def replicate(self, module: Any, device_ids: Any) -> Any:
        name = "torch.nn.parallel.replicate._broadcast_coalesced_reshape"
        with mock.patch(name, copies):
            return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        return [replica(*each) for replica, each in zip(replicas, inputs, strict=True)]

    def gather(self, outputs: Any, output_device: Any) -> Tensor:
        return torch.cat(outputs)


WRAPPED = "nn.DataParallel(classifier, device_ids) if cuda else classifier"
FOUR = f"__import__('{__name__}', fromlist=['x']).FourCpus(classifier)"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> ranks.Training:
    """Train on batches of five reviews; the second epoch is worse than the first."""
    flags = [*FIVES, "--epochs", "2", "--lr", "3e-3"]
    return ranks.run("bert_dp", 1, flags, out=tmp_path_factory.mktemp("bert") / "one").done()


def test_unequal_chunks_train_like_a_plain_loop(tmp_path: Path) -> None:
    change = ("examples.bert_dp.train", WRAPPED, FOUR)
    four = ranks.run("bert_dp", 1, FIVES, out=tmp_path / "four", mutate=[change]).done()
    expected = ranks.call(reference.train, FIVES, folder=tmp_path / "expected")
    assert len(four.losses) == 57
    assert four.losses[:10] == pytest.approx(expected.losses[:10], rel=1e-5)
    assert four.losses == pytest.approx(expected.losses, rel=1e-2)
    assert four.result["metrics"] == pytest.approx(expected.metrics, rel=1e-2)


def test_replicas_compute_in_bf16() -> None:
    from examples.bert_dp.train import Classifier

    bert, seen = small(["很好"], 8)[0], []
    bert.classifier.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    classifier = Classifier(bert, 0, torch.autocast("cpu", torch.bfloat16))
    assert FourCpus(classifier)(torch.ones(5, 6, dtype=torch.long)).dtype == torch.float32
    assert set(seen) == {torch.bfloat16}


def test_predictions_and_model_are_those_of_the_best_epoch(one: ranks.Training) -> None:
    table = pandas.read_csv(one.out / "predictions.csv")
    reviews = pandas.read_csv(REVIEWS)
    own = reviews.iloc[table["row"] - 1].reset_index()
    assert len(table) == 31
    assert table["text"].tolist() == own["review"].tolist()
    assert table["label"].tolist() == own["label"].tolist()
    classify = pipeline("text-classification", str(one.out / "model"))
    answers = [a["label"] for a in classify(own["review"].tolist(), truncation=True)]
    assert table["prediction_name"].tolist() == answers
    assert (table["label"] == table["prediction"]).mean() == one.result["best"]
    assert one.result["best"] > one.result["metrics"]["accuracy"]
    assert torch.equal(
        load_file(one.out / "model/model.safetensors")["classifier.weight"],
        load_file(one.out / "best.safetensors")["classifier.weight"],
    )


def test_dropout_differs_between_ranks_and_is_resumed(bert: Path, tmp_path: Path) -> None:
    change(bert / "config.json", hidden_dropout_prob=0.3)
    data = ["--csv", str(bert.parent / "reviews.csv"), "--model", str(bert)]
    flags = [*data, "--max-length", "20", "--epochs", "2", "--batch-size", "24", "--lr", "1e-3"]
    whole = ranks.run("bert_dp", 2, flags, out=tmp_path / "whole").done()
    same = [("examples.bert_dp.train", "args.seed + rank", "args.seed")]
    assert ranks.run("bert_dp", 2, flags, out=tmp_path / "same", mutate=same).losses != whole.losses
    fault = At(1, 6, SIGKILL)
    flags += ["--checkpoint-every", "2"]
    ranks.run("bert_dp", 2, flags, out=tmp_path / "killed", fault=fault)
    resumed = ranks.run("bert_dp", 2, [*flags, "--resume", "auto"], out=tmp_path / "killed").done()
    assert resumed.losses == whole.losses
    assert resumed.result["parameter_hash"] == whole.result["parameter_hash"]


# ------------------------------------------------------------------------------------ prediction


@pytest.mark.parametrize(
    "content",
    [
        "review\r\n很好\r\n\r\n太差\r\n\r\n还行\r\n",
        'id,review\n1,"很好\r下次再来"\n2,太差\n',
        "id,review,Prediction,Probability\n1,很好,by hand: bad,0.5\n",
        "row,review,prediction,probability_new,probability\n7,很好,1,,2\n",
        ",review,review,\n001,NA,3,\n1e5, 好 ,,x\n",
        '\ufeffid,review,c\r\n1,"他说""好"",\r\n真的"\r\n\r\n2,坏,x\r\n',
        "review,id\n",
        '"id\nx",review\n1,好\n\n2,坏\n',
    ],
)
@pytest.mark.filterwarnings("default")  # of transformers
def test_each_row_of_a_table_comes_back_with_its_prediction(
    one: ranks.Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = file(tmp_path / "predictions.csv", content)
    run = predict.Args(model=one.out / "model", csv=path)
    predict.main(run)
    assert path.read_bytes() == content.encode()
    out = tmp_path / "predictions.predictions.csv"
    with path.open(newline="", encoding="utf-8-sig") as before, out.open(newline="") as after:
        (header, *rows), (names, *answers) = csv.reader(before), csv.reader(after)
    rows = [row or [""] for row in rows if row or len(header) == 1]
    rows = [row + [""] * (len(header) - len(row)) for row in rows]
    assert names[:-2] == header
    assert [name.split("_")[0] for name in names[-2:]] == ["prediction", "probability"]
    assert not {*names[-2:]} & {*header}
    assert [row[:-2] for row in answers] == rows
    texts = [row[header.index("review")].strip() for row in rows]
    assert {row[-2] for row in answers} <= {"好评", "差评", ""}
    assert all(0.5 <= float(row[-1]) <= 1 for row in answers if row[-2])
    assert [bool(row[-2]) for row in answers] == [bool(text) for text in texts]
    assert len(pandas.read_csv(out)) == len(rows)
    with pytest.raises(UserError, match="exists; choose"):
        predict.main(run)


def test_a_sentence_is_classified_by_the_program(one: ranks.Training, tmp_path: Path) -> None:
    table = file(tmp_path / "a.csv", "text\nx\n")
    command = (*programs.PYTHON, "examples.bert_dp.predict", "--model", one.out / "model")
    done = programs.run(*command, "--text", "房间干净，服务热情。", "--csv", table)
    label, probability = done.stdout.split()
    assert label in ("好评", "差评")
    assert 0.5 <= float(probability) <= 1
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    with pytest.raises(UserError, match="nothing to predict"):
        predict.main(predict.Args(model=one.out / "model"))
    assert re.match("error: .*--column", done.stderr)


# --------------------------------------------------------------------------- Trainer and baseline


@pytest.mark.filterwarnings("default")  # of transformers
def test_the_trainer_keeps_its_best_model(bert: Path, tmp_path: Path) -> None:
    data: Any = {"csv": bert.parent / "reviews.csv", "model": str(bert), "max_length": 20}
    run = trainer.Args(**data, lr=1e-2, epochs=5, out=tmp_path / "out")
    trainer.train(run)
    checkpoints = tmp_path / "out/checkpoints"
    assert len(list(checkpoints.glob("checkpoint-*"))) <= 3
    newest = max(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    state = json.loads((newest / "trainer_state.json").read_text())
    assert state["best_metric"] == max(log.get("eval_f1", 0) for log in state["log_history"])
    best = Path(state["best_model_checkpoint"])
    weights = load_file(tmp_path / "out/model/model.safetensors")
    torch.testing.assert_close(weights, load_file(best / "model.safetensors"), rtol=0, atol=0)
    results = json.loads((checkpoints / "eval_results.json").read_text())
    assert results["eval_f1"] == pytest.approx(state["best_metric"])
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "out/model").state_dict()
    torch.testing.assert_close(loaded, weights, rtol=0, atol=0)

    shutil.rmtree(newest)
    before = best.stat().st_mtime_ns
    trainer.train(replace(run, resume=True))
    assert best.stat().st_mtime_ns == before, "trained again from the beginning"
    again = json.loads((newest / "trainer_state.json").read_text())
    assert again["log_history"][-1]["eval_loss"] == state["log_history"][-1]["eval_loss"]


def test_two_processes_of_the_trainer_share_a_batch(tmp_path: Path) -> None:
    command = (*programs.TORCHRUN, "2", "-m", "examples.bert_dp.trainer", "--epochs", "1")
    done = programs.run(*command, "--out", tmp_path).done()
    assert "; 2 process(es), " in done.stdout
    assert [path.name for path in tmp_path.glob("checkpoints/check*")] == ["checkpoint-3"]


def test_the_linear_model_is_trained_on_the_same_split(capsys: pytest.CaptureFixture[str]) -> None:
    baseline.main(seeds=2)
    first, second, mean = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert first != second, "another split"
    assert mean == pytest.approx((first + second) / 2, abs=1e-4)
    assert mean > 0.75


@pytest.mark.data
def test_the_real_reviews_and_the_real_vocabulary(tmp_path: Path) -> None:
    path = REAL / "chnsenticorp/ChnSentiCorp_htl_all.csv"
    reviews = Reviews(path)
    assert (len(reviews), sum(reviews.labels), reviews.rows[6374]) == (7765, 5322, 6376)
    folder = tmp_path / "bert"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "vocab.txt"):
        shutil.copyfile(REAL / "bert-base-chinese" / name, folder / name)
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    change(folder / "config.json", **tiny, intermediate_size=32)
    config = json.loads((folder / "config.json").read_text())
    from transformers import BertConfig

    model = BertForSequenceClassification(BertConfig(**config))
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    flags = ["--csv", str(path), "--model", str(folder), "--epochs", "1", "--batch-size", "512"]
    run = ranks.run("bert_dp", 2, flags, out=tmp_path / "out").done()
    rows = run.rows()
    assert (len(run.losses), len(rows)) == (13, 776)
    assert all(reviews.texts[reviews.rows.index(int(row["row"]))] == row["text"] for row in rows)
