"""What says "every rank calls this" communicates, and is tried: see every_rank.py."""

import json
from pathlib import Path

import pytest

from tests.common.every_rank import CALLS
from tests.conftest import Programs
from tests.lint.test_rules import communicating

PROGRAMS = {"muster", "launch", "main", "predict"}  # the meeting itself, and functions that are or start processes


def test_whatever_communicates_is_tried() -> None:
    assert set(CALLS) - {"nothing"} == communicating() - PROGRAMS


@pytest.mark.timeout(600)
def test_a_rank_that_calls_alone_waits(programs: Programs, tmp_path: Path) -> None:
    code = f"from pathlib import Path; from tests.common.every_rank import main; main(Path({str(tmp_path)!r}))"
    found = json.loads(programs.run("-c", code, limit=500, cold=True).stdout)
    assert found.pop("nothing") == ["returned", "returned"]
    assert found == {name: ["returned", "waits"] for name in CALLS if name != "nothing"}
