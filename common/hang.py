"""Report what each rank is waiting for, after a time-out, a lost connection or SIGUSR1.

Each rank writes OUT/hang/rank-R.json, with the source line that its main thread is executing and
the latest collectives from torch's flight recorder. `explain` compares these files.

The recorder is read only in the main thread, because reading it while another thread enters a
collective can crash the process. A rank that is blocked inside a collective therefore reports its
line immediately, but its collectives only after the time-out.
"""

import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

SILENT = "does not respond"
LATEST = 50  # collectives per report
DATA, COMMUNICATION = "torch/utils/data/", ("torch/distributed/", "torch/autograd/")


def write_report(folder: Path, frames: traceback.StackSummary, collectives: bool) -> None:
    """Write this rank's state to `folder`/rank-R.json.

    Args:
        folder: OUT/hang.
        frames: the main thread's stack.
        collectives: True to read the flight recorder, which only the main thread may do.
    """
    files = [frame.filename for frame in frames]
    own = [f for f in frames if "/lib/python" not in f.filename and "/common/" not in f.filename]
    at = (own or list(frames))[-1]
    waits_for = ""
    if any(DATA in name for name in files):
        waits_for = "data"
    elif any(part in name for name in files for part in COMMUNICATION):
        waits_for = "ranks"
    report = {
        "rank": int(os.environ["RANK"]),
        "pid": os.getpid(),
        "host": platform.node(),
        "time": time.time(),
        "line": f"{Path(at.filename).name}:{at.lineno}: {(at.line or '').partition('  #')[0]}",
        "waits_for": waits_for,
        "collectives": _recorded() if collectives else None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{report['rank']}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1))
    temporary.replace(path)


def _recorded() -> list[dict[str, Any]]:
    """Return this rank's latest collectives, oldest first."""
    entries = json.loads(_distributed_c10d._dump_fr_trace_json())["entries"]
    calls = []
    for entry in entries[-LATEST:]:
        kind = entry["profiling_name"].partition(":")[2].partition(" ")[0]
        shape = (entry["input_sizes"] or entry["output_sizes"] or [[]])[0]
        call = {"group": entry["process_group"][0], "number": entry["collective_seq_id"]}
        call |= {"call": f"{kind} {shape}", "time": entry["time_created_ns"] / 1e9}
        if not entry["is_p2p"]:
            calls.append(call)
    return calls


def read_reports(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return the folder's reports that were written at or after `since`, sorted by rank."""
    reports = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    return sorted((r for r in reports if r["time"] >= since), key=lambda report: report["rank"])


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


def explain(reports: list[dict[str, Any]], states: dict[int, str]) -> str:
    """Explain in one sentence why the ranks wait, naming the rank at fault if there is one.

    Args:
        reports: result of `read_reports`.
        states: states of the ranks that wrote no report, for example "is stopped".
    """
    difference = _difference(reports)
    if states:
        found = [f"rank {rank} {state}" for rank, state in sorted(states.items())]
        return "; ".join([*found, difference] if difference else found)
    at = {report["rank"]: report["line"] for report in reports}
    if late := [report["rank"] for report in reports if report["waits_for"] == "data"]:
        return f"rank {_numbers(late)} is waiting for its data loader at {at[late[0]]}"
    if difference:
        return difference
    if busy := [report["rank"] for report in reports if not report["waits_for"]]:
        return f"rank {_numbers(busy)} is not waiting for other ranks; it is at {at[busy[0]]}"
    if len({*at.values()}) == 1:
        return "all ranks are blocked at the same line: no rank sends, or the network failed"
    where = (f"rank {rank} at {line}" for rank, line in at.items())
    return f"the ranks are waiting for each other: {'; '.join(where)}"


def _difference(reports: list[dict[str, Any]]) -> str:
    """Describe the first collective in which the ranks in a group differ, if there is one."""
    for group in sorted({c["group"] for r in reports for c in r["collectives"] or ()}):
        members = {}
        for report in reports:
            own = [c for c in report["collectives"] or () if c["group"] == group]
            if own:
                members[report["rank"]] = {c["number"]: c["call"] for c in own}
        first = max(min(calls) for calls in members.values())  # recorders drop old calls
        last = max(max(calls) for calls in members.values())
        for number in range(first, last + 1):
            found = {rank: calls[number] for rank, calls in members.items() if number in calls}
            usual, _ = Counter(found.values()).most_common(1)[0]
            if missing := sorted(members.keys() - found.keys()):
                line = next(r["line"] for r in reports if r["rank"] == missing[0])
                call = f"{usual} (number {number})"
                return f"rank {_numbers(missing)} did not call {call}; it is at {line}"
            for rank, call in found.items():
                if call != usual:
                    other = next(r for r in found if found[r] == usual)
                    return (
                        f"the ranks differ in collective {number}: {usual} on rank {other}, "
                        f"{call} on rank {rank}"
                    )
    return ""


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def process_state(pid: int) -> str:
    """Return the state of a local process that wrote no report."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "has exited"
    kind = stat.rpartition(")")[2].split()[0]
    return {"T": "is stopped", "t": "is stopped", "Z": "has exited"}.get(kind, SILENT)


def install(folder: Path) -> int:
    """Install a SIGUSR1 handler, which writes a report when the main thread next runs Python code.

    Returns:
        A file descriptor from which `answer` reads the signals.
    """

    def handle(_: int, frame: FrameType | None) -> None:
        if dist.is_initialized():
            write_report(folder, traceback.extract_stack(frame), collectives=True)

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
    if not path.exists() or path.stat().st_mtime < asked:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        write_report(folder, traceback.extract_stack(frame), collectives=False)


def after_loss(folder: Path, error: BaseException, store: dist.Store | None) -> list[str]:
    """Write a report, request reports from other ranks on this machine, and compare all reports.

    Args:
        folder: OUT/hang.
        error: exception raised by a time-out or a lost connection.
        store: contains each rank's host and process ID.

    Returns:
        The lines of `table`, followed by the sentence from `explain`.
    """
    if store is None:
        return []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # keep the report with the error's line
    began = time.time() - 2  # all ranks time out within two seconds of each other
    write_report(folder, traceback.extract_tb(error.__traceback__), collectives=True)
    try:
        states = _request_reports(store)
    except RuntimeError:
        return ["rank 0, which hosts the store, has exited"]
    reports = read_reports(folder, since=began)
    for report in reports:
        states.pop(report["rank"], None)
    return [*table(reports), explain(reports, states)]


def _request_reports(store: dist.Store) -> dict[int, str]:
    """Signal the ranks on this machine that have not reported, and return their states."""
    store.set(f"reported/{os.environ['RANK']}", "")
    time.sleep(1)
    states = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if not store.check([f"reported/{rank}"]):
            host, pid = store.get(f"process/{rank}").decode().split()
            here = host == platform.node()
            states[rank] = process_state(int(pid)) if here else f"on {host} does not respond"
            if states[rank] == SILENT:
                os.kill(int(pid), signal.SIGUSR1)
    if SILENT in states.values():
        time.sleep(1.5)
    return states
