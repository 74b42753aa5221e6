"""A rank hangs, is killed, or gets no time to end: what the others do about it, and what the user reads."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import Programs
from tests.faults.jobs import IN_TURN, TURNED, Jobs
from tests.machine import here
from tests.runs import Eventually, losses, newest_step, result


def logged(out: Path) -> int:
    """The steps whose losses are in the run's metrics."""
    metrics = out / "metrics.jsonl"
    return metrics.read_text().count('"loss/train"') if metrics.exists() else 0


@pytest.mark.timed
@pytest.mark.parametrize(("program", "nproc"), IN_TURN)
def test_a_rank_that_hangs_is_named(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, nproc: int, eventually: Eventually
) -> None:
    """It is stopped, as a debugger or a broken disk would: no message comes, and no connection closes."""
    job = jobs[program]
    timeout = round(here(4))  # others wait as long while rank 0 evaluates and saves
    process = programs.start(*job.endless, "--nproc", nproc, "--timeout", timeout, "--out", tmp_path, cwd=job.code)
    # in the middle of an epoch of each program, some of which save at its end only
    eventually(lambda: logged(tmp_path) >= 13, 100, "step 13")
    os.kill(programs.worker(1), signal.SIGSTOP)
    started = time.monotonic()
    done = programs.finish(process, 1, timeout + 120)
    assert time.monotonic() - started < timeout + here(5)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, done.stderr
    # a stage of a pipeline that does not wait for rank 1 itself may not have noticed yet, and be silent, too
    silent = "1(?:, 2)?" if program == "resnet_pipeline" else "1"
    named = re.match(rf"error: rank \d: lost another process \(no word from rank {silent} in step (\d+), or", lines[0])
    assert named, lines
    assert int(named[1]) > 13
    assert "Traceback" not in done.stderr
    assert programs.gone(within=2)


@pytest.mark.timed
@pytest.mark.parametrize(("program", "nproc"), TURNED)
def test_a_rank_that_is_killed_is_named(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, nproc: int, eventually: Eventually
) -> None:
    job, log = jobs[program], tmp_path / "log"
    flags = ("--nproc", nproc, "--timeout", 30, "--out", tmp_path)
    process = programs.start(*job.endless, *flags, cwd=job.code, log=log)
    eventually(lambda: newest_step(tmp_path) >= 8, 100, "step 8")
    os.kill(programs.worker(nproc - 1), signal.SIGKILL)
    named = f"error: the process with local rank {nproc - 1} was ended by SIGKILL (out of memory?)"
    eventually(lambda: named in log.read_text(), 2, "the cause")
    assert process.wait(here(4)) == 1
    said = log.read_text()
    assert "Start again with --resume auto to go on from the last checkpoint" in said
    assert "Traceback" not in said
    assert programs.gone(within=2)


HELD = [  # a checkpoint stays half-written for as long as a file is there
    (
        "common/train/files.py",
        "        temporary.replace(name)\n",
        "        while any((folder / 'hold').exists() for folder in path.parents): threading.Event().wait(0.01)\n"
        "        temporary.replace(name)\n",
    ),
    ("common/train/files.py", "import os\n", "import os\nimport threading\n"),
]


@pytest.mark.parametrize(("program", "nproc"), IN_TURN)
def test_grace_too_short(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, nproc: int, eventually: Eventually
) -> None:
    """SIGTERM, and SIGKILL while the last checkpoint is written: the one before is used, and nothing is left over."""
    job, out = jobs[program], tmp_path / "out"
    run = (*job.words, *job.every, "--nproc", nproc, "--resume", "auto", "--out", out)
    process = programs.start(*run, cwd=jobs.broken("held", *HELD))
    eventually(lambda: newest_step(out) >= 6, 100, "step 6")
    (out / "hold").touch()
    process.send_signal(signal.SIGTERM)
    eventually(lambda: list(out.rglob(".*.tmp")), 20, "a checkpoint that is being written")
    step = newest_step(out)
    process.kill()
    process.communicate()
    assert programs.gone(within=2), "workers end with their parent"
    done = programs.run(*run, cwd=job.code)
    assert re.search(rf"resumed from .* at step {step}\n", done.stdout)
    left = [path for path in out.rglob(".*.tmp") if not path.parent.name.startswith("aside-")]  # the Trainer's folder
    assert left == []
    whole = jobs.whole(program, nproc)
    assert result(out)["parameter_hash"] == result(whole)["parameter_hash"]
    assert losses(out) == losses(whole)
