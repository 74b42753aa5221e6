"""`common.top`: it ends when the run does, wherever its ranks are."""

import json
import os
import signal
from pathlib import Path

import pytest

from common.launch.errors import UserError
from common.launch.who import ask
from tests.conftest import Programs
from tests.machine import here
from tests.runs import Eventually


def publish(folder: Path, token: str, ranks: int, pid: int = 1) -> None:
    """What rank 0 writes: by default of ranks of another machine, of whose processes nothing is known here."""
    of_here = {"pid": pid, "began": ask.began(pid), "table": ask.here() if pid > 1 else "elsewhere"}
    roll = [of_here | {"node": 0, "address": ["127.0.0.1", 9]} for _ in range(ranks)]
    (folder / "new").write_text(json.dumps({"token": token, "ranks": roll}))
    (folder / "new").replace(folder / ask.FILE)


def test_it_follows_a_restart_and_ends_with_the_run(programs: Programs, tmp_path: Path, eventually: Eventually) -> None:
    publish(tmp_path, "first", 1)
    process = programs.start("-m", "common.top", tmp_path, "--every", 0.1, log=tmp_path / "log")
    eventually(lambda: "\n0     0" in (tmp_path / "log").read_text(), 20, "the first table")
    publish(tmp_path, "second", 2)
    eventually(lambda: "\n1     0" in (tmp_path / "log").read_text(), 20, "a table of the processes that follow")
    (tmp_path / ask.FILE).unlink()
    assert process.wait(here(20)) == 0
    assert (tmp_path / "log").read_text().endswith("\nall ranks have ended\n")


def test_it_ends_where_all_ranks_were_killed(programs: Programs, tmp_path: Path) -> None:
    process = programs.start("-c", "import time; time.sleep(60)")
    publish(tmp_path, "killed", 2, process.pid)
    process.kill()
    process.communicate()
    said = programs.run("-m", "common.top", tmp_path, "--every", 0.1).stdout
    assert said.endswith("\nall ranks have ended\n")


def test_ctrl_c_ends_it_without_a_traceback(programs: Programs, tmp_path: Path, eventually: Eventually) -> None:
    publish(tmp_path, "first", 1)
    log = tmp_path / "log"
    process = programs.start("-m", "common.top", tmp_path, "--every", 0.1, log=log)
    eventually(lambda: "\n0     0" in log.read_text(), 20, "the first table")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(here(20)) == 130
    assert "Traceback" not in log.read_text()


def test_seconds_are_not_negative(programs: Programs, tmp_path: Path) -> None:
    said = programs.run("-m", "common.top", tmp_path, "--every", -1, code=2).stderr
    assert said == "error: --every -1.0: give at least 0\n"


def test_the_run_of_another_user_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, "first", 1)

    def refused(_: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)  # root may read all files
    with pytest.raises(UserError, match=r"ranks\.json belongs to another user"):
        ask.Job.of(tmp_path)
