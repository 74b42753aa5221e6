"""What all tests share."""

import faulthandler
import os
from pathlib import Path

import pytest

faulthandler.enable()
DATA = Path(os.environ.get("DDP_TEST_DATA", Path(__file__).parents[2] / "shared/data"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need a GPU or real data where there are none."""
    import torch

    missing = set() if torch.cuda.is_available() else {"gpu"}
    missing |= set() if DATA.is_dir() else {"data"}
    left_out = [item for item in items if missing & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the data of references."""
    return tmp_path_factory.mktemp("data")
