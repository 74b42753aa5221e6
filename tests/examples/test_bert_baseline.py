"""The linear model that a BERT has to be better than: it sees what BERT sees, and is tried on what it has not seen."""

import random
from collections.abc import Sequence
from pathlib import Path

from examples.bert_dp import data
from examples.bert_dp.baseline import accuracy
from examples.bert_dp.reviews import Reviews, read_reviews, split
from tests.conftest import Programs


def made_up(labels: Sequence[int], mark: str, length: int = 40) -> Reviews:
    """Reviews of random characters; those with label 1 end with the mark."""
    source = random.Random(0)
    texts = ["".join(map(chr, source.choices(range(0x4E00, 0x9000), k=length))) + mark * label for label in labels]
    return Reviews("made up", texts, list(labels), list(range(len(texts))), {})


def test_it_learns_what_can_be_learned_and_is_not_asked_what_it_has_seen() -> None:
    labels = [number % 2 for number in range(400)]
    assert accuracy(made_up(labels, "好好好"), 0) == 1.0
    assert accuracy(made_up(labels, "好", 10), 0) > 0.9, "a character counts alone, too: no pair with it comes twice"
    random.Random(1).shuffle(labels)
    assert accuracy(made_up(labels, ""), 0) < 0.75, "of the texts that it was trained on it knows all"


def test_each_seed_has_the_split_of_bert(programs: Programs, tmp_path: Path) -> None:
    said = programs.run("-m", "examples.bert_dp.baseline", "--seeds", 2).stdout.splitlines()
    assert said[0] == str(read_reviews(None))
    expected = [f"seed {seed}: accuracy {accuracy(read_reviews(None), seed):.4f}" for seed in (0, 1)]
    assert said[1:3] == expected
    assert said[3].startswith("mean ")
    assert split(read_reviews(None), 0)[1] != split(read_reviews(None), 1)[1]
    assert data.split is split, "BERT's own"
    assert programs.run("-m", "examples.bert_dp.baseline", "--seeds", 0, code=2).stderr.startswith("error: --seeds")
