"""A trace of some steps with torch's profiler."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from common.train.log import Log


@contextmanager
def profiling(steps: int, log: Log, device: torch.device) -> Generator[Callable[[], None]]:
    """Record a trace of some steps on rank 0, into `trace.json`.

    Args:
        steps: how many, after one that is passed over and one to warm up; 0 records nothing.
        log: of the run.
        device: of this rank.

    Yields:
        A function to call at the end of every step.
    """
    if not steps or not log.active:
        yield lambda: None
        return
    file = log.out / "trace.json"
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(
        activities=kinds,
        schedule=schedule(skip_first=1, wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(file)),
    ) as profiler:
        yield profiler.step
    if file.exists():
        log.print0(f"trace of {steps} step(s) for https://ui.perfetto.dev: {file}")
    else:
        log.warn(f"--profile {steps}: the run ended before that many steps, no trace was written")
