"""What the tests of several examples use."""

from pathlib import Path

import pytest

from tests.make_data import write_idx


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """193 samples: of batches of 24, the last has one, so that all ranks but one have none."""
    folder = tmp_path_factory.mktemp("small")
    write_idx(folder, train=193, test=101, size=12, classes=10)
    return folder
