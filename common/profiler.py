"""Trace steps with torch.profiler, and print where the time of each rank goes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

SKIPPED = 10  # steps before the trace; the first ones are slower


class StepProfiler:
    """Write one trace per rank, which Perfetto, TensorBoard and HolisticTraceAnalysis read.

    Args:
        steps: number of steps to trace.
        folder: of rank-R.json.gz.
        device: of this rank.
    """

    def __init__(self, steps: int, folder: Path, device: torch.device) -> None:
        self.folder, self.cuda = folder, device.type == "cuda"
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.cuda]
        when = schedule(skip_first=SKIPPED, wait=0, warmup=1, active=steps, repeat=1)
        self._profile = profile(activities=activities, schedule=when, on_trace_ready=self._report)
        self._profile.start()

    def step(self) -> None:
        """Count a step; after the last one, write the trace. Every rank calls this."""
        self._profile.step()

    def _report(self, traced: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self.folder / f"rank-{dist.get_rank()}.json.gz"))
        lines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lines, breakdown(traced.events() or (), self.cuda))
        if dist.get_rank() == 0:
            for rank, line in enumerate(lines):
                print(f"rank {rank}: {line}", flush=True)


def breakdown(events: Iterable[Any], cuda: bool) -> str:
    """Return where the time of the traced steps goes, in words.

    Communication counts while nothing is computed, and loading while neither happens.

    Args:
        events: of torch.profiler.
        cuda: True if the kernels of a device compute, not the operators of the host.
    """
    steps, loading, computing, communication = [], [], [], []
    for event in events:
        span, name = (event.time_range.start, event.time_range.end), event.name
        on_device = "CUDA" in str(event.device_type)
        if name.startswith("ProfilerStep"):  # on a device, a second time
            steps += [] if on_device else [span]
        elif name.startswith("enumerate(DataLoader)"):
            loading.append(span)
        elif name.startswith("gloo:") or (name.startswith("nccl") and on_device):
            communication.append(span)
        elif on_device if cuda else name.startswith("aten::"):
            computing.append(span)
    if not cuda:  # collating a batch is loading
        computing = [s for s in computing if not any(a <= s[0] < b for a, b in loading)]
    total = _covered(steps)
    busy = _covered(computing)
    communicating = _covered(computing + communication)
    known = _covered(computing + communication + loading)
    parts = (busy, communicating - busy, known - communicating, total - known)
    names = ("computing", "communication", "loading data", "other")
    shares = (f"{name} {part / total:.0%}" for name, part in zip(names, parts, strict=True))
    return f"{total / len(steps) / 1000:.1f} ms per step: {', '.join(shares)}"


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length
