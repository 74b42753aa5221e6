"""bert_dp's texts: odd and damaged csv files, the split, tokens, and batches of texts of similar length."""

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers.models.bert.tokenization_bert import BertTokenizer

from common.launch.errors import UserError
from examples.bert_dp.args import TextArgs
from examples.bert_dp.reviews import read_reviews, split
from examples.bert_dp.tokens import (
    SPECIAL,
    LengthSampler,
    add_pairs,
    encode,
    make_tokenizer,
    read_vocabulary,
    vocabulary,
)
from tests.conftest import Programs
from tests.examples.bert_jobs import PREDICT, SMALL, TRAIN, default_run
from tests.runs import NO_GPU, result

__all__ = ["default_run"]  # a fixture


def test_batches_of_like_lengths() -> None:
    lengths = torch.from_numpy(np.random.default_rng(0).integers(5, 128, 1003))
    samplers = [LengthSampler(lengths, 16, 0, rank, world_size=3) for rank in range(3)]
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
    assert len(LengthSampler(lengths[:5], 16, 0, 0, 3).order()) == 5


def test_letters_and_digits_alone_can_continue_a_word() -> None:
    assert vocabulary(["好好a", "好a。"]) == [*SPECIAL, "好", "a", "。", "##a"]


def test_the_learning_rate_rises_and_falls_in_straight_lines() -> None:
    args = TextArgs(warmup=0.2)
    assert [args.factor(step, 10) for step in range(10)] == [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]


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


def test_pairs_are_tokens_where_they_fit(tmp_path: Path) -> None:
    """As a folder for `from_pretrained` has them, too; a character that is unknown costs the stretch it stands in."""
    texts = ["房间很好", "房间很大,很好", "wifi好"]
    tokens = add_pairs(vocabulary(texts), texts, 2)
    assert {"房间", "##房间", "很好", "##很好", "##大"} <= set(tokens)
    assert len(set(tokens)) == len(tokens)
    assert not {"间很", "很大"} & set(tokens), "rarer, or of a later character"
    make_tokenizer(tokens, 16, pairs=True).save_pretrained(tmp_path)
    for tokenizer in (make_tokenizer(tokens, 16, pairs=True), BertTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.tokenize("房间很好") == ["房间", "##很好"]
        assert tokenizer.tokenize("很大间房间,WiFi好") == [
            "很",
            "##大",
            "##间",
            "##房间",
            ",",
            *["w", "##i", "##f", "##i", "##好"],
        ]
        assert tokenizer.tokenize("房间猫,很好") == ["[UNK]", ",", "很好"]
    assert add_pairs(tokens, texts, 0) == tokens


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
    assert found.rows == [*range(1, 30), 38, 39]
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
        (
            "text,stars\n好,1\n",
            r"has no column label and no review; it has text, stars: say which by --columns TEXT LABEL, or",
        ),
        (
            ("label,review\n" + rows(10)).replace(",", "\t"),
            r"has tabs between its columns: write commas, for example by python -c .*sep='\\t', dtype=str\)",
        ),
        (
            ("label,review\n" + rows(10)).replace(",", ";"),
            r"has semicolons between its columns: write commas, for example by python -c .*sep=';', dtype=str\)",
        ),
        (rows(10), "has no header: put one on top, for example by sed -i 1ilabel,review$"),
        (
            "".join(f"很好{n},正面\n" for n in range(9)),
            "has no header: put one on top, for example by sed -i 1ireview,label$",
        ),
        (
            ("label,review\n" + rows(10)).encode("utf-16"),
            "is not UTF-8, it is probably UTF-16: convert it by iconv -f UTF-16 -t UTF-8 ",
        ),
        (
            "label,review\n" + rows(10, second="1,差"),
            r"0 usable review\(s\) with the label 0 .* both labels are needed",
        ),
        ("label,review\n" + rows(9), r"9 usable review\(s\) with the label 0"),
        (
            "label,review\n" + rows(10) + "2,还行\n3,嗯\n",
            r"row 21 below the header: the label '2' is none of .*2 such row",
        ),
        ("label,review\n" + rows(10) + "1,很好,真的\n", r"is not a table \(Expected 2 fields in line 22, saw 3\)"),
        ("label,review\n" + "".join(f"1,很好{n},真的\n" for n in range(20)), "rows with more fields than the header"),
        ('label,review\n1,"没有结束\n', "is not a table"),
        (f"PK\x03\x04{rows(10)}", "is an Excel file, or a zip archive: save its table as csv in UTF-8"),
        (gzip.compress(rows(10).encode(), mtime=0), "is packed by gzip: unpack it by gunzip"),
        ('[{"label": 1}]', r"is JSON: write it as csv, .*\(.*, lines=False\)"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_csv_is_a_users_mistake(tmp_path: Path, content: str | bytes | None, words: str) -> None:
    path = tmp_path / "bad.csv"
    if content is not None:
        written(path, content)
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}.* {words}"):
        read_reviews(path)


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("gbk", "GB18030"),
        ("gb18030", "GB18030"),
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
    ],
)
def test_another_encoding_is_named_and_the_line_for_it_converts(tmp_path: Path, encoding: str, name: str) -> None:
    path, texts = tmp_path / "a b.csv", [f"{text}{n}" for n in range(12) for text in ("房間好", "房間髒")]
    path.write_bytes(("label,review\n" + "".join(f"{n % 2},{text}\n" for n, text in enumerate(texts))).encode(encoding))
    convert(path, name)
    assert read_reviews(tmp_path / "utf8.csv").texts == texts


def convert(path: Path, name: str) -> None:
    """Do what the error says."""
    with pytest.raises(UserError, match=rf"a b.csv is not UTF-8, it is probably {name}: convert it by iconv") as error:
        read_reviews(path)
    subprocess.run(str(error.value).rpartition(" by ")[2], shell=True, cwd=path.parent, check=True)


def test_western_letters_and_one_broken_line_are_not_taken_for_chinese(tmp_path: Path) -> None:
    """Curly quotes of Windows are, followed by a letter, valid GBK; so is half of a file of UTF-8."""
    path = tmp_path / "a b.csv"
    table = "label,review\n" + rows(
        12, "1,it\u2019s a café with the loveliest view", "0,it\u2019s the worst of all rooms"
    )
    path.write_bytes(table.encode("windows-1252"))
    convert(path, "WINDOWS-1252")
    assert (tmp_path / "utf8.csv").read_text() == table
    table = "label,review\n" + rows(12)
    path.write_bytes(table.encode()[:-4] + b"\n")  # the last character is cut
    with pytest.raises(UserError, match=r"is UTF-8, but not in line 25: mend that line, or .* by iconv -c") as error:
        read_reviews(path)
    subprocess.run(str(error.value).rpartition(" by ")[2], shell=True, cwd=tmp_path, check=False)  # iconv reports it
    assert len(read_reviews(tmp_path / "utf8.csv").texts) == 23


def test_an_english_corpus_is_trained_on(programs: Programs, tmp_path: Path) -> None:
    """As Windows writes it: BOM, CRLF, quoted line breaks; columns and labels of other names, others of ours."""
    words = [(a, "positive") for a in ("lovely", "quiet", "Clean", "great")]
    words += [(a, "negative") for a in ("dirty", "noisy", "awful", "old")]
    things = ("room", "bed", "lobby", "view", "staff", "breakfast")
    pairs = [(f"The {thing} was {word},\r\nI'd say.", label) for thing in things for word, label in words]
    table = "text,sentiment,review,label\r\n" + "".join(f'"{text}",{label},4 of 5,\r\n' for text, label in pairs)
    path = written(tmp_path / "english.csv", "\ufeff" + table)
    data = read_reviews(path, ("text", "sentiment"))
    assert (data.texts[0], data.labels) == (pairs[0][0], [1, 1, 1, 1, 0, 0, 0, 0] * 6)
    tokenizer = make_tokenizer(vocabulary(data.texts), 64)
    assert tokenizer.unk_token_id not in encode(tokenizer, data.texts, data.labels, 64).ids
    flags = ("--csv", path, "--columns", "text", "sentiment", "--epochs", 1, "--hidden", 64, "--out", tmp_path / "out")
    done = programs.run(*TRAIN, *flags, "-b", 8)
    assert result(tmp_path / "out")["train_samples"] == 43
    assert "lose their ends" not in done.stderr, "no review is that long"
    found = tmp_path / "found.csv"
    programs.run(*PREDICT, "--model", tmp_path / "out/model", "--csv", path, "--column", "text", "--out", found)
    frame = pd.read_csv(found)
    assert list(frame.columns) == ["text", "sentiment", "review", "label", "prediction", "probability"]
    assert frame["prediction"].isin(["好评", "差评"]).sum() == 48
    done = programs.run(*TRAIN, *flags, "--pairs", 9, code=2)
    assert "error: --pairs 9: the reviews have no Chinese; leave it out" in done.stderr


def test_columns_of_other_names_are_named(programs: Programs, tmp_path: Path) -> None:
    """And what the remedies say works: the same reviews come out of a file with tabs, and of one without a header."""
    table = "id,Comment,Stars\n" + "".join(f"{n},很好{n},1\n{n},很差{n},0\n" for n in range(10))
    path = written(tmp_path / "other.csv", table)
    with pytest.raises(UserError, match="it has id, comment, stars: say which by --columns TEXT LABEL"):
        read_reviews(path)
    found = read_reviews(path, ("comment", "Stars"))
    assert (found.texts[:2], found.labels[:2], found.rows[:2]) == (["很好0", "很差0"], [1, 0], [1, 2])
    tabs = written(tmp_path / "tabs.csv", table.replace(",", "\t"))
    with pytest.raises(UserError) as error:
        read_reviews(tabs)
    code = re.findall('python -c "(.*)"', str(error.value))
    programs.run("-c", code[0].replace("commas.csv", f"{tmp_path}/commas.csv"))
    assert read_reviews(tmp_path / "commas.csv", ("comment", "stars")).texts == found.texts
    bare = written(tmp_path / "bare.csv", rows(10))
    with pytest.raises(UserError) as error:
        read_reviews(bare)
    subprocess.run([*str(error.value).rpartition(" by ")[2].split(), bare], check=True)
    assert len(read_reviews(bare).texts) == 20
    done = programs.run(*TRAIN, "--csv", path, "--columns", "comment", "label", "--out", tmp_path / "out", code=2)
    assert "has no column label; it has id, comment, stars" in done.stderr


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc", 2, "-b", 7], r"--batch-size 7 \(global\) cannot be divided by 2 ranks"),
        (["--nproc", 2, "--csv", "CSV"], r"\S+ has 0 usable review\(s\) with the label 0"),
        (["--nproc", 2, "--model", "EMPTY"], "--model .*: no config.json there"),
        (["--model", "DIR", "--vocab", "x"], "--vocab with --model: the folder decides that"),
        (["--model", "DIR", "--pairs", 9], "--pairs with --model: the folder decides that"),
        (["--mask", 2], "--mask 2"),
        (["--seed", 2**32], "--seed 4294967296: scikit-learn, which splits the reviews, takes 32 bits"),
        (["--model", "MODEL", "--out", "ITSOUT"], "--model .* is a result in --out: choose another --out"),
        (["--hidden", 100], "--hidden 100: give a multiple of 64"),
        (["--channels-last", "yes"], "--channels-last is for images"),
        (["--model", "NOWEIGHTS"], "--model .*: no model.safetensors there"),
        (["--nproc", 2, "--model", "OTHERVOCAB"], "--model .*: .* they are not of one model"),
        (["--vocab", "EMPTY"], "--vocab .* cannot be read"),
        (["--vocab", "CSV"], "--vocab .* is not the vocabulary of a BERT: it lacks"),
        (["--vocab", "TWICE"], "--vocab .* is not the vocabulary of a BERT: .* no token twice"),
        (["--max-length", 200, "--model", "MODEL"], "--max-length 200: the model in .* takes at most 128 tokens"),
    ],
)
def test_bad_input_is_one_line(
    programs: Programs, tmp_path: Path, default_run: Path, flags: list[object], words: str
) -> None:
    written(tmp_path / "CSV", "label,review\n" + rows(12, second="1,差"))
    (tmp_path / "EMPTY").mkdir()
    places = {name: tmp_path / name for name in ("CSV", "EMPTY", "NOWEIGHTS", "OTHERVOCAB", "TWICE")}
    places["MODEL"], places["ITSOUT"] = default_run / "model", default_run
    for name in ("NOWEIGHTS", "OTHERVOCAB"):
        shutil.copytree(places["MODEL"], places[name])
    next(places["NOWEIGHTS"].glob("*.safetensors")).unlink()
    config = places["OTHERVOCAB"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 77}))
    written(places["TWICE"], "".join(f"{token}\n" for token in (*SPECIAL, "好", "好")))
    done = programs.run(*TRAIN, "--out", tmp_path / "out", *(places.get(str(flag), flag) for flag in flags), code=2)
    line = done.stderr.replace(NO_GPU, "")
    assert re.fullmatch(rf"error: .*{words}.*\n", line), line
    assert not (tmp_path / "out/result.json").exists()


def test_a_text_longer_than_the_model_is_counted(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(*TRAIN, *SMALL, "--epochs", 1, "--max-length", 24, "--out", tmp_path)
    cut = result(tmp_path)["cut_texts"]
    assert f"warning: {cut} of 316 reviews have more than 24 tokens and lose their ends\n" in done.stderr
    assert 100 < cut < 250
