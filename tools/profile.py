"""Print how each rank spends its time, from the traces that --profile writes.

python -m tools.profile runs/NAME
"""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import tyro

PATTERNS = {  # category and name of an event; if events overlap, the first pattern counts
    "GPU kernels": "kernel (?!nccl)|gpu_mem",
    "NCCL": "kernel nccl",
    "loading data": r"user_annotation enumerate\(DataLoader\)",
    "CPU operators": "cpu_op aten::",
    "gloo": "user_annotation gloo:",
    "other": "user_annotation ProfilerStep",
}


def breakdown(events: list[dict[str, Any]]) -> str:
    """Return the time per step and its breakdown as text."""
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    spans, parts, total = list[tuple[float, float]](), dict[str, float](), 0.0
    for part, pattern in PATTERNS.items():
        matching = [e for e in events if re.match(pattern, f"{e.get('cat')} {e['name']}")]
        spans += [(e["ts"], e["ts"] + e["dur"]) for e in matching]
        before, total = total, covered(spans)
        parts[part] = total - before
    words = ", ".join(f"{part} {time / total:.0%}" for part, time in parts.items() if time)
    return f"{total / len(steps) / 1000:.1f} ms per step: {words}"


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the total length of the union of intervals."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Print one line per rank, from the latest traces in a run's folder."""
    traces = {path.name.partition(".")[0]: path for path in sorted(folder.rglob("rank-*.json.gz"))}
    if not traces:
        raise SystemExit(f"error: {folder} contains no traces; train with --profile 20")
    for rank, path in traces.items():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        print(f"{rank}: {breakdown(events)}")


if __name__ == "__main__":
    tyro.cli(main)
