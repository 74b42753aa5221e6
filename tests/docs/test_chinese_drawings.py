"""The Chinese drawings: those of the English ones, with every word translated that is not a name."""

import re
from pathlib import Path

import pytest

from docs import cards, chinese, diagrams

DRAWN = {diagrams.FOLDER: diagrams.drawings(), cards.FOLDER: cards.drawings()}


@pytest.mark.parametrize("folder", DRAWN, ids=lambda folder: folder.name)
def test_they_are_those_that_the_program_draws(folder: Path) -> None:
    saved = {path.stem: path.read_text() for path in (folder / "zh").glob("*.svg")}
    assert saved == {name: chinese.translated(text) for name, text in DRAWN[folder].items()}


def test_every_row_is_used() -> None:
    drawn = "".join(text for drawings in DRAWN.values() for text in drawings.values())
    lines = {re.sub(r"\d+", "#", line) for line in re.findall(r">([^<>]+)</text>", drawn)}
    assert [row for row in chinese.WORDS if row not in lines] == []


def test_numbers_keep_their_places() -> None:
    line = "MASTER_ADDR = node 0, MASTER_PORT = 29500"
    assert chinese.translation(line) == "MASTER_ADDR = 节点 0，MASTER_PORT = 29500"


@pytest.mark.parametrize("line", ["rank 2: 2, 5, 8", "world: world_size = 4", "a0+b0", "cuda:1", "new_group([0, 2])"])
def test_names_stay(line: str) -> None:
    assert chinese.translation(line) == line


@pytest.mark.parametrize(("line", "word"), [("rank 0 waits", "waits"), ("node 0 waits", "node"), ("d0", "d0")])
def test_a_word_without_a_translation_is_seen(line: str, word: str) -> None:
    _, drawing = diagrams.picture("x", 10, 10, diagrams.write(0, 0, line))
    with pytest.raises(LookupError, match=word):
        chinese.translated(drawing)
