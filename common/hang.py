"""Report what each rank waits for, after a time-out or SIGUSR1.

Each rank writes OUT/hang/rank-R.json: the line of the program that its main thread executes, and
its latest collectives from torch's flight recorder. `explain` compares these files.

The recorder is read only in the main thread: reading it while another thread enters a collective
can end the process. A rank that is blocked inside a collective therefore reports its line at once
and its collectives after the time-out.
"""

import contextlib
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

LATEST = 50  # collectives per report
DATA, COMMUNICATION = "torch/utils/data/", ("torch/distributed/", "torch/autograd/")


def write_report(folder: Path, frames: traceback.StackSummary, collectives: bool) -> None:
    """Write what this rank does to `folder`/rank-R.json.

    Args:
        folder: OUT/hang.
        frames: of the main thread.
        collectives: read the flight recorder; only the main thread may.
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
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
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
    """Return the latest collectives of this rank, oldest first."""
    entries = json.loads(_distributed_c10d._dump_fr_trace_json())["entries"]
    return [
        {
            "group": entry["process_group"][-1],
            "number": entry["collective_seq_id"],
            "kind": entry["profiling_name"].partition(":")[2].partition(" ")[0],
            "shape": (entry["input_sizes"] or entry["output_sizes"] or [[]])[0],
            "time": entry["time_created_ns"] / 1e9,
        }
        for entry in entries[-LATEST:]
        if not entry["is_p2p"]
    ]


def read_reports(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return the reports of a folder that were written since a time, by rank."""
    reports = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    return sorted((r for r in reports if r["time"] >= since), key=lambda report: report["rank"])


def table(reports: Iterable[dict[str, Any]]) -> list[str]:
    """Return one line per rank: its latest collective, and the line that it executes."""
    lines = []
    for report in reports:
        last = (report["collectives"] or [None])[-1]
        what = "in a call" if report["collectives"] is None else "no collective yet"
        if last:
            seconds = report["time"] - last["time"]
            what = f"{_call(last)}, {seconds:.0f} s ago"
        lines.append(f"  rank {report['rank']}: {what}; at {report['line']}")
    return lines


def explain(reports: list[dict[str, Any]], states: dict[int, str]) -> str:
    """Return one sentence that says which rank differs from the others.

    Args:
        reports: as `read_reports` returns them.
        states: of ranks without a report, for example "is stopped".
    """
    if states:
        return "; ".join(f"rank {rank} {state}" for rank, state in sorted(states.items()))
    if late := [r for r in reports if r["waits_for"] == "data"]:
        return f"{_ranks(late)} waits for its data loader ({late[0]['line']})"
    if busy := [r for r in reports if not r["waits_for"]]:
        behind = _behind(busy[0], reports)
        return f"{_ranks(busy)} does not wait for other ranks{behind}; it is at {busy[0]['line']}"
    if difference := _difference([r for r in reports if r["collectives"]]):
        return difference
    if len({r["line"] for r in reports}) == 1:
        return "all ranks are at the same call; if its number does not rise, check the network"
    where = (f"rank {report['rank']} at {report['line']}" for report in reports)
    return f"the ranks wait for each other: {'; '.join(where)}"


def _behind(busy: dict[str, Any], reports: list[dict[str, Any]]) -> str:
    """Return how many collectives a rank is behind the others, in words."""
    last = max((_count(r) for r in reports), default=0)
    missing = last - _count(busy)
    if not busy["collectives"] or missing <= 0:
        return ""
    calls = [c for r in reports for c in r["collectives"] or () if c["number"] == last]
    return f" and is {missing} collective(s) behind (the next is {_call(calls[0])})"


def _count(report: dict[str, Any]) -> int:
    return max((c["number"] for c in report["collectives"] or ()), default=0)


def _difference(reports: list[dict[str, Any]]) -> str:
    """Return the first collective in which the ranks differ, in words."""
    calls = {
        report["rank"]: {(c["group"], c["number"]): c for c in report["collectives"]}
        for report in reports
    }
    starts = [min((n for _, n in own), default=0) for own in calls.values()]
    for key in sorted({key for own in calls.values() for key in own}, key=lambda k: k[1]):
        if key[1] < max(starts):
            continue  # no longer in every recorder
        found = {rank: own.get(key) for rank, own in calls.items()}
        if missing := [rank for rank, call in found.items() if call is None]:
            call = next(call for call in found.values() if call)
            at = {r["rank"]: r["line"] for r in reports}
            return (
                f"rank {', '.join(map(str, missing))} did not call {_call(call)}; "
                f"it is at {at[missing[0]]}"
            )
        kinds = {rank: (call["kind"], str(call["shape"])) for rank, call in found.items() if call}
        usual = Counter(kinds.values()).most_common(1)[0][0]
        for rank, kind in kinds.items():
            if kind != usual:
                other = next(r for r, k in kinds.items() if k == usual)
                what = "shapes" if kind[0] == usual[0] else "calls"
                return (
                    f"{what} differ in collective {key[1]}: {' '.join(usual)} on rank {other}, "
                    f"{' '.join(kind)} on rank {rank}"
                )
    return ""


def _call(collective: dict[str, Any]) -> str:
    return f"{collective['kind']} {collective['shape']} (number {collective['number']})"


def _ranks(reports: list[dict[str, Any]]) -> str:
    return "rank " + ", ".join(str(report["rank"]) for report in reports)


def process_state(pid: int) -> str:
    """Return what a process of this machine does that wrote no report."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "has exited"
    return "is stopped" if stat.rpartition(")")[2].split()[0] in "Tt" else "does not respond"


def install(folder: Path) -> int:
    """Write a report at SIGUSR1, as soon as the main thread executes Python code.

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
    """Write a report for a main thread that does not handle SIGUSR1, in another thread."""
    asked = time.time()
    if signal.SIGUSR1 not in os.read(descriptor, 100) or not dist.is_initialized():
        return
    time.sleep(0.5)
    path = folder / f"rank-{dist.get_rank()}.json"
    if not path.exists() or path.stat().st_mtime < asked:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        write_report(folder, traceback.extract_stack(frame), collectives=False)


def after_timeout(folder: Path, error: BaseException, store: dist.Store) -> str:
    """Report this rank, ask the other ranks of this machine, and explain what differs.

    Args:
        folder: OUT/hang.
        error: the time-out.
        store: has the host and the process ID of each rank.

    Returns:
        The table of ranks and a sentence.
    """
    began = time.time() - 2  # ranks time out within two seconds
    write_report(folder, traceback.extract_tb(error.__traceback__), collectives=True)
    time.sleep(1)
    processes = [store.get(f"process/{r}").decode().split() for r in range(dist.get_world_size())]
    known = {r["rank"] for r in read_reports(folder, since=began)}
    for rank, (host, pid) in enumerate(processes):
        if rank not in known and host == platform.node():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGUSR1)
    time.sleep(1.5)
    reports = read_reports(folder, since=began)
    known = {report["rank"] for report in reports}
    states = {
        rank: process_state(int(pid)) if host == platform.node() else f"on {host} does not respond"
        for rank, (host, pid) in enumerate(processes)
        if rank not in known
    }
    return "\n".join([*table(reports), explain(reports, states)])
