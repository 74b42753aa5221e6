"""Draw a Gantt chart of each stage's actions under GPipe, 1F1B and ZB-H1.

    torchrun --standalone --nproc-per-node 2 -m examples.resnet_pipeline.further.timeline

A bar is an action of a stage, labeled with its micro-batch: forward (F), backward (B), or halves
of a backward pass for the input (I) and the weights (W). White space is the bubble. On a GPU, the
host waits for the device after each action, so that the times include the device's work.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro
from matplotlib.figure import Figure

from common.launch import RunArgs
from common.rank import init_distributed, print0

from .zero_bubble import FORMS, Args, Pipeline, prepare

COLORS = {"F": "lightblue", "B": "orange", "I": "lightgreen", "W": "pink"}


class Event(NamedTuple):
    """An action of a stage, from `start` to `end` in seconds."""

    stage: int
    kind: str
    micro: int
    start: float
    end: float


def record(pipeline: Pipeline, kind: str, method: str, events: list[Event]) -> None:
    """Wrap a pipeline method, so that each call appends its times to `events`."""
    compute = getattr(pipeline, method)

    def timed(micro: int, *args: Any) -> Any:
        start = time.time()
        result = compute(micro, *args)
        if pipeline.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # does not wait for messages
        events.append(Event(pipeline.index, kind, micro, start, time.time()))
        return result

    setattr(pipeline, method, timed)


def run(args: Args, device: torch.device, name: str) -> list[Event]:
    """Run three steps; return all stages' events from the last one. Every rank calls this."""
    pipeline, images, labels = prepare(args, device, name)
    events, split = list[Event](), name == "ZB-H1"
    record(pipeline, "F", "compute_forward", events)
    record(pipeline, "I" if split else "B", "compute_backward", events)
    if split:
        record(pipeline, "W", "compute_weights", events)
    for _ in range(3):
        events.clear()
        pipeline.step(images, labels)
        dist.barrier()
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, events)
    return [event for own in held for event in own]


def bubble(events: list[Event]) -> float:
    """Return the fraction of the step in which a stage is idle, averaged over the stages."""
    span = max(event.end for event in events) - min(event.start for event in events)
    stages = len({event.stage for event in events})
    return 1 - sum(event.end - event.start for event in events) / (stages * span)


def draw(charts: dict[str, list[Event]], path: Path) -> None:
    """Draw one chart per schedule, on a common time axis in milliseconds."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots(len(charts), sharex=True, squeeze=False)[:, 0]
    for axis, (name, events) in zip(axes, charts.items(), strict=True):
        begin = min(event.start for event in events)
        for stage, kind, micro, start, end in events:
            left, width = 1e3 * (start - begin), 1e3 * (end - start)
            bar = axis.barh(stage, width, left=left, color=COLORS[kind], edgecolor="white")
            axis.bar_label(bar, [f"{kind}{micro}"], label_type="center", fontsize=7)
        axis.set(yticks=sorted({event.stage for event in events}), ylabel="stage")
        axis.invert_yaxis()
        axis.set_title(f"{name}: bubble {bubble(events):.0%}", loc="left", fontsize=10)
    axes[-1].set_xlabel("milliseconds")
    figure.savefig(path, dpi=110)


def main(args: Args, device: torch.device, path: Path) -> dict[str, list[Event]]:
    """Run a step with each schedule, and draw the timelines. Every rank calls this."""
    charts = {name: run(args, device, name) for name in FORMS}
    if dist.get_rank() == 0:
        draw(charts, path)
    print0(f"{', '.join(f'{n}: bubble {bubble(e):.0%}' for n, e in charts.items())}; {path}")
    return charts


if __name__ == "__main__":
    arguments = tyro.cli(Args, description="Draw a step with each schedule.")
    rank_device = init_distributed(RunArgs(), local_rank=0)  # torchrun sets it
    main(arguments, rank_device, Path("timeline.png"))
    dist.destroy_process_group()
