"""The traces of all ranks as one: `OUT/trace/rank-R.json` become `OUT/trace.json.gz`.

It is in the format that Perfetto and chrome://tracing open: a process per rank, a track per thread,
and an arrow for each message, from `send` to the wait for it, and for each collective, from the
rank that came last to each of the others. Where an arrow ends, a span says since when that rank
has come: before, its wait was for that rank. Times are by rank 0's clock, from the first event on.

What it cannot see: the number of a collective comes from torch's flight recorder, which keeps the
last 256, and is read after each step; messages that were under way when the recording began make
later ones of the same two ranks, group and tag be paired wrongly; `recv` from any rank, and batched
messages of NCCL, have no arrows, nor have NCCL's collectives.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.launch.errors import UserError
from common.train import shares
from common.train.files import write_atomically
from common.train.parts import Event, Part, Point, file_of, load


class Report(NamedTuple):
    """What came out."""

    facts: dict[str, Any]
    text: str


def complete(out: Path, parts: Sequence[Part]) -> bool:
    """Whether a folder has the traces of all ranks: those of other nodes may be elsewhere."""
    files = [(file_of(out, part.rank), part.size) for part in parts]
    return all(file.exists() and file.stat().st_size == size for file, size in files)


def report(out: Path, parts: Sequence[Part], with_trace: bool = True) -> Report:
    """Write trace.json.gz and profile.png.

    Args:
        out: the run's folder, where the traces of all ranks are.
        parts: of all ranks.
        with_trace: whether to write trace.json.gz.

    Raises:
        UserError: no step was recorded; the disk is full, for example.
    """
    parts, error = shares.aligned(parts)
    facts = shares.facts(parts, error)
    if not facts["steps"]:
        raise UserError(f"{out / 'trace'}: no whole step was recorded")
    text = f"profile, mean of {len(facts['steps'])} step(s)"
    text += f"; the ranks' clocks agree within {error / 1000:.2f} ms" * (len(parts) > 1)
    text += "\n" + shares.table(facts)
    shares.draw(out / "profile.png", facts, f"{out.name}: what each step's time went into")
    if with_trace:
        merge(out, parts, error)
        text += f"\ntrace for https://ui.perfetto.dev: {out / 'trace.json.gz'}"
    return Report(facts, text)


def merge(out: Path, parts: Sequence[Part], error: float) -> None:
    """Write trace.json.gz.

    Args:
        out: the run's folder, where the traces of all ranks are.
        parts: of all ranks, with equal clocks.
        error: of the clocks, in microseconds.
    """
    events: list[Event] = []
    for part in parts:
        about = {"name": f"rank {part.rank} ({part.host})", "sort_index": part.rank}
        for key, value in about.items():
            own = {"ph": "M", "pid": part.rank, "tid": 0, "args": {key: value}}
            events.append({"name": f"process_{key}"} | own)
        events += _events(out, part)
    events += arrows(parts)
    first = min(event["ts"] for event in events if "ts" in event)
    for event in events:  # Perfetto drops what is before 0
        event["ts"] = round(event["ts"] - first, 3) if event["ph"] != "M" else 0
    content = {
        "displayTimeUnit": "ms",
        "otherData": {"clock_error_us": round(error, 1), "ranks": len(parts)},
        "traceEvents": events,
    }
    write_atomically(out / "trace.json.gz", gzip.compress(json.dumps(content).encode(), 5))


def _events(out: Path, part: Part) -> Iterator[Event]:
    """A rank's events by the clock of rank 0, with the rank as the number of the process."""
    for number, event in enumerate(load(file_of(out, part.rank))[1]):
        if event["name"].startswith("process_"):
            continue
        if event["name"] == "thread_name":  # "thread 77 (pt_gloo_runloop)": viewers add the number
            name = event["args"]["name"]
            main = event["tid"] == event["pid"]
            event["args"]["name"] = "main" if main else name.partition("(")[2][:-1] or name
        event |= {"pid": part.rank, "ts": round(event["ts"] - part.offset, 3)}
        if isinstance(event.get("id"), int):  # an arrow of this rank
            event["id"] += part.rank << 40
        if event["ph"] == "X" and event["name"] in ("gloo:send", "gloo:recv"):
            # They begin in an operator and end in a wait: tracks need spans inside each other.
            ends = {"ph": "e", "ts": event["ts"] + event.pop("dur")}
            event |= {"ph": "b", "cat": "message", "id2": {"local": f"{number}"}}
            yield event | ends
        yield event


def arrows(parts: Sequence[Part]) -> Iterator[Event]:
    """For each message, and each collective from its last rank to each other: an arrow, its end.

    Args:
        parts: of all ranks, with equal clocks.
    """
    begun: dict[str, dict[int, Point]] = {}
    for part in parts:
        for name, point in part.begun.items():
            begun.setdefault(name, {})[part.rank] = point
    number = 1 << 52  # beyond those of the ranks' own arrows
    for part in parts:
        for name, end in part.ended.items():
            kind, _, ends = name.partition(" ")
            at = begun.get(f"send {ends}" if kind == "recv" else name, {})
            last = max(at, key=lambda rank: at[rank].time, default=part.rank)
            if kind == "send" or last == part.rank:
                continue
            if kind != "recv" and at[last].time > end.time:
                continue  # a broadcast, for example, need not wait for all
            number += 1
            source = {"pid": last, "tid": at[last].thread}
            target = {"pid": part.rank, "tid": end.thread}
            sent, came = at[last].time + 0.01, end.time - 0.02  # 10 ns inside their spans
            # Perfetto's arrows lead to the span that began later: a wait may be the earlier one.
            since = min(max(sent, end.opened) + 0.01, came - 0.01)
            span = {"ph": "X", "cat": "arrow", "ts": since, "dur": round(came - since + 0.01, 3)}
            yield {"name": f"rank {last} has come"} | span | target
            about = {"name": name, "cat": "arrow", "id": number}
            yield about | {"ph": "s", "ts": sent} | source
            yield about | {"ph": "f", "bp": "e", "ts": came} | target
