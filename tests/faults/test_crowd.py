"""A crowd of ranks fails: one of them says why, and nobody is left."""

import re

import pytest

from tests.conftest import Programs
from tests.machine import here

RANKS, MANY = 64, 256


@pytest.mark.parametrize(
    ("ranks", "fault", "code", "first", "last"),
    [
        (MANY, "mistake", 2, "error: no such folder: give another", "error: no such folder: give another"),
        (RANKS, "exception", 1, r"error: rank \d+: Traceback .*", r"RuntimeError: something is wrong with rank \d+"),
        (
            RANKS,
            "exception of one",
            1,
            rf"error: rank {RANKS - 1}: Traceback .*",
            f"RuntimeError: something is wrong with rank {RANKS - 1}",
        ),
    ],
)
def test_of_hundreds_of_ranks_one_speaks(
    programs: Programs, ranks: int, fault: str, code: int, first: str, last: str
) -> None:
    words = ("--ranks", ranks, "--fault", fault, "--timeout", round(here(120)))
    done = programs.run("-m", "tests.faults.crowd", *words, code=code)
    said = [line for line in done.stderr.splitlines() if line.strip()]
    assert re.fullmatch(first, said[0]), done.stderr
    assert re.fullmatch(last, said[-1]), done.stderr
    assert done.stderr.count("rror: ") == len({said[0], said[-1]}), done.stderr
    assert len(said) < 10, "one traceback, of the frames between record and the mistake"
    assert programs.gone(within=5)
