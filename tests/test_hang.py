"""A hang is explained: planted mistakes among real ranks, and the sentence for each kind."""

import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from common.hang import explain, table
from tests import programs, ranks
from tools.hang import main

TRAIN = "examples.mnist_ddp_spawn.train"
IMPORTS = "from datetime import timedelta\n"
LOOP = "            run.log(loss)\n"
SUM = "dist.all_reduce(torch.ones(3))"


def planted(code: str) -> list[tuple[str, str, str]]:
    """Return the mutations that execute `code` in step 5."""
    lines = f"{LOOP}            if run.step == 4:\n                {code}\n"
    return [
        (TRAIN, LOOP, lines),
        (TRAIN, IMPORTS, f"import os\nfrom common import rank as _rank\n{IMPORTS}"),
    ]


# Waits until a rank has reported the error; the report is then complete.
STUCK = '_rank.joined.wait(["error/"], timedelta(seconds=100))'
DIFFERS = r"the ranks differ in collective \d+: "


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            f"{SUM}; rank != 1 or {SUM}",  # rank 1 may receive a longer message than expected
            rf"(rank 1 was aborted at train\.py:\d+: |{DIFFERS}.* on rank 1$)",
        ),
        (
            "rank or dist.barrier()",
            rf"{DIFFERS}all_reduce \[\d+\] on rank 1, barrier \[\] on",
        ),
        (
            "if rank == 2: break",
            rf"{DIFFERS}all_reduce \[\d+\] on rank 0, all_gather \[120\] on",
        ),
        (
            "dist.all_reduce(torch.ones(6 if rank == 1 else 3))",
            rf"{DIFFERS}all_reduce \[3\] on rank 0, all_reduce \[6\] on",
        ),
        (
            "x = torch.ones(3); [f() for f in (lambda: dist.broadcast(x, 0), lambda: "
            "dist.all_reduce(x))[:: 1 if rank == 1 else -1]]",
            rf"{DIFFERS}all_reduce \[3\] on rank 0, broadcast \[3\] on rank 1",
        ),
        (
            f"rank == 1 and next(iter(DataLoader(data.train, collate_fn=lambda _: {STUCK})))",
            r"rank 1 is waiting for its data loader at train\.py:\d+",
        ),
        (
            "dist.recv(torch.ones(3), (rank + 1) % 3)",
            "the ranks are waiting for each other, or the network failed",
        ),
        (
            f"{STUCK} if rank == 2 else dist.recv(torch.ones(3), rank + 1)",
            r"rank 2 is not waiting for other ranks; it is at train\.py:\d+",
        ),
    ],
    ids=["extra", "branch", "uneven", "shapes", "swapped", "loader", "crossed", "chain"],
)
def test_mistake_among_ranks_is_named(code: str, sentence: str, tmp_path: Path) -> None:
    flags = ["--timeout", "5", "--epochs", "1"]
    mutate = planted(code)
    training = ranks.run("mnist_ddp_spawn", 3, flags, out=tmp_path / "out", mutate=mutate)
    assert re.search(f"^{sentence}", training.text, re.MULTILINE), training.text
    assert training.text.count("error: rank") == 1


def test_ranks_that_do_not_continue_are_named(tmp_path: Path) -> None:
    flags = ["--nproc", "3", "--timeout", "10", "--epochs", "1", "--device", "cpu"]
    words = [*programs.PYTHON, "examples.mnist_ddp_spawn", *flags, "--out", tmp_path / "out"]
    code = "rank == 2 and os.kill(os.getpid(), 19)\n                while rank == 1: pass"
    program = programs.run(*words, mutate=planted(code))
    assert program.code == 75, program.stderr
    assert re.search("^rank 2 is stopped", program.stderr, re.MULTILINE), program.stderr
    # A report of its collectives is late if the machine is busy.
    assert re.search(r"^  rank 1: .*; at train\.py:\d+: ", program.stderr, re.MULTILINE)


def test_undisturbed_run_writes_no_report(tmp_path: Path) -> None:
    training = ranks.run("mnist_ddp_spawn", 2, ["--epochs", "1"], out=tmp_path / "out").done()
    written = {path.name: path.read_text() for path in (training.out / "hang").iterdir()}
    assert written == {"rank-0.txt": "", "rank-1.txt": ""}


def report(rank: int, calls: list[tuple[int, str]], **more: Any) -> dict[str, Any]:
    collectives = [
        {"group": "0", "number": number, "call": call, "time": 0.0} for number, call in calls
    ]
    own = {"rank": rank, "line": f"train.py:{rank}: call()", "waits_for": ["ranks"], "time": 9.0}
    return own | {"collectives": collectives} | more


FIRST, BIG, SMALL = (1, "all_reduce [3]"), (2, "all_reduce [64]"), (2, "all_reduce [32]")


@pytest.mark.parametrize(
    ("reports", "states", "sentence"),
    [
        (
            [report(0, [FIRST, BIG]), report(1, [FIRST, SMALL])],
            {2: "has exited"},
            "rank 2 has exited; the ranks differ in collective 2: all_reduce [64] on rank 0, "
            "all_reduce [32] on rank 1",
        ),
        (
            [report(0, [FIRST, BIG]), report(1, [FIRST], waits_for=["data"])],
            {},
            "rank 1 is waiting for its data loader at train.py:1: call()",
        ),
        (  # rank 2 has forgotten the first call; rank 3 does not belong to the group
            [report(0, [FIRST, BIG]), report(1, [FIRST]), report(2, [BIG]), report(3, [])],
            {},
            "rank 1 did not call all_reduce [64] (number 2); it is at train.py:1: call()",
        ),
        (
            [report(0, [FIRST]), report(1, [FIRST]), report(2, [], collectives=None)],
            {},
            "the ranks are waiting for each other, or the network failed",
        ),
    ],
)
def test_sentence(reports: list[dict[str, Any]], states: dict[int, str], sentence: str) -> None:
    assert explain(reports, states) == sentence


def test_table_has_a_line_per_rank() -> None:
    lines = table([report(0, [FIRST]), report(1, [], collectives=None)])
    assert lines == [
        "  rank 0: all_reduce [3] (number 1), 9 s ago; at train.py:0: call()",
        "  rank 1: in a call; at train.py:1: call()",
    ]


def test_ranks_on_other_machines_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hang").mkdir()
    stack = 'Thread 0x1:\n  File "a.py", line 1 in f\n\nThread 0x2:\n  File "b.py", line 7 in f\n'
    (tmp_path / "hang/rank-2.txt").write_text(f'{stack}  File "c.py", line 9 in g\n')
    for rank, age in {0: 1, 1: 20, 2: 200}.items():  # seconds since the report
        state = report(rank, [FIRST], time=time.time() - age)
        (tmp_path / f"hang/rank-{rank}.json").write_text(json.dumps(state))
    with subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        processes = f"{platform.node()} {zombie.pid}\nelsewhere 7\nelsewhere 8\n"
        (tmp_path / "lock").write_text(processes)
        main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["  rank 1"]
    assert lines[-1] == "rank 0 has exited; rank 2 was aborted at b.py:7: "
