"""A rank hangs, leaves, or is disturbed: what the others do about it, and what the user reads."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.conftest import Programs
from tests.faults.conftest import SLOW
from tests.make_data import write_idx
from tests.runs import NO_GPU, Eventually, mutated, newest_step, result

MNIST = ("-m", "examples.mnist_ddp_spawn.train")
SOME_STEPS = ("--checkpoint-every", 5, "--timeout", 4)
ENDLESS = {  # every example that has ranks which wait for each other
    "mnist_ddp_spawn": (*MNIST, "--epochs", 5000, "--nproc", 3, *SOME_STEPS),
    "manual_allreduce_sgd": ("-m", "examples.manual_allreduce_sgd.train", "--epochs", 5000, "--nproc", 3, *SOME_STEPS),
    "imagenet_ddp": ("-m", "examples.imagenet_ddp.train", "-a", "resnet18", "--dummy", "--image-size", 32, "-b", 6,
                     "--epochs", 500, "--nproc", 3, *SOME_STEPS),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_idx(folder, train=203, test=101, size=12, classes=4)
    return folder


@pytest.mark.timed
@pytest.mark.parametrize("example", ENDLESS)
def test_a_rank_that_hangs_is_named(programs: Programs, tmp_path: Path, example: str, eventually: Eventually) -> None:
    """It is stopped, as a debugger or a broken disk would: no message comes, and no connection closes."""
    process = programs.start(*ENDLESS[example], "--out", tmp_path)
    eventually(lambda: newest_step(tmp_path) >= 10, 100, "step 10")
    os.kill(programs.worker(1), signal.SIGSTOP)
    started = time.monotonic()
    done = programs.finish(process, 1)
    assert time.monotonic() - started < 4 + 5 * SLOW
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, done.stderr
    named = re.match(r"error: rank \d: lost another process \(no word from rank 1 in step (\d+), or while", lines[0])
    assert named, lines
    assert int(named[1]) > 10
    assert "Traceback" not in done.stderr
    assert programs.gone(within=2)


@pytest.mark.timed
@pytest.mark.parametrize("example", ENDLESS)
def test_a_rank_that_is_killed_is_named(
    programs: Programs, tmp_path: Path, example: str, eventually: Eventually
) -> None:
    process = programs.start(*ENDLESS[example], "--out", tmp_path)
    eventually(lambda: newest_step(tmp_path) >= 10, 100, "step 10")
    started = time.monotonic()
    os.kill(programs.worker(2), signal.SIGKILL)
    done = programs.finish(process, 1)
    assert time.monotonic() - started < 4 * SLOW
    assert "error: the process with local rank 2 was ended by SIGKILL (out of memory?)" in done.stderr
    assert "Traceback" not in done.stderr
    assert programs.gone(within=2)


@pytest.mark.timed
def test_a_rank_that_returns_early_ends_the_others(programs: Programs, tmp_path: Path, small: Path) -> None:
    broken = mutated(
        tmp_path / "broken",
        ("examples/mnist_ddp_spawn/train.py", "sampler.set_epoch(epoch)", "if world.rank == 1: return"),
    )
    started = time.monotonic()
    done = programs.run(*MNIST, "--nproc", 3, "--dataset", small, "--out", tmp_path / "out", cwd=broken, code=1)
    assert time.monotonic() - started < 15 * SLOW, "with starting"
    assert re.search(r"error: rank [02]: lost another process \(.*no word from rank .*1", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "result.json").exists()


def test_strangers_at_every_port_change_nothing(
    programs: Programs, tmp_path: Path, small: Path, eventually: Eventually
) -> None:
    """2,000 connections with garbage to the store and to gloo."""
    run = (*MNIST, "--nproc", 2, "--dataset", small, "--epochs", 60)
    programs.run(*run, "--out", tmp_path / "alone")
    process = programs.start(*run, "--checkpoint-every", 5, "--out", tmp_path / "disturbed")
    eventually(lambda: newest_step(tmp_path / "disturbed") >= 5, 100, "step 5")
    ports = sorted(port for _, port in programs.ports())
    assert len(ports) >= 3, "the store's and one of each rank"
    for number in range(2000):
        with socket.socket() as stranger:
            try:
                stranger.connect(("127.0.0.1", ports[number % len(ports)]))
                stranger.sendall((b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 64, b"")[number % 4])
            except OSError:
                continue
    assert process.poll() is None, "still training"
    done = programs.finish(process)
    assert done.stderr == NO_GPU
    assert result(tmp_path / "disturbed")["parameter_hash"] == result(tmp_path / "alone")["parameter_hash"]


def test_grace_too_short(programs: Programs, tmp_path: Path, small: Path, eventually: Eventually) -> None:
    """SIGTERM, and SIGKILL at once: the checkpoint before is used, and nothing is left over."""
    run = (*MNIST, "--nproc", 2, "--dataset", small, "--epochs", 60, "--checkpoint-every", 5, "--out", tmp_path)
    process = programs.start(*run)
    eventually(lambda: newest_step(tmp_path) >= 10, 100, "step 10")
    process.send_signal(signal.SIGTERM)
    process.kill()
    process.communicate()
    assert programs.gone(within=2), "workers end with their parent"
    done = programs.run(*run, "--resume", "auto")
    assert re.search(r"resumed from .* at step \d\d", done.stdout)
    assert list((tmp_path / "checkpoints").glob(".*.tmp")) == []
