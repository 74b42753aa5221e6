"""The disk fills up while TensorBoard's events are written: one line, whoever meets it first, and the run goes on."""

import contextlib
import subprocess
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from common.train.log import Log

POINTS = [(step, {"loss/train": 1 / (1 + step)}) for step in range(3000)]  # 150 KB of events


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A file system of 320 KB. Needs root."""
    folder = tmp_path_factory.mktemp("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path, most: int) -> None:
    with contextlib.suppress(OSError), file.open("ab", buffering=0) as ballast:
        while ballast.tell() < most:
            ballast.write(bytes(4096))


@pytest.mark.parametrize("repeat", range(60))
def test_a_disk_that_fills_up_ends_the_events_and_not_the_run(
    small: Path, repeat: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 0 to 240 KB free, and with another writer at the same time: no thread's traceback, no error, no waiting."""
    out, ballast = small / "out", small / "ballast"
    out.mkdir()
    before = set(threading.enumerate())
    other = threading.Thread(target=fill, args=(ballast, 1 << 20))
    try:
        fill(ballast, 4096 * (20 + repeat))
        log = Log(out, active=True)
        log._for_tensorboard = list(POINTS)
        if repeat % 2:
            other.start()
        log.write_events()
        if other.ident:
            other.join()
        assert set(threading.enumerate()) == before, "a thread that writes would have to tell its errors"
        fill(ballast, 1 << 20)
        for step, values in POINTS:
            log._for_tensorboard.append((3000 + step, values))
        log.write_events()
        log._for_tensorboard.append((6000, {"loss/train": 0.0}))
        log.write_events()
        log.close(None)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"warning: {out}/tensorboard cannot be written (No space left on device): ")
        assert line.endswith("TensorBoard's events end here; metrics.jsonl has them all")
        for events in out.glob("tensorboard/*"):
            steps = [event.step for event in LegacyEventFileLoader(str(events)).Load() if event.HasField("summary")]
            assert steps == list(range(len(steps))), "what is there can be read"
    finally:
        for path in [*out.glob("tensorboard/*"), ballast]:
            path.unlink(missing_ok=True)
        subprocess.run(["rm", "-r", str(out)], check=True)
