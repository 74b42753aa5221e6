"""What grows with the ranks: the calculation for more of them, and what `Run` adds to a step."""

import json
from math import log2
from pathlib import Path
from typing import Any

import pytest

from benchmarks.meeting import OURS, calculated
from benchmarks.tables import short
from tests.conftest import Programs


def sizes(ranks: tuple[int, ...], answer: float) -> dict[str, Any]:
    """What is measured where each rank asks 7 questions, and 6 more with each doubling of the ranks."""
    found = {}
    for number in ranks:
        questions = 7 + 6 * log2(number)
        medians = {"questions": {OURS: questions}, "store": {OURS: number * questions * answer}}
        found[str(number)] = {"medians": medians | {"bytes": {OURS: 150 * number}}}
    return found


def test_more_ranks_are_calculated_from_those_that_were_measured() -> None:
    found = calculated(sizes((8, 64, 512), 2e-5))
    assert found.keys() == {"1024", "2048", "4096"}
    assert found["4096"]["questions"] == pytest.approx(7 + 6 * 12)
    assert found["4096"]["store"] == pytest.approx(4096 * (7 + 6 * 12) * 2e-5)
    assert found["4096"]["bytes"] == pytest.approx(150 * 4096)
    assert calculated(sizes((8,), 2e-5)) == {}, "of one size, nobody knows the growth"


def test_numbers_on_an_axis_are_short() -> None:
    assert [short(number) for number in (8, 0.5, 4096, 16384, 400_000, 1_281_167, 1e9)] == [
        "8", "0.5", "4,096", "16.4 k", "400 k", "1.28 M", "1 G",
    ]  # fmt: skip


def test_the_time_that_run_adds_is_measured(programs: Programs, tmp_path: Path) -> None:
    flags = ("--ranks", 2, "--rounds", 1, "--steps", 20, "--out", tmp_path)
    programs.run("-m", "benchmarks.bookkeeping", *flags)
    found = json.loads((tmp_path / "bookkeeping.json").read_text())["ranks"]["2"]
    alone, ours = (found["medians"]["loop"][kind] for kind in ("batches alone", "Run"))
    assert 0 < alone < ours
    assert found["added"]["main thread"] == pytest.approx(ours - alone, abs=0.01)
    assert found["percent_of_the_step"] == pytest.approx(sum(found["added"].values()) / 50, abs=0.01)
