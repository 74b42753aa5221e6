"""A run that hangs says which rank waits for which, and in which call; one that does not hang says nothing."""

import inspect
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.launch.who import ask, calls, process, report, watcher
from common.launch.who.verdict import verdict
from tests.conftest import Programs
from tests.faults import mistakes
from tests.machine import here
from tests.runs import Eventually

TIMEOUT = 4
SIZES = (2, 3, 4)


def line(name: str, mark: str) -> str:
    """FILE:LINE of a line of a mistake, which a comment marks."""
    lines, first = inspect.getsourcelines(getattr(mistakes, name))
    (found,) = (number for number, text in enumerate(lines, first) if text.rstrip().endswith(f"# {mark}"))
    return f"mistakes.py:{found}"


def others(size: int) -> str:
    return {2: "rank 0", 3: "ranks 0, 1", 4: "ranks 0-2"}[size]


# What is said of the last rank R, of the others O (as the subject of a sentence), and of lines.
SAID = {
    "extra_collective":
        r"rank R is in broadcast 4 \(12 B, EXTRA\), O in all_reduce 4 \(2.56 KB, HERE\): "
        r"rank R makes a call that the others do not make",
    "branch_around_a_collective":
        r"rank R is in barrier 7 \(AFTER\), O in all_reduce 7 \(2.56 KB, HERE\): "
        r"rank R has left out all_reduce at HERE; is it in a branch\?",
    "uneven_batches":
        r"rank R is in all_gather 6 \(8 B, AFTER\), O in all_reduce 6 \(2.56 KB, HERE\): "
        r"rank R has ended the loop at LOOP earlier \(fewer batches\)",
    "mismatched_shapes":
        r"the ranks disagree: shape \[64, 10\] on O, \[32, 10\] on rank R, in all_reduce 4 at HERE",
    "another_order":
        r"rank R is in broadcast 7 \(12 B, OTHER\), O in all_reduce 7 \(2.56 KB, HERE\): "
        r"the ranks make these two calls in another order",
    "endless_loop":
        r"rank R runs at (LOOP|BODY) called at .*, \d+ s after its last call: a loop without end, or much work; "
        r"O waits? in all_reduce 4 \(2.56 KB, HERE\)",
    "stopped":
        r"rank R is stopped \(by SIGSTOP or a debugger\): kill -CONT \d+ lets it go on; "
        r"O waits? in all_reduce 4 \(2.56 KB, HERE\)",
    "slow_loader":
        r"rank R waits for its data \(loader, \d+ s\); O waits? in all_reduce 4 \(16 B, HERE\)",
    "two_sends":
        r"rank 0 in send 1 to rank 1 \(2.56 KB, HERE\), .*rank R in send 1 to rank 0 \(2.56 KB, HERE\): "
        r"all send, and none receives: each waits for the next",
}  # fmt: skip


@pytest.mark.timed
@pytest.mark.parametrize("name", SAID)
def test_a_mistake_is_named(programs: Programs, tmp_path: Path, name: str, eventually: Eventually) -> None:
    """With 2, 3 and 4 ranks: a row for each, and one sentence, at most 2 s after --timeout.

    Those that compute run one after the other: on two cores, three of them would not answer in time.
    """
    timeout = round(here(TIMEOUT))
    words = ("-m", "tests.faults.mistakes", name, "--timeout", timeout, "--nproc")
    for sizes in [(size,) for size in SIZES] if name == "endless_loop" else [SIZES]:
        logs = {size: tmp_path / f"log-{size}" for size in sizes}
        jobs = {size: programs.start(*words, size, log=log) for size, log in logs.items()}
        are_named(name, logs, jobs, timeout, eventually)


def are_named(
    name: str, logs: dict[int, Path], jobs: dict[int, "subprocess.Popen[str]"], timeout: int, eventually: Eventually
) -> None:
    shown = dict[int, float]()  # when the table was first seen; the error follows

    def tables() -> bool:
        for size, log in logs.items():
            if size not in shown and re.search("^rank  node .*", log.read_text(), re.MULTILINE):
                shown[size] = log.stat().st_mtime
        return len(shown) == len(logs)

    eventually(tables, 60, "the tables")
    for size, log in logs.items():
        (mistaken,) = re.findall(r"mistake at (\S+)", log.read_text())
        assert shown[size] - float(mistaken) < timeout + here(2), "or later, when the error is written, too"
    for size, job in jobs.items():
        job.wait(here(60))
        check(name, size, logs[size].read_text())


def check(name: str, size: int, said: str) -> None:
    _, table = re.split("^rank  node .*", said, maxsplit=1, flags=re.MULTILINE)
    rows, (sentence, *_) = table.splitlines()[1 : size + 1], table.splitlines()[size + 1 :]
    assert [row.split()[0] for row in rows] == [str(rank) for rank in range(size)], said
    expected = re.sub(r"\bO\b", others(size), SAID[name]).replace("rank R", f"rank {size - 1}")
    for mark in re.findall(r"\b(?:HERE|EXTRA|AFTER|LOOP|BODY|OTHER)\b", SAID[name]):
        expected = expected.replace(mark, line(name, mark))
    assert re.fullmatch(expected, sentence), said
    assert said.count("rank  node") == 1, said


def test_what_is_no_hang_is_not_called_one(programs: Programs) -> None:
    """Without set_epoch, every epoch has the same order: nothing waits, and nothing is said."""
    for size in SIZES:
        done = programs.run("-m", "tests.faults.mistakes", "missing_set_epoch", "--nproc", size)
        assert (done.stdout, done.stderr) == ("", "")


def call(kind: str, number: int, done: bool = False, **more: Any) -> dict[str, Any]:
    about = {"group": "0", "ranks": [0, 1], "shapes": [[10]], "bytes": 2e6, "file": "/x/train.py", "line": 61}
    return about | {"kind": kind, "number": number, "done": done, "made": 100.0 + number} | more


def rank(number: int, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    state = {"rank": number, "now": 110.0, "loads": False, "busy": False, "where": [], "code": "", "calls": [*calls]}
    return state | more


ROUND = [call("all_reduce", 1, done=True), call("all_gather", 2, done=True, line=70), call("all_reduce", 3, done=True)]


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        (
            [
                rank(0, call("all_reduce", 1, done=True), call("all_reduce", 2)),
                rank(1, call("all_reduce", 1)),
            ],
            "rank 1 is in all_reduce 1 (2 MB, train.py:61), rank 0 in all_reduce 2 (2 MB, train.py:61): "
            "rank 1 is 1 call behind",
        ),
        (
            [rank(0, call("recv", 4, peer=1)), rank(1, call("recv", 4, peer=0))],
            "rank 0 in recv 4 from rank 1 (2 MB, train.py:61), rank 1 in recv 4 from rank 0 (2 MB, train.py:61): "
            "all receive, and none sends: each waits for the next",
        ),
        (
            [rank(0, call("recv", 4, peer=1)), rank(1, call("all_reduce", 9))],
            "rank 0 is in recv 4 from rank 1 (2 MB, train.py:61), which is in all_reduce 9 (2 MB, train.py:61)",
        ),
        ([rank(0), rank(1, silent="gone"), rank(2, silent="gone")], "ranks 1, 2 have ended"),
        (
            [rank(0, call("all_reduce", 3)), rank(1, silent="no answer")],
            "rank 1 gives no answer: look at the machine, and at the network to it; "
            "rank 0 waits in all_reduce 3 (2 MB, train.py:61)",
        ),
        (
            [rank(0, call("all_reduce", 3)), rank(1, call("all_reduce", 3))],
            "all ranks are in all_reduce 3 (2 MB, train.py:61): it is slow, or the network between them is",
        ),
        (  # of two ranks, the one is right that does what came after the same call before
            [rank(0, *ROUND, call("broadcast", 4, line=80)), rank(1, *ROUND, call("all_gather", 4, line=70))],
            "rank 0 is in broadcast 4 (2 MB, train.py:80), rank 1 in all_gather 4 (2 MB, train.py:70): "
            "rank 0 makes a call that the others do not make",
        ),
    ],
)
def test_what_is_wrong_follows_from_the_answers(states: list[dict[str, Any]], sentence: str) -> None:
    assert verdict(states) == sentence


@pytest.mark.parametrize(
    ("ran", "waited", "busy"), [(0, 0, False), (20, 0, False), (30, 0, True), (0, 30, True), (20, 20, True)]
)
def test_a_main_thread_that_runs_or_waits_for_a_core_is_busy(
    monkeypatch: pytest.MonkeyPatch, ran: int, waited: int, busy: bool
) -> None:
    """Of 50 ms, more than half; both numbers of the kernel are in nanoseconds."""
    said = iter(["7000000000 9000000000 1", f"{7_000_000_000 + ran * 10**6} {9_000_000_000 + waited * 10**6} 2"])
    monkeypatch.setattr(process, "Path", lambda _: SimpleNamespace(read_text=lambda: next(said)))
    assert process.busy(0.05) == busy


def test_a_message_of_a_batch_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has nothing to wait for in one of them: the batch as a whole has."""
    monkeypatch.setattr(calls, "_messages", deque())
    monkeypatch.setattr(calls, "counts", {})
    monkeypatch.setattr(calls.dist, "get_process_group_ranks", lambda _: [4, 7])
    send = calls.noted("send", lambda group, tensors, peer, tag: None)
    assert send(SimpleNamespace(group_name="0"), [torch.ones(3)], 1, 0) is None
    (message,) = calls.messages()
    assert (message["kind"], message["bytes"], message["peer"], message["done"]) == ("send", 12, 7, True)


def closed(listening: socket.socket) -> bool:
    return listening.fileno() == -1


def test_in_one_process_one_run_follows_another(monkeypatch: pytest.MonkeyPatch, eventually: Eventually) -> None:
    """As in a notebook."""
    monkeypatch.setattr(watcher, "watching", None)
    for _ in range(2):
        listening, own = watcher.listen(True, "", 0)
        watcher.watch([own], "token", listening, 4.0)
        watcher.leave()
        eventually(partial(closed, listening), 5, "the end of the thread, which closes its socket")


def test_addresses_that_somebody_has_removed_are_no_error(tmp_path: Path) -> None:
    listening, _ = watcher.listen(True, "", 0)
    answers = watcher.Watcher([], "token", listening, 4.0)
    answers.file = tmp_path / ask.FILE
    answers.close()


READ = """
from types import SimpleNamespace
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from common.launch.who import calls

dump, did = c10d._dump_fr_trace_json, []
c10d._dump_fr_trace_json = lambda **how: did.append("reads") or dump(**how)
calls.time = SimpleNamespace(sleep=lambda seconds: did.append("waits"))

def read():
    did.clear()
    calls.counted()
    print(*did, len(calls.collectives(lines=False)))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
read()
dist.barrier()
for _ in range(2):
    read()
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
read()
dist.barrier()
read()
"""


def test_the_recorder_is_not_read_while_a_group_enters_it(programs: Programs) -> None:
    """At its first collective; who reads then can end with SIGSEGV. A later group may have the same name."""
    found = programs.run("-c", READ).stdout.splitlines()
    assert found == ["0", "waits reads 1", "reads 1", "0", "waits reads 2"]


def test_without_torchs_recorder_no_call_is_guessed(programs: Programs) -> None:
    env = {"TORCH_FR_BUFFER_SIZE": "0"}
    done = programs.run(
        "-m", "tests.faults.mistakes", "extra_collective", "--nproc", 2, "--timeout", round(here(3)), env=env, code=1
    )
    assert re.search(
        r"^no call is known \(before the first one, or torch does not record them\): "
        r"rank 0 at mistakes.py:\d+ called at .*, rank 1 at mistakes.py:\d+ called at ",
        done.stderr, re.MULTILINE,
    ), done.stderr  # fmt: skip


@pytest.mark.timed
def test_a_run_is_asked_while_it_goes_on(programs: Programs, tmp_path: Path, eventually: Eventually) -> None:
    """By `common.who` and `common.top`, which read where the ranks are, and by SIGUSR1; then no address is left."""
    out, log = tmp_path / "out", tmp_path / "log"
    run = ("-m", "examples.mnist_ddp_spawn", "--nproc", 2, "--epochs", 5000, "--out", out)
    job = programs.start(*run, log=log)
    eventually((out / "best.safetensors").exists, 60, "an epoch")
    step, loss = asked_twice(programs, out, eventually)
    assert step > 12
    assert 0 < loss < 3
    shown = list[str]()

    def healthy() -> bool:
        shown[:] = says(programs, out).splitlines()
        return shown[-1] == "the run makes progress: no rank hangs"

    eventually(healthy, 60, "a healthy run")
    *_, head, first, second, _ = (line.split() for line in shown)
    assert head == ["rank", "node", "step", "does", "call", "group", "shape", "bytes", "line", "since"]
    assert [first[:2], second[:2]] == [["0", "0"], ["1", "0"]]
    assert min(int(first[2]), int(second[2])) > 12
    os.kill(programs.worker(1), signal.SIGSTOP)
    job.send_signal(signal.SIGUSR1)
    stopped = r"rank 1 is stopped \(by SIGSTOP or a debugger\): kill -CONT \d+ lets it go on; rank 0 .*"
    eventually(lambda: re.search(stopped, log.read_text()), 20, "the table in the run's output")
    eventually(lambda: re.search(stopped, says(programs, out)), 20, "the same by common.who")
    os.kill(programs.worker(1), signal.SIGCONT)
    job.send_signal(signal.SIGTERM)
    assert job.wait(here(60)) == 143
    for module in ("common.who", "common.top"):
        said = programs.run("-m", module, out, code=2).stderr
        assert re.search(r"no run is in progress there .*; one that is still starting has it in some seconds$", said)


def asked_twice(programs: Programs, out: Path, eventually: Eventually) -> list[float]:
    """Step and loss of rank 1 by `common.top`, asked until it answers twice, with steps between."""
    ranks = list[str]()

    def moves() -> bool:
        reads, *ranks[:] = programs.run("-m", "common.top", out, "--times", 2).stdout.splitlines()
        assert reads == f"asking the 2 ranks of {out}/ranks.json, every 1 s ..."
        assert [line.split()[0] for line in ranks] == ["rank", "0", "1"] * 2
        return not {"-", "0.0"} & set(ranks[-1].split()[2:5])  # step, loss, speed

    eventually(moves, 60, "steps between two answers")
    return [float(number) for number in ranks[-1].split()[2:4]]


def says(programs: Programs, out: Path) -> str:
    return programs.run("-m", "common.who", out).stdout


def test_a_report_that_fails_hides_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has lost another one says why it ends, whatever happens to the table of ranks."""

    def fails(*_: object) -> None:
        raise ValueError("in the report")

    rank = SimpleNamespace(pid=os.getpid(), roll=["0", "1"], frozen=None, state=fails)
    monkeypatch.setattr(report.watcher, "watching", rank)
    monkeypatch.setattr(report.place, "current", lambda: SimpleNamespace(local_rank=0))
    asked: list[Any] = []
    monkeypatch.setattr(report.last_words, "answer", lambda what, *_: asked.append(what) or True)
    monkeypatch.setattr(report, "show", fails)
    report.report(RuntimeError("the reason"))
    assert asked == [report._first_to_report, report._reported], "the others need not wait for the table"


def test_a_failure_ends_no_call_that_went_on_before(monkeypatch: pytest.MonkeyPatch, eventually: Eventually) -> None:
    """The recorder ends them all: a rank remembers which had not ended when it last looked."""
    monkeypatch.setattr(watcher.calls, "counted", lambda: b"nothing new")
    monkeypatch.setattr(watcher.calls, "active", lambda: {("1", 2)})
    now = time.time()

    def told(newest: float) -> list[Any]:
        made = {("1", 2): now - 9, ("0", 3): now - 8, ("0", 4): newest}
        return [{"group": g, "number": n, "made": at, "done": True} for (g, n), at in made.items()]

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        rank = watcher.Watcher([], "token", listening, 0.4)
        eventually(lambda: rank._active[1], 5, "two looks between which nothing happened")
        before, since = told(newest=now - 7), told(newest=now + 3600)
        rank._mark_failed(before)
        rank._mark_failed(since)
        rank.close()
    assert [call["done"] for call in before] == [False, True, False]
    assert [call["done"] for call in since] == [True, True, False], "what went on may have ended since"


def test_a_process_is_known_by_when_it_began() -> None:
    """Its number may be another's later, and nobody must take that one for the rank."""
    first = subprocess.Popen(["sleep", "60"])
    time.sleep(0.1)
    second = subprocess.Popen(["sleep", "60"])
    try:
        ticks = int(ask.began(second.pid)) - int(ask.began(first.pid))
        assert 5 <= ticks <= 100 * here(1), "of 10 ms"
        assert ask.began(first.pid) == ask.began(first.pid)
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    assert ask.began(first.pid) == ""


def test_a_strangers_datagram_is_no_answer() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.settimeout(10)

        def reply() -> None:
            for words in (b"no JSON", b"[]", b"{}"):
                stranger.sendto(words, stranger.recvfrom(1024)[1])

        answering = threading.Thread(target=reply)
        answering.start()
        member = {"address": stranger.getsockname(), "pid": 0, "began": "", "table": "elsewhere", "node": 0}
        (state,) = ask.everybody([member], "token", patience=2.0)
        stranger.sendto(b"", stranger.getsockname())
        stranger.sendto(b"", stranger.getsockname())
        answering.join()
    assert state["silent"] == "no answer"
