"""What all tests of faults share."""

import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.conftest import Programs
from tests.faults.jobs import Jobs


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Generator[Jobs]:
    """The programs' trainings; each that nobody disturbs is run once."""
    programs = Programs()
    yield Jobs(programs, tmp_path_factory.mktemp("jobs"))
    programs.kill()


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A file system of 64 MB. Needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
