"""What the tests of faults share: the programs' trainings, a small disk, images, a small model, undisturbed runs."""

import subprocess
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Once, Programs
from tests.faults.jobs import Jobs
from tests.faults.network import joined_by_a_cable
from tests.runs import tiny_imagenet

TRAIN = ("-m", "examples.imagenet_ddp")
# 101 images: 9 steps in an epoch, the last one with 5; neither 2 nor 3 divides 101
FLAGS = ("--epochs", 12, "-b", 12, "--image-size", 32, "--lr", 0.05, "--precision", "fp32", "--threads", 1)


@pytest.fixture(scope="session")
def jobs(session_programs: Programs, tmp_path_factory: pytest.TempPathFactory, once: Once) -> Jobs:
    """The programs' trainings; each that nobody disturbs is run once."""
    return Jobs(session_programs, tmp_path_factory.mktemp("jobs"), once)


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A file system of 64 MB. Needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def network() -> Generator[tuple[str, str]]:
    with joined_by_a_cable() as spaces:
        yield spaces


@pytest.fixture(scope="session")
def folder(jobs: Jobs) -> Path:
    return jobs.drawn


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_imagenet(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def undisturbed(session_programs: Programs, once: Once, tiny: Path, folder: Path) -> dict[int, Path]:
    def run(nproc: int, out: Path) -> None:
        session_programs.run(*TRAIN, "--nproc", nproc, *FLAGS, "--out", out, folder, cwd=tiny)

    return {nproc: once.made(f"undisturbed-{nproc}", partial(run, nproc)) for nproc in (2, 3)}
