"""`--compile` in containers as hardened as the page shows: it needs a compiler, and a folder to load code from."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.e2e.engine import HARDENED, Containers, image
from tests.runs import losses, result

NAME = "mnist_ddp_spawn"
PLAIN, WITH_COMPILER = image(NAME, COMPILER="no"), image(NAME, COMPILER="yes")
# Four batches of one size: each other shape would be compiled again, for half a minute.
SHORT = ("--epochs", "1", "--batch-size", "359", "--precision", "fp32", "--device", "cpu")


@pytest.fixture
def containers() -> Generator[Containers]:
    started = Containers()
    yield started
    started.clean()


def test_a_compiled_training_is_the_same(containers: Containers, tmp_path: Path) -> None:
    assert "/tmp:exec,size=1g" in HARDENED
    tmp_path.chmod(0o1777)  # any user may write into it, as into a volume
    said = containers.run("compiled", WITH_COMPILER, *SHORT, "--compile", "--out", "compiled", out=tmp_path)
    assert "Traceback" not in said
    containers.run("plain", PLAIN, *SHORT, "--out", "plain", out=tmp_path)
    for name, compiled in (("compiled", True), ("plain", False)):
        assert result(tmp_path / name)["arguments"]["compile"] is compiled
    found = losses(tmp_path / "compiled")
    assert len(found) == 4
    assert found == pytest.approx(losses(tmp_path / "plain"), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "flags", "line"),
    [
        (PLAIN, (), "no compiler runs here (g++): install g++ and python3-dev; an image with both: make images"),
        (WITH_COMPILER, ("--env", "TORCHINDUCTOR_CACHE_DIR=/dev/shm/cache"), "/dev/shm/cache is mounted noexec"),
    ],
    ids=["no compiler", "noexec"],
)
def test_what_is_missing_is_named(containers: Containers, name: str, flags: tuple[str, ...], line: str) -> None:
    said = containers.run("missing", name, "--compile", "--device", "cpu", "--out", "/tmp/run", code=2, flags=flags)
    assert said.count(f"--compile: {line}") == 1
    assert "Traceback" not in said
