"""The lines of bert_dp's page for data of one's own: each runs as it is written, on real reviews under these names."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from benchmarks.bert_base import draw_reviews, write_folder
from benchmarks.bert_recipes import OURS, Recipe
from examples.bert_dp.args import TextArgs
from tests.conftest import ROOT, Programs
from tests.docs.markdown import shell_blocks
from tests.runs import result

BLOCKS = [
    block.commands
    for block in shell_blocks((ROOT / "examples" / "bert_dp" / "README.md").read_text())
    if "ChnSentiCorp_htl_all.csv" in block.code
]
REVIEWS = 80  # of 7,766, half of each label: the lines take seconds instead of minutes


@pytest.fixture
def place(tmp_path: Path, real_data: Path) -> Path:
    """A folder with what the lines name: reviews, some without labels, a vocabulary, a BERT in the public layout."""
    reviews = real_data / "chnsenticorp" / "ChnSentiCorp_htl_all.csv"
    draw_reviews(tmp_path / "ChnSentiCorp_htl_all.csv", reviews, REVIEWS)
    table = pd.read_csv(reviews)
    (empty,) = table.index[table["review"].isna()]
    table.loc[empty - 2 : empty + 2, ["review"]].to_csv(tmp_path / "new_reviews.csv", index=False)
    shutil.copyfile(real_data / "bert-base-chinese" / "vocab.txt", tmp_path / "vocab.txt")
    write_folder(tmp_path / "path" / "to" / "bert-base-chinese", tmp_path / "vocab.txt", 2, 64)
    return tmp_path


def run(programs: Programs, place: Path, line: str) -> str:
    """What a line prints there."""
    python, *command = shlex.split(line)
    assert python == "python"
    return programs.run(*command, cwd=place, env={"PYTHONPATH": str(ROOT)}, limit=300).stdout


@pytest.mark.timeout(600)
def test_the_lines_for_other_data_run(programs: Programs, place: Path) -> None:
    """What a model of this size learns is of no interest; a model and a vocabulary that are given are those used."""
    (lines,) = (lines for lines in BLOCKS if any("path/to/bert-base-chinese" in line for line in lines))
    models = []
    for line in lines:
        run(programs, place, line)
        if "predict" not in line and "trainer" not in line:
            models.append(json.loads((place / "runs/bert_dp/model/config.json").read_text()))
            assert result(place / "runs" / "bert_dp")["train_samples"] == REVIEWS * 9 // 10
    tokens = len((place / "vocab.txt").read_text().split("\n")) - 1
    assert [model["hidden_size"] for model in models] == [128, 128, 64]
    assert [model["vocab_size"] == tokens for model in models] == [False, True, True]
    found = pd.read_csv(place / "predictions.csv")
    assert found["prediction"].isin(["好评", "差评"]).tolist() == [True, True, False, True, True]
    assert len(lines) == 5


@pytest.mark.timeout(900)
def test_the_lines_for_the_table_run(programs: Programs, place: Path) -> None:
    """The linear model, BERT by the recipe of the table, and both by one command, whose recipe is that of the page."""
    (lines,) = (lines for lines in BLOCKS if any("bert_accuracy" in line for line in lines))
    baseline, recipe, both = lines
    seeds = re.findall(r"^seed (\d): accuracy (0\.\d+)$", run(programs, place, baseline), re.MULTILINE)
    assert [seed for seed, _ in seeds] == list("01234")
    run(programs, place, recipe)
    told = result(place / "runs" / "bert_dp")
    assert (told["epochs"], told["train_samples"]) == (8, REVIEWS * 9 // 10)
    run(programs, place, both)
    found = json.loads((place / "benchmarks/results/bert_accuracy.json").read_text())
    assert f"python -m examples.bert_dp --csv ChnSentiCorp_htl_all.csv {found['flags']}" == recipe
    assert [f"{value:.4f}" for value in found["accuracy"]["linear model"]] == [value for _, value in seeds]
    assert found["accuracy"]["BERT, last epoch"][0] == round(told["metrics"]["accuracy"], 4)
    assert [len(values) for values in found["processor_seconds"].values()] == [5, 5]


@pytest.mark.timeout(600)
def test_the_other_measurements_run(programs: Programs, place: Path) -> None:
    """Each by its quick flags; the command of the page has the flags of the registry, which `make bench` gives."""
    names = ("bert_throughput", "bert_base")
    text = (ROOT / "examples" / "bert_dp" / "README.md").read_text()
    assert all(f"python -m benchmarks.{name} --csv " in text for name in names)
    flags = ("--csv", place / "ChnSentiCorp_htl_all.csv", "--vocab", place / "vocab.txt", "--out", place)
    programs.run("-m", "benchmarks.all", "--quick", "--only", *names, *flags, limit=600)
    states = {one["name"]: one["state"] for one in json.loads((place / "bench.json").read_text())["runs"]}
    assert states == dict.fromkeys(names, "done")
    small = ("--batches", 4, "--rounds", 1, "--steps", 1, "--layers", 1, "--hidden", 64)
    programs.run("-m", "benchmarks.bert_throughput", "--part", "batch", *small, *flags, limit=300)
    found = json.loads((place / "bert_throughput.json").read_text())
    assert found.keys() == {"speed", "batch"}, "the other part stays"
    ways = found["batch"]["batches"]["4"]["ratio"]
    assert ways.keys() == {"one device", "one device, micro-batches", "DataParallel", "one device, all cores"}
    assert found["batch"]["unequal"]["median_error"] > 0
    assert {file.name for file in place.glob("bert_*.png")} == {"bert_throughput.png", "bert_dataparallel.png"}


def test_the_ways_that_are_timed_train_alike(place: Path) -> None:
    """One device, micro-batches and DataParallel: a step on 9 reviews, which both halves share as 5 and 4."""
    text = TextArgs(csv=place / "ChnSentiCorp_htl_all.csv", vocab=place / "vocab.txt", layers=1, hidden=64)
    found = []
    ways: list[dict[str, Any]] = [{}, {"micro_batches": 2}, {"devices": [torch.device("cpu")] * 2}]
    for more in ways:
        recipe = Recipe(OURS, text, 9, **more)
        recipe.step(next(recipe.batches))
        found.append({name: value.grad for name, value in recipe.bert.named_parameters()})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)
