"""Print how each rank spends its time, from the traces that --profile writes.

    python -m examples.NAME --profile 20 --out runs/NAME
    python -m tools.profile runs/NAME/profile

Communication that overlaps with computing counts as computing. Data loading that overlaps with
either is not counted. Perfetto, TensorBoard and HolisticTraceAnalysis can open the same files.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tyro


def breakdown(events: Iterable[Mapping[str, Any]]) -> str:
    """Return the time per step and its breakdown as text.

    Args:
        events: a trace's events. Computing means kernels on a device, or operators on the host
            if there are no kernels.
    """
    spans: dict[str, list[tuple[float, float]]] = {"step": [], "load": [], "send": []}
    spans |= {"kernel": [], "operator": []}
    for event in events:
        name, category = event["name"], event.get("cat", "")
        kind = ""
        if name.startswith("ProfilerStep") and category == "user_annotation":
            kind = "step"
        elif name.startswith("enumerate(DataLoader)"):
            kind = "load"
        elif name.startswith("gloo:") or (name.startswith("nccl") and category == "kernel"):
            kind = "send"
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = "kernel"
        elif name.startswith("aten::"):
            kind = "operator"
        if kind:
            spans[kind].append((event["ts"], event["ts"] + event["dur"]))
    loading = spans["load"]
    computing = spans["kernel"] or [  # operators that collate a batch count as loading
        span for span in spans["operator"] if not any(a <= span[0] < b for a, b in loading)
    ]
    total, busy = covered(spans["step"]), covered(computing)
    communicating = covered(computing + spans["send"])
    known = covered(computing + spans["send"] + loading)
    parts = {"computing": busy, "communication": communicating - busy}
    parts |= {"loading data": known - communicating, "other": total - known}
    words = ", ".join(f"{name} {part / total:.0%}" for name, part in parts.items())
    return f"{total / len(spans['step']) / 1000:.1f} ms per step: {words}"


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the total length of the union of intervals."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Print each rank's breakdown on one line.

    Args:
        folder: a run's OUT/profile.
    """
    paths = sorted(folder.glob("rank-*.json.gz"))
    if not paths:
        raise SystemExit(f"error: {folder} contains no traces; train with --profile 20")
    for path in paths:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        timed = [event for event in events if event["ph"] == "X"]
        print(f"{path.name.partition('.')[0]}: {breakdown(timed)}")


if __name__ == "__main__":
    tyro.cli(main)
