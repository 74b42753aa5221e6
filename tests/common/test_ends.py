"""Ends before the ranks have met, or against the will of ranks: one line each, and nobody is left."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.launch.spawn import _Watch
from tests.conftest import Programs
from tests.runs import Eventually, mutated

JOBS = ("-m", "tests.common.jobs")
MNIST = "examples.mnist_ddp_spawn"
STARTS = {
    "spawn": ("-m", MNIST, "--nproc", 2),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", MNIST),
}
MEET = "    device, backend = choose_device"
ALONE = "    if local_rank == 1:\n        raise ValueError('as planned')\n"
ALL = "    raise ValueError('as planned')\n"
LATE = """    from common.launch.errors import UserError
    if local_rank == 0:
        import time
        time.sleep(2)
    raise UserError('as planned')
"""


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("what", [ALONE, ALL, LATE], ids=["of rank 1 alone", "of all", "rank 0 comes later"])
def test_an_end_before_the_ranks_meet_is_said_once(programs: Programs, tmp_path: Path, start: str, what: str) -> None:
    """Local rank 0 speaks for all, whoever is the first to end; an error that it does not share is said, too."""
    code = mutated(tmp_path / "code", ("examples/mnist_ddp_spawn/train.py", MEET, f"{what}{MEET}"))
    mistake = what == LATE and start == "spawn"  # torchrun ends with 1 whatever the ranks end with
    done = programs.run(*STARTS[start], "--out", tmp_path / "out", cwd=code, code=2 if mistake else 1)
    said = [line for line in done.stderr.splitlines() if line.endswith(": as planned")]
    assert len(said) == 1, done.stderr


def test_ranks_that_do_not_stop_are_killed_and_named_once(programs: Programs) -> None:
    process = programs.start(*JOBS, "deaf", "--nproc", 2, env={"PET_SHUTDOWN_TIMEOUT": "1"})
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["deaf\n"] * 2
    os.kill(process.pid, signal.SIGTERM)
    done = programs.finish(process, 143)
    assert done.stderr == (
        "error: local rank(s) 0, 1 did not stop within 1 s and were killed; what was saved is the last checkpoint\n"
    )
    assert programs.gone(within=2)


def test_a_worker_that_has_just_ended_is_sent_no_signal() -> None:
    """Its number is nobody's any more; the parent went on to a traceback."""
    context: Any = SimpleNamespace(processes=[SimpleNamespace(sentinel=0, pid=2**22 + 1)])  # above all numbers
    watch = _Watch(context)
    watch._pass_on(signal.SIGTERM, None)
    assert watch.first == signal.SIGTERM


def test_survivors_and_their_parent_say_once_that_they_stop(
    programs: Programs, tmp_path: Path, eventually: Eventually
) -> None:
    """A terminal's Ctrl-C reaches all of them, and again."""
    log = tmp_path / "log"
    words = ("-m", "examples.manual_allreduce_sgd.survive", "--nproc", 2, "--epochs", 500, "--out", tmp_path / "out")
    process = programs.start(*words, log=log)
    eventually(lambda: "epoch 1/" in log.read_text(), 100, "the first epoch")
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
    programs.finish(process, 130)
    assert log.read_text().count("stopped by SIGINT") == 1, log.read_text()
    assert programs.gone(within=2)
