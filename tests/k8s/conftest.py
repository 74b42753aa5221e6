"""A copy of the manifests, for folders of one's own."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("k8s") / "k8s"
    shutil.copytree(ROOT / "k8s", folder)
    return folder
