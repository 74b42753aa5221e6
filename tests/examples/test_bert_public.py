"""A public BERT by path: files, names and shapes as bert-base-chinese has them, small and with random weights."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers.models.bert.tokenization_bert import BertTokenizer

from benchmarks.bert_base import draw_reviews, write_folder
from common.launch.errors import UserError
from examples.bert_dp.model import load, save
from examples.bert_dp.reviews import SHIPPED
from tests.conftest import Programs
from tests.examples.bert_jobs import BRIEF, FP32, PREDICT, ROBUST, TRAIN, shipped
from tests.runs import losses, result


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    """The shipped reviews' characters."""
    tokenizer = shipped()[1]
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    return tmp_path / "vocab.txt"


@pytest.mark.parametrize("parts", ["pooler head", "pooler", "head", "", "pooler bare", "bare"])
def test_every_layout_is_read_and_written_by_todays_names(tmp_path: Path, vocab: Path, parts: str) -> None:
    """What is in the file is taken, and the rest is the head; the Trainer's own load_state_dict finds all names."""
    folder = tmp_path / "bert"
    state = write_folder(folder, vocab, 2, 64, parts=parts)
    names = load_file(folder / "model.safetensors").keys()
    assert any(name.endswith("LayerNorm.gamma") for name in names)
    assert any(name.startswith("bert.") for name in names) == ("bare" not in parts)
    bert, tokenizer = load(folder, 512, new_head=True)
    found = bert.state_dict()
    assert {name for name in found if not name.startswith(("classifier.", "bert.pooler."))} <= state.keys()
    assert any("pooler" in name for name in state) == ("pooler" in parts)
    torch.testing.assert_close({name: found[name] for name in state}, state, rtol=0, atol=0)
    save(tmp_path / "saved", bert, tokenizer)
    torch.testing.assert_close(load_file(tmp_path / "saved/model.safetensors"), dict(found), rtol=0, atol=0)
    with pytest.raises(UserError, match=r"2 tensor\(s\)|4 tensor\(s\)"):
        load(folder)  # to predict, the head has to be there


def test_the_vocabulary_is_read_from_either_file(tmp_path: Path, real_data: Path) -> None:
    """The real one: vocab.txt alone, tokenizer.json alone, and both, say the same of a text."""
    source, said = real_data / "bert-base-chinese", []
    text = "酒店位置好，wifi快，房间有12.5平米——不错！"
    for names in (["vocab.txt"], ["tokenizer.json"], ["vocab.txt", "tokenizer.json"]):
        folder = tmp_path / "-".join(names)
        write_folder(folder, source / "vocab.txt", 1, 64)
        (folder / "vocab.txt").unlink()
        for name in (*names, "tokenizer_config.json"):
            shutil.copyfile(source / name, folder / name)
        said.append(load(folder, new_head=True)[1](text)["input_ids"])
    assert said[0] == said[1] == said[2] == BertTokenizer.from_pretrained(source)(text)["input_ids"]


def test_pickled_weights_are_converted_by_the_line_that_is_said(tmp_path: Path, vocab: Path) -> None:
    folder = tmp_path / "bert"
    state = write_folder(folder, vocab, 1, 64)
    weights = load_file(folder / "model.safetensors")
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]  # as they are shared
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model.safetensors there; pickled weights are not read, convert") as error:
        load(folder, new_head=True)
    assert "\n" not in str(error.value)
    (code,) = re.findall('python -c "(.*)" in this folder', str(error.value))
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    found = load(folder, new_head=True)[0].state_dict()
    torch.testing.assert_close({name: found[name] for name in state}, state, rtol=0, atol=0)


@pytest.mark.timeout(300)
def test_every_program_fine_tunes_it_and_keeps_the_best(programs: Programs, tmp_path: Path, vocab: Path) -> None:
    """transformers saves by the names that the file had; the Trainer would then take the best model without LayerNorm.

    The learning rate is so high that the best epoch is not the last one for both Trainers, which is checked.
    """
    folder, reviews = tmp_path / "bert", tmp_path / "reviews.csv"
    write_folder(folder, vocab, 2, 64)
    draw_reviews(reviews, SHIPPED, 80)
    flags = ("--model", folder, "--csv", reviews, "-b", 8, "--lr", 1e-2, "--epochs", 4, *FP32)
    for program in (TRAIN, BRIEF, ROBUST):
        out = tmp_path / program[1]
        done = programs.run(*program, *flags, "--out", out)
        assert "missing keys" not in done.stdout + done.stderr
        weights = load_file(out / "model/model.safetensors")
        assert {"bert.embeddings.LayerNorm.weight", "classifier.weight"} <= weights.keys()
        if program != TRAIN:
            best = best_checkpoint(out)
            torch.testing.assert_close(weights, load_file(best / "model.safetensors"), rtol=0, atol=0)
        file = tmp_path / "predicted.csv"
        programs.run(*PREDICT, "--model", out / "model", "--csv", reviews, "--out", file)
        assert set(pd.read_csv(file)["prediction"]) <= {"好评", "差评"}
    assert len(losses(tmp_path / TRAIN[1])) == result(tmp_path / TRAIN[1])["steps"] == 36


def best_checkpoint(out: Path) -> Path:
    """Of a Trainer; with the check that it is not the last one."""
    checkpoints = sorted((out / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    state = json.loads((checkpoints[-1] / "trainer_state.json").read_text())
    best = Path(state["best_model_checkpoint"])
    assert best.name != checkpoints[-1].name
    return checkpoints[0].parent / best.name
