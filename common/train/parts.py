"""What a rank's own trace says: its steps, its calls, and when it stands still for others."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.launch.errors import UserError
from common.launch.who import calls

FACTS, DATA, STEP, WAIT = "ranks", "waits for data", "step", "wait"
Event = dict[str, Any]
Span = tuple[float, float]  # start, end in microseconds


class Point(NamedTuple):
    """A moment in a thread, since when it stood there, and when the span began that ends then."""

    time: float
    thread: int
    since: float = 0.0
    opened: float = 0.0


@dataclass(frozen=True)
class Part:
    """What a rank's trace says, in microseconds."""

    rank: int
    world_size: int
    host: str
    began: int
    """Of the recording: nanoseconds on rank 0's clock."""
    clock: Sequence[Sequence[int]]
    """Nanoseconds before and after each of some barriers."""
    size: int
    """Of the file, in bytes."""
    steps: Mapping[int, Span]
    data: Sequence[Span]
    exposed: Sequence[Span]
    begun: Mapping[str, Point]
    """By its name: where a collective or message was begun."""
    ended: Mapping[str, Point]
    """Where it ended, or was waited for."""
    offset: float = 0.0
    """By how much its clock is ahead of rank 0's, before they were made equal."""


def file_of(out: Path, rank: int) -> Path:
    """The file of a rank's own trace."""
    return out / "trace" / f"rank-{rank}.json"


def recorded() -> dict[tuple[str, int], list[Any]]:
    """The last collectives: group, number, kind, nanoseconds, and whether C++ waits for them."""
    found = {}
    for entry in calls.recorded():
        if not entry["is_p2p"]:
            group, number = entry["process_group"][0], entry["collective_seq_id"]
            inner = entry["frames"][0]["filename"] if entry["frames"] else ""
            native = not inner.endswith(("distributed_c10d.py", "_functional_collectives.py"))
            kind, made = entry["profiling_name"], entry["time_created_ns"]
            found[group, number] = [group, number, kind, made, native]
    return found


def where(holds: Callable[..., object], *layers: Iterable[Span]) -> list[Span]:
    """The spans in which a condition holds.

    Args:
        holds: gets for each layer how many of its spans there are at a time.
        layers: spans, in any order; they may overlap.
    """
    edges = sorted(
        (time, number, change)
        for number, spans in enumerate(layers)
        for start, end in spans
        if end > start
        for time, change in ((start, 1), (end, -1))
    )
    inside, found, since = [0] * len(layers), list[Span](), None
    for time, number, change in edges:
        if since is not None and time > since and holds(*inside):
            joined = found and found[-1][1] == since
            found.append((found.pop()[0] if joined else since, time))
        inside[number] += change
        since = time
    return found


def load(file: Path) -> tuple[Event, list[Event]]:
    """A rank's facts, and its events, in microseconds since the recording began on rank 0.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        content = json.loads(file.read_text())
        facts, events = content[FACTS], content["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        why = error.strerror if isinstance(error, OSError) else "damaged"
        raise UserError(f"{file}: no trace of a rank ({why}): record it by --profile") from None
    shift = (content["baseTimeNanoseconds"] - facts["began"]) / 1000
    kept = [event for event in events if event["pid"] not in ("Spans", "Traces", "")]
    for event in kept:
        event["ts"] = event.get("ts", 0) + shift
    return facts, kept


def read(file: Path) -> Part:
    """What of a rank's trace the others need to know.

    Raises:
        UserError: the file is missing or damaged.
    """
    facts, events = load(file)
    slices = sorted((e for e in events if e["ph"] == "X"), key=lambda event: event["ts"])
    calls = [
        (
            f"{kind.partition(':')[2]} group {group} number {number}",
            kind,
            (made - facts["began"]) / 1000,
            native,
        )
        for group, number, kind, made, native in facts.pop("calls")
    ]
    begun, ended, natives = _collectives(slices, calls)
    for event in slices:
        kind, _, name = event["name"].partition(" ")
        if kind in ("send", "recv") and ">" in name:
            begun[event["name"]] = Point(event["ts"], event["tid"])
        elif kind == f"{WAIT}:":
            ended[name] = Point(_span(event)[1], event["tid"], event["ts"], event["ts"])
    data = [_span(event) for event in slices if event["name"] == DATA]
    return Part(
        **facts,
        size=file.stat().st_size,
        steps=dict(_steps(slices, data)),
        data=data,
        exposed=_exposed(slices, natives),
        begun=begun,
        ended=ended,
    )


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _steps(slices: Sequence[Event], data: Sequence[Span]) -> Iterator[tuple[int, Any]]:
    """Number and span of each step, with the wait for its data, which is before its range."""
    for event in slices:
        if found := re.fullmatch(rf"{STEP} (\d+)", event["name"]):
            start, end = _span(event)
            waits = [wait for wait in data if wait[1] <= start]
            yield int(found[1]), (waits[-1][0] if waits else start, end)


def _collectives(
    slices: Sequence[Event], calls: Sequence[tuple[str, str, float, bool]]
) -> tuple[dict[str, Point], dict[str, Point], list[Span]]:
    """Where each collective begins and ends; and the spans of those that C++ waits for.

    It begins in torch's operator, in which the flight recorder has noted it, and ends in gloo's
    thread, which takes the calls in their order.
    """
    operators = [event for event in slices if event["name"].startswith("c10d::")]
    starts = [event["ts"] for event in operators]
    gloo: dict[str, list[Event]] = {}
    for event in slices:
        gloo.setdefault(event["name"], []).append(event)
    begun, ended, natives = {}, {}, []
    for key, kind, made, native in sorted(calls, key=lambda call: call[2]):
        number = bisect_right(starts, made) - 1
        if number < 0 or operators[number]["ts"] + operators[number]["dur"] < made - 5:
            continue  # before the recording
        begun[key] = Point(starts[number], operators[number]["tid"])
        left = gloo.get(kind, [])
        while left and left[0]["ts"] < made - 5:  # clocks of profiler and recorder: 5 us
            left.pop(0)
        if left and kind.startswith("gloo"):
            event = left.pop(0)
            ended[key] = Point(_span(event)[1], event["tid"], starts[number], event["ts"])
            natives += [_span(event)] * native
    return begun, ended, natives


def _exposed(slices: Sequence[Event], natives: Sequence[Span]) -> list[Span]:
    """When this rank stands still for communication: see `common/train/shares.py`."""
    known = ("gloo:all", "gloo:broadcast", "gloo:barrier", "gloo:gather", "gloo:reduce")
    runloops = {event["tid"] for event in slices if event["name"].startswith(known)}
    groups: dict[str, list[Span]] = {"wait": [], "op": [], "nccl": [], "kernel": []}
    for event in slices:
        name, kind = event["name"], event.get("cat", "")
        if name == WAIT or name.startswith(f"{WAIT}:") or name.endswith("::wait_tensor"):
            groups["wait"].append(_span(event))
        elif kind == "cpu_op" and not name.startswith("c10d::") and event["tid"] not in runloops:
            groups["op"].append(_span(event))
        elif kind == "kernel":
            groups["nccl" if name.startswith("nccl") else "kernel"].append(_span(event))
    return where(
        lambda wait, native, op, nccl, kernel: wait or (native and not op) or (nccl and not kernel),
        groups["wait"],
        natives,
        groups["op"],
        groups["nccl"],
        groups["kernel"],
    )
