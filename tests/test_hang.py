"""A hang is explained: planted mistakes among real ranks, and the sentence for each kind."""

import re
from pathlib import Path
from typing import Any

import pytest

from common.hang import explain, table
from tests import programs, ranks

TRAIN = "examples.mnist_ddp_spawn.train"
IMPORTS = "from datetime import timedelta\n"
LOOP = "            run.log(loss)\n"
SWAPPED = (
    "x = torch.ones(4); (dist.broadcast(x, 0), dist.all_reduce(x)) if rank == 1 else "
    "(dist.all_reduce(x), dist.broadcast(x, 0))"
)


def planted(code: str) -> list[tuple[str, str, str]]:
    """Return the mutations that execute `code` in step 5."""
    lines = f"{LOOP}            if run.step == 4:\n                {code}\n"
    return [(TRAIN, LOOP, lines), (TRAIN, IMPORTS, f"import os\n{IMPORTS}")]


def test_swapped_order_is_named(tmp_path: Path) -> None:
    flags = ["--timeout", "5", "--epochs", "1"]
    mutate = planted(SWAPPED)
    training = ranks.run("mnist_ddp_spawn", 3, flags, out=tmp_path / "out", mutate=mutate)
    sentence = r"^calls differ in collective \d+: all_reduce \[4\] on rank 0, broadcast \[4\] on"
    assert re.search(sentence, training.text, re.MULTILINE), training.text
    assert training.text.count("error: rank") == 1


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("while rank == 1: pass", r"rank 1 does not wait for other ranks.*; it is at train\.py:"),
        ("if rank == 1: os.kill(os.getpid(), 19)", "rank 1 is stopped"),
    ],
)
def test_rank_that_does_not_continue_is_named(code: str, sentence: str, tmp_path: Path) -> None:
    flags = ["--nproc", "3", "--timeout", "10", "--epochs", "1", "--device", "cpu"]
    words = [*programs.PYTHON, "examples.mnist_ddp_spawn", *flags, "--out", tmp_path / "out"]
    program = programs.run(*words, mutate=planted(code))
    assert program.code == 75, program.stderr
    assert re.search(f"^{sentence}", program.stderr, re.MULTILINE), program.stderr


def test_undisturbed_run_writes_no_report(tmp_path: Path) -> None:
    training = ranks.run("mnist_ddp_spawn", 2, ["--epochs", "1"], out=tmp_path / "out").done()
    assert not (training.out / "hang").exists()


def report(rank: int, calls: list[tuple[int, str, list[int]]], **more: Any) -> dict[str, Any]:
    collectives = [
        {"group": "", "number": number, "kind": kind, "shape": shape, "time": 0.0}
        for number, kind, shape in calls
    ]
    own = {"rank": rank, "line": f"train.py:{rank}: call()", "waits_for": "ranks", "time": 9.0}
    return own | {"collectives": collectives} | more


SUM, BIG, SMALL = (1, "all_reduce", [3]), (2, "all_reduce", [64, 10]), (2, "all_reduce", [32, 10])


@pytest.mark.parametrize(
    ("reports", "states", "sentence"),
    [
        ([report(0, [SUM])], {1: "has exited"}, "rank 1 has exited"),
        (
            [report(0, [SUM, BIG]), report(1, [SUM], waits_for="data")],
            {},
            "rank 1 waits for its data loader (train.py:1: call())",
        ),
        (
            [report(0, [SUM, BIG]), report(1, [SUM, SMALL]), report(2, [SUM, BIG])],
            {},
            "shapes differ in collective 2: all_reduce [64, 10] on rank 0, "
            "all_reduce [32, 10] on rank 1",
        ),
        (
            [report(0, [SUM, BIG]), report(1, [SUM])],
            {},
            "rank 1 did not call all_reduce [64, 10] (number 2); it is at train.py:1: call()",
        ),
        (
            [report(0, [SUM, BIG]), report(1, [SUM, BIG]), report(2, [SUM], waits_for="")],
            {},
            "rank 2 does not wait for other ranks and is 1 collective(s) behind (the next is "
            "all_reduce [64, 10] (number 2)); it is at train.py:2: call()",
        ),
        (
            [report(0, [SUM]), report(1, [SUM])],
            {},
            "the ranks wait for each other: rank 0 at train.py:0: call(); "
            "rank 1 at train.py:1: call()",
        ),
    ],
)
def test_sentence(reports: list[dict[str, Any]], states: dict[int, str], sentence: str) -> None:
    assert explain(reports, states) == sentence


def test_table_has_a_line_per_rank() -> None:
    lines = table([report(0, [SUM]), report(1, [], collectives=None)])
    assert lines == [
        "  rank 0: all_reduce [3] (number 1), 9 s ago; at train.py:0: call()",
        "  rank 1: in a call; at train.py:1: call()",
    ]
