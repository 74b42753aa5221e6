"""A rank hangs, is killed, or gets no time to end: what the others do about it, and what the user reads."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import Programs
from tests.faults.conftest import SLOW
from tests.faults.jobs import NPROC, PROGRAMS, Jobs
from tests.runs import Eventually, newest_step


@pytest.mark.timed
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rank_that_hangs_is_named(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, eventually: Eventually
) -> None:
    """It is stopped, as a debugger or a broken disk would: no message comes, and no connection closes."""
    job = jobs[program]
    process = programs.start(*job.endless, "--nproc", NPROC, "--timeout", 4, "--out", tmp_path, cwd=job.code)
    eventually(lambda: newest_step(tmp_path) >= 8, 100, "step 8")
    os.kill(programs.worker(1), signal.SIGSTOP)
    started = time.monotonic()
    done = programs.finish(process, 1)
    assert time.monotonic() - started < 4 + 5 * SLOW
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, done.stderr
    # a stage of a pipeline that does not wait for rank 1 itself may not have noticed yet, and be silent, too
    silent = "1(?:, 2)?" if program == "resnet_pipeline" else "1"
    named = re.match(rf"error: rank \d: lost another process \(no word from rank {silent} in step (\d+), or", lines[0])
    assert named, lines
    assert int(named[1]) > 8
    assert "Traceback" not in done.stderr
    assert programs.gone(within=2)


@pytest.mark.timed
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rank_that_is_killed_is_named(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, eventually: Eventually
) -> None:
    job = jobs[program]
    process = programs.start(*job.endless, "--nproc", NPROC, "--timeout", 30, "--out", tmp_path, cwd=job.code)
    eventually(lambda: newest_step(tmp_path) >= 8, 100, "step 8")
    started = time.monotonic()
    os.kill(programs.worker(2), signal.SIGKILL)
    done = programs.finish(process, 1)
    assert time.monotonic() - started < 4 * SLOW
    assert "error: the process with local rank 2 was ended by SIGKILL (out of memory?)" in done.stderr
    assert "Start again with --resume auto to go on from the last checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert programs.gone(within=2)


def test_grace_too_short(programs: Programs, tmp_path: Path, jobs: Jobs, eventually: Eventually) -> None:
    """SIGTERM, and SIGKILL at once: the checkpoint before is used, and nothing is left over."""
    job = jobs["mnist_ddp_spawn"]
    run = (*job.words, *job.every, "--nproc", NPROC, "--out", tmp_path)
    process = programs.start(*run, cwd=job.code)
    eventually(lambda: newest_step(tmp_path) >= 10, 100, "step 10")
    process.send_signal(signal.SIGTERM)
    process.kill()
    process.communicate()
    assert programs.gone(within=2), "workers end with their parent"
    step = newest_step(tmp_path)
    done = programs.run(*run, "--resume", "auto", cwd=job.code)
    assert re.search(rf"resumed from .* at step {step}\n", done.stdout)
    assert list((tmp_path / "checkpoints").glob(".*.tmp")) == []
