"""What all tests share."""

import faulthandler
from pathlib import Path

import pytest

faulthandler.enable()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the data of references."""
    return tmp_path_factory.mktemp("data")
