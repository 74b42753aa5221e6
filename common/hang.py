"""Report what each rank is waiting for, after a timeout, a lost connection or SIGUSR1.

Each rank writes OUT/hang/rank-R.json, with the source line that its main thread is executing and
the latest collectives from torch's flight recorder. `explain` compares these files. If a signal
like SIGABRT kills a rank, faulthandler writes its stack to OUT/hang/rank-R.txt instead.
"""

import contextlib
import faulthandler
import json
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

SILENT = "does not respond"
# A rank that is executing code in these folders waits for data or for other ranks.
WAITS = {"torch/utils/data/": "data", "torch/distributed/": "ranks", "torch/autograd/": "ranks"}


def write_report(folder: Path, frames: Sequence[FrameSummary]) -> None:
    """Write this rank's state to `folder`/rank-R.json; `frames` is the main thread's stack."""
    # Reading the recorder while another thread enters a collective can crash the process. A rank
    # that is blocked inside a collective therefore reports it only after the timeout.
    is_main = threading.current_thread() is threading.main_thread()
    files = " ".join(frame.filename for frame in frames)
    report = {
        "rank": int(os.environ["RANK"]),
        "time": time.time(),
        "line": _line(frames),
        "waits_for": [what for code, what in WAITS.items() if code in files],
        "collectives": _recorded() if is_main else None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"rank-{report['rank']}.tmp"
    temporary.write_text(json.dumps(report, indent=1))
    temporary.replace(temporary.with_suffix(".json"))


def _line(frames: Sequence[FrameSummary]) -> str:
    """Return the innermost line of the user's program, or of any code if there is none."""
    own = [f for f in frames if "/lib/python" not in f.filename and "/common/" not in f.filename]
    at = (own or frames)[-1]
    return f"{Path(at.filename).name}:{at.lineno}: {(at.line or '').partition('  #')[0]}"


def _recorded() -> list[dict[str, Any]]:
    """Return this rank's latest collectives, oldest first."""
    calls = []
    for entry in json.loads(_distributed_c10d._dump_fr_trace_json())["entries"][-50:]:
        if not entry["is_p2p"]:
            kind = entry["profiling_name"].partition(":")[2]
            shape = (entry["input_sizes"] or entry["output_sizes"] or [[]])[0]
            call = {"group": entry["process_group"][0], "number": entry["collective_seq_id"]}
            calls.append(call | {"call": f"{kind} {shape}", "time": entry["time_created_ns"] / 1e9})
    return calls


def table(reports: Iterable[dict[str, Any]]) -> list[str]:
    """Return one line per rank: its latest collective, and the source line that it is executing."""
    lines = []
    for report in reports:
        what = "in a call" if report["collectives"] is None else "no collective yet"
        if report["collectives"]:
            last = report["collectives"][-1]
            seconds = report["time"] - last["time"]
            what = f"{last['call']} (number {last['number']}), {seconds:.0f} s ago"
        lines.append(f"  rank {report['rank']}: {what}; at {report['line']}")
    return lines


def explain(reports: list[dict[str, Any]], states: Mapping[int, str]) -> str:
    """Explain in one sentence why the ranks wait, naming the rank at fault if there is one.

    `states` describes the ranks that wrote no report, for example with "is stopped".
    """
    difference = _difference(reports)
    if states:
        sentences = [f"rank {rank} {state}" for rank, state in sorted(states.items())]
        return "; ".join(filter(None, [*sentences, difference]))
    if late := [report for report in reports if "data" in report["waits_for"]]:
        return _name(late, "is waiting for its data loader at")
    if difference:
        return difference
    if busy := [report for report in reports if not report["waits_for"]]:
        return _name(busy, "is not waiting for other ranks; it is at")
    return "the ranks are waiting for each other, or the network failed"


def _difference(reports: list[dict[str, Any]]) -> str:
    """Describe the first collective that differs between the ranks of a group, if there is one."""
    groups: dict[str, dict[int, dict[int, str]]] = {}  # each call by group, rank and number
    for report in reports:
        for call in report["collectives"] or ():
            calls = groups.setdefault(call["group"], {}).setdefault(report["rank"], {})
            calls[call["number"]] = call["call"]
    for members in groups.values():
        first = max(min(calls) for calls in members.values())  # recorders drop old calls
        last = max(max(calls) for calls in members.values())
        for number in range(first, last + 1):
            called = {rank: calls[number] for rank, calls in members.items() if number in calls}
            usual, _ = Counter(called.values()).most_common(1)[0]
            if late := [r for r in reports if r["rank"] in members.keys() - called.keys()]:
                return _name(late, f"did not call {usual} (number {number}); it is at")
            for rank, call in called.items():
                if call != usual:
                    other = next(r for r in called if called[r] == usual)
                    pair = f"{usual} on rank {other}, {call} on rank {rank}"
                    return f"the ranks differ in collective {number}: {pair}"
    return ""


def _name(reports: list[dict[str, Any]], what: str) -> str:
    ranks = ", ".join(str(report["rank"]) for report in reports)
    return f"rank {ranks} {what} {reports[0]['line']}"


def keep_fatal_stack(folder: Path) -> None:
    """Write this rank's stack to `folder`/rank-R.txt if a signal like SIGABRT kills the rank."""
    with contextlib.suppress(OSError):  # a run does not need this file
        folder.mkdir(parents=True, exist_ok=True)
        faulthandler.enable((folder / f"rank-{dist.get_rank()}.txt").open("w"))


def _fatal_line(path: Path) -> str:
    """Return the line at which `keep_fatal_stack` found the main thread, or an empty string."""
    stack = path.read_text() if path.exists() else ""
    calls = re.findall(r'File "(.+)", line (\d+)', stack.rpartition("hread 0x")[2])
    return _line([FrameSummary(name, int(line), "") for name, line in calls[::-1]]) if calls else ""


def install(folder: Path) -> int:
    """Install a SIGUSR1 handler that writes a report; return the descriptor that `answer` reads."""

    def handle(_: int, frame: FrameType | None) -> None:
        if dist.is_initialized():
            write_report(folder, traceback.extract_stack(frame))

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, handle)
    return reading


def answer(descriptor: int, folder: Path) -> None:
    """Write a report from another thread if the main thread does not handle SIGUSR1 in time."""
    asked = time.time()
    if signal.SIGUSR1 not in os.read(descriptor, 100) or not dist.is_initialized():
        return
    time.sleep(0.5)
    path = folder / f"rank-{os.environ['RANK']}.json"
    if not path.exists() or path.stat().st_mtime < asked - 0.5:  # the report may precede `asked`
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        write_report(folder, traceback.extract_stack(frame))


def after_loss(folder: Path, error: BaseException, store: dist.Store) -> list[str]:
    """Report the line that raised `error`, and return a comparison of all ranks' reports."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # keep the report with the error's line
    began = time.time() - 2  # all ranks time out within two seconds of each other
    write_report(folder, traceback.extract_tb(error.__traceback__))
    try:
        store.set(os.environ["RANK"], "")  # replaces this rank's process, because it has reported
        time.sleep(1)
        values = store.multi_get([str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))])
    except RuntimeError:
        return ["rank 0, which hosts the store, has exited"]
    processes = {rank: value.decode() for rank, value in enumerate(values) if value}
    return compare(folder, processes, since=began)


def compare(folder: Path, processes: Mapping[int, str], since: float) -> list[str]:
    """Request the missing reports, and return the table and the explanation.

    `processes` contains the host and the process ID of each rank that has not reported. Reports
    that were written before `since` are ignored.
    """
    states = {}
    for rank, process in processes.items():
        host, pid = process.split()
        local = host == platform.node()
        states[rank] = _process_state(int(pid)) if local else f"on {host} did not report"
        if states[rank] == SILENT:
            os.kill(int(pid), signal.SIGUSR1)
        elif line := _fatal_line(folder / f"rank-{rank}.txt"):
            states[rank] = f"was aborted at {line}"
    if SILENT in states.values():
        time.sleep(2)  # a rank that is blocked in a collective reports after half a second
    written = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    reports = sorted((r for r in written if r["time"] >= since), key=lambda r: r["rank"])
    for report in reports:
        states.pop(report["rank"], None)
    return [*table(reports), explain(reports, states)]


def _process_state(pid: int) -> str:
    with contextlib.suppress(OSError):
        kind = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return {"T": "is stopped", "t": "is stopped", "Z": "has exited"}.get(kind, SILENT)
    return "has exited"
