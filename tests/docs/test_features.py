"""The table of mnist_ddp_spawn's page: it quotes lines of the program, so that a reader finds each step in one file."""

import re

from tests.conftest import ROOT

FOLDER = ROOT / "examples" / "mnist_ddp_spawn"
PROGRAM = (FOLDER / "train.py").read_text()
TABLE = (FOLDER / "README.md").read_text().split("## Where each feature is")[1]
ROWS = [row.strip("| ").split(" | ") for row in TABLE.splitlines() if row.startswith("| ")][1:]


def test_quotes_stand_in_the_program() -> None:
    """Names of other files are checked by test_links_and_names_exist."""
    for feature, where in ROWS:
        own = re.sub(r"`[\w.]+` in `common/[\w/]+\.py`|`sampler\.py`", "", where)
        assert [quote for quote in re.findall(r"`([^`]+)`", own) if quote not in PROGRAM] == [], feature


def test_nearly_every_step_is_in_the_program() -> None:
    assert len(ROWS) == 25
    found = [feature for feature, where in ROWS if any(quote in PROGRAM for quote in re.findall(r"`([^`]+)`", where))]
    assert len(found) >= 20
