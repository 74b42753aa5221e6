"""Draw a Gantt chart of the actions of each stage with GPipe, 1F1B and ZB-H1.

    torchrun --standalone --nproc-per-node 2 -m examples.resnet_pipeline.further.timeline

A bar is an action of a stage, with the number of its micro-batch; white is the bubble. On a GPU,
the host waits for the device after each action, so that the clock shows the device's time.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import torch
import torch.distributed as dist
import tyro

from common.launch import RunArgs
from common.rank import init_distributed, print0

from . import zero_bubble
from .zero_bubble import FORMS, Pipeline, prepare

KINDS = {  # color and legend
    "F": ("#0072b2", "forward"),
    "B": ("#e69f00", "backward"),
    "I": ("#009e73", "backward: input"),
    "W": ("#cc79a7", "backward: weights"),
}


class Event(NamedTuple):
    """An action of a stage, from `start` to `end` in seconds."""

    stage: int
    kind: str
    micro: int
    start: float
    end: float


@dataclass(frozen=True)
class Args(zero_bubble.Args):
    """Draw a step with each schedule."""

    out: Path = Path("timeline.png")


def record(pipeline: Pipeline, kind: str, method: str, events: list[Event]) -> None:
    """Replace a method of a pipeline by one that appends its time to `events`."""
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
    """Run three steps; return the events of all stages in the last one. Every rank calls this."""
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
    """Return the idle fraction of all stages, from the first start to the last end."""
    span = max(event.end for event in events) - min(event.start for event in events)
    stages = len({event.stage for event in events})
    return 1 - sum(event.end - event.start for event in events) / (stages * span)


def draw(charts: dict[str, list[Event]], path: Path) -> None:
    """Draw a chart per schedule, on a common scale of milliseconds."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after the choice of a backend without a screen

    figure, axes = plt.subplots(
        len(charts), sharex=True, squeeze=False, figsize=(8, 5), layout="constrained"
    )
    for axis, (name, events) in zip(axes[:, 0], charts.items(), strict=True):
        begin = min(event.start for event in events)
        for stage, kind, micro, start, end in events:
            left, width = 1e3 * (start - begin), 1e3 * (end - start)
            axis.barh(stage, width, 0.85, left, color=KINDS[kind][0], edgecolor="w")
            axis.text(
                left + width / 2, stage, micro, ha="center", va="center", fontsize=7, color="w"
            )
        axis.set(yticks=sorted({event.stage for event in events}), ylabel="stage")
        axis.invert_yaxis()
        axis.set_title(f"{name}: bubble {bubble(events):.0%}", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("milliseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color, _ in KINDS.values()]
    names = [name for _, name in KINDS.values()]
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def main(args: Args, device: torch.device) -> dict[str, list[Event]]:
    """Run a step with each schedule, and draw them. Every rank calls this."""
    charts = {name: run(args, device, name) for name in FORMS}
    if dist.get_rank() == 0:
        draw(charts, args.out)
    print0(f"{', '.join(f'{n}: bubble {bubble(e):.0%}' for n, e in charts.items())}; {args.out}")
    return charts


if __name__ == "__main__":
    main(tyro.cli(Args), init_distributed(RunArgs(), int(os.environ.get("LOCAL_RANK", "0"))))
    dist.destroy_process_group()
