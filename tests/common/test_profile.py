"""--profile: one trace of all ranks with equal clocks, and what each step's time went into."""

import gzip
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from common.train.parts import Part, Point, where
from common.train.shares import SHARES, aligned, shares
from tests.conftest import Programs
from tests.machine import here
from tests.runs import mutated, result

TRAINING = "examples/mnist_ddp_spawn/train.py"
MNIST = ("-m", "examples.mnist_ddp_spawn", "--threads", 1, "--limit-steps", 5, "--profile", 3)
SLEEP = 100.0  # ms
SLOW = f"__import__('time').sleep({SLEEP / 1000} * rank)"
SLOW_DATA = (TRAINING, "collate_fn=list", f"collate_fn=lambda them: ({SLOW}, list(them))[1]")
SLOW_COMPUTE = (TRAINING, "                optimizer.zero_grad()\n", f"                {SLOW}; optimizer.zero_grad()\n")
AHEAD = 5 * 10**9  # nanoseconds by which rank 1's clock is ahead
BASE, NOTED = 'content["baseTimeNanoseconds"]', 'entry["time_created_ns"]'
SHIFTED = (
    ("common/train/profile.py", "time.time_ns()", f"(time.time_ns() + {AHEAD} * dist.get_rank())"),
    ("common/train/parts.py", BASE, f'{BASE} + {AHEAD} * facts["rank"]'),
    ("common/train/parts.py", NOTED, f"{NOTED} + {AHEAD} * __import__('torch').distributed.get_rank()"),
)
Event = dict[str, Any]


def trace(out: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))


def medians(out: Path) -> list[dict[str, float]]:
    """Of the shares of each rank."""
    steps = result(out)["profile"]["steps"]
    for step in steps:
        for rank in step["ranks"]:
            assert sum(rank[name] for name in SHARES) == pytest.approx(rank["total"], abs=0.01)
            assert min(rank.values()) >= 0
    ranks = zip(*(step["ranks"] for step in steps), strict=True)
    return [{name: statistics.median(step[name] for step in rank) for name in SHARES} for rank in ranks]


def test_a_slow_loader_is_named_by_clocks_that_differ(programs: Programs, tmp_path: Path) -> None:
    """Rank 1 waits for its data, and rank 0 for rank 1; the clock of rank 1 is 5 s ahead."""
    code = mutated(tmp_path / "code", SLOW_DATA, *SHIFTED)
    done = programs.run(*MNIST, "--nproc", 2, "--out", tmp_path / "out", cwd=code)
    first, second = medians(tmp_path / "out")
    assert first["others"] > SLEEP / 2 > first["data"]
    assert second["data"] > 0.99 * SLEEP
    assert second["others"] < SLEEP / 2
    content = trace(tmp_path / "out")
    assert content["otherData"]["clock_error_us"] < here(20_000)
    times = [event["ts"] for event in content["traceEvents"] if event["ph"] == "X"]
    assert max(times) - min(times) < AHEAD / 1000, "in microseconds"
    check(content["traceEvents"])
    assert "waits for others" in done.stdout
    with Image.open(tmp_path / "out" / "profile.png") as picture:
        assert picture.width > 600


def test_slow_computing_is_named_on_two_nodes(programs: Programs, tmp_path: Path, free_port: int) -> None:
    """Then `python -m common.trace` says the same of the files; without one of them it says so."""
    out, code = tmp_path / "out", mutated(tmp_path / "code", SLOW_COMPUTE)
    nodes = ("--world-size", 2, "--dist-url", f"tcp://127.0.0.1:{free_port}", "--out", out)
    other = programs.start(*MNIST, *nodes, "--rank", 1, cwd=code)
    done = programs.run(*MNIST, *nodes, "--rank", 0, cwd=code)
    programs.finish(other)
    first, second = medians(out)
    assert first["others"] > SLEEP / 2
    assert second["computing"] > 0.99 * SLEEP
    assert second["others"] + second["data"] < SLEEP / 2
    before = trace(out)
    (out / "trace.json.gz").unlink()
    again = programs.run("-m", "common.trace", out).stdout
    assert again in done.stdout
    assert trace(out) == before
    (out / "trace" / "rank-1.json").unlink()
    error = programs.run("-m", "common.trace", out, code=2).stderr
    assert error.startswith(f"error: {out / 'trace' / 'rank-1.json'}: no trace of a rank (No such file")


def test_a_run_of_two_steps_has_none_to_record(programs: Programs, tmp_path: Path) -> None:
    words = ("-m", "examples.mnist_ddp_spawn", "--limit-steps", 2, "--profile", 3, "--out", tmp_path)
    assert "warning: --profile 3: no step was left after 2 to warm up" in programs.run(*words).stderr
    assert "profile" not in result(tmp_path)


def check(events: list[Event]) -> None:
    """The rules of the trace-event format that viewers rely on."""
    spans = defaultdict(list)
    for event in events:
        assert event.keys() >= {"ph", "name", "pid", "tid"}
        assert event["ts"] >= 0
        assert event["ph"] in "XMsfbei"
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for thread in spans.values():  # those of a thread are apart, or one is inside of the other
        open_until: list[float] = []
        for start, end in sorted(thread, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 0.002:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002, "rounded to ns"
            open_until.append(end)
    for begin, finish in ("sf", "be"):
        pairs: dict[Any, dict[str, Event]] = defaultdict(dict)
        for event in events:
            if event["ph"] in (begin, finish):
                key = event["cat"], event.get("id", (event["pid"], str(event.get("id2"))))
                assert event["ph"] not in pairs[key], "an id names one pair"
                pairs[key][event["ph"]] = event
        assert all(pair.keys() == {begin, finish} for pair in pairs.values())
        assert all(pair[begin]["ts"] <= pair[finish]["ts"] for pair in pairs.values())
    for event in events:
        if event["ph"] in "sf" and event["cat"] == "arrow":
            own = spans[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in own), "an arrow needs a span at each end"


def part(rank: int, clock: list[tuple[int, int]], **more: Any) -> Part:
    values: dict[str, Any] = {"data": [], "exposed": [], "begun": {}, "ended": {}, "steps": {1: (0.0, 10_000.0)}} | more
    return Part(rank, 2, "host", 0, clock, 0, **values)


def test_clocks_are_equal_within_the_bounds_of_barriers() -> None:
    """In microseconds: rank 1 is 500 ahead, and barriers are left 20 to 90 after they are entered."""
    us = [(0, 90), (200, 220), (400, 480)]
    first = [(1000 * enter, 1000 * leave) for enter, leave in us]
    second = [(1000 * (enter + 505), 1000 * (leave + 495)) for enter, leave in us]
    (_, moved), error = aligned([part(0, first), part(1, second)])
    assert abs(moved.offset - 500) <= error < 20
    assert moved.steps[1][0] == -moved.offset
    (_, kept), error = aligned([part(0, first), part(1, first)])
    assert (kept.offset, error) == (0, 20)


def test_shares_of_a_step() -> None:
    """In milliseconds: data 0-2, in a collective from 4 to 9, into which rank 1 comes at 7."""
    call = {"all_reduce": Point(9000.0, 1, 4000.0)}
    clock = [(0, 1)]
    begun = {"all_reduce": Point(4000.0, 1)}
    waiting = part(0, clock, data=[(0, 2000.0)], exposed=[(4000.0, 9000.0)], begun=begun, ended=call)
    late = part(1, clock, begun={"all_reduce": Point(7000.0, 1)})
    assert shares(waiting, [waiting, late])[1] == {
        "total": 10.0, "computing": 3.0, "communication": 2.0, "others": 3.0, "data": 2.0
    }  # fmt: skip
    assert where(lambda a, b: a and not b, [(0, 4), (2, 6)], [(1, 3), (5, 9)]) == [(0, 1), (3, 5)]
