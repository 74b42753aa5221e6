"""Draw which stage computes what, and when: a Gantt chart of GPipe, 1F1B and ZB-H1.

    torchrun --standalone --nproc-per-node 2 -m examples.resnet_pipeline.further.timeline

A bar is an action of a stage, with the number of its micro-batch; white is the bubble. On a GPU the
host waits after each action here, so that the clock shows when the device has computed it.
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

from ..pipeline import Pipeline, gpipe, make_mesh, one_forward_one_backward
from ..stages import build_stage
from .zero_bubble import ZeroBubblePipeline, zero_bubble_h1

COLORS = {"F": "#0072b2", "B": "#e69f00", "I": "#009e73", "W": "#cc79a7"}
LABELS = {"F": "forward", "B": "backward", "I": "backward: input", "W": "backward: weights"}


class Event(NamedTuple):
    """An action of a stage, from `start` to `end` in seconds."""

    stage: int
    kind: str
    micro: int
    start: float
    end: float


@dataclass(frozen=True)
class Args:
    """Draw a training step with three schedules."""

    arch: str = "resnet50"
    batch_size: int = 32
    micro_batches: int = 4
    image_size: int = 64
    cuts: tuple[str, ...] = ()  # first block of each later stage
    out: Path = Path("timeline.png")


def record(pipeline: Pipeline, kind: str, name: str, events: list[Event]) -> None:
    """Let a method of a pipeline note when it computes."""
    method = getattr(pipeline, name)

    def timed(micro: int, *args: Any) -> Any:
        start = time.time()
        result = method(micro, *args)
        if pipeline.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # messages wait in other streams
        events.append(Event(pipeline.index, kind, micro, start, time.time()))
        return result

    setattr(pipeline, name, timed)


def run(args: Args, pipeline: Pipeline, split: bool) -> list[Event]:
    """Run three steps; return the events of all stages in the last one. Every rank calls this."""
    events = list[Event]()
    record(pipeline, "F", "compute_forward", events)
    record(pipeline, "I" if split else "B", "compute_backward", events)
    if split:
        record(pipeline, "W", "compute_weights", events)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    images = images.to(pipeline.device, memory_format=torch.channels_last)
    labels = torch.arange(args.batch_size, device=pipeline.device) % 10
    for _ in range(3):
        events.clear()
        dist.barrier()
        pipeline.step(images, labels)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, events)
    return [event for own in held for event in own]


def bubble(events: list[Event]) -> float:
    """Return the idle fraction of all stages, from the first start to the last end."""
    span = max(event.end for event in events) - min(event.start for event in events)
    stages = len({event.stage for event in events})
    return 1 - sum(event.end - event.start for event in events) / (stages * span)


def draw(charts: dict[str, list[Event]], path: Path) -> None:
    """Draw a chart per schedule on a common scale of milliseconds."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after the choice of a backend without a screen

    stages = 1 + max(event.stage for events in charts.values() for event in events)
    size = (8, 0.8 + len(charts) * (0.4 + 0.4 * stages))
    figure, axes = plt.subplots(
        len(charts), sharex=True, squeeze=False, figsize=size, layout="constrained"
    )
    for axis, (name, events) in zip(axes[:, 0], charts.items(), strict=True):
        begin = min(event.start for event in events)
        for stage, kind, micro, start, end in events:
            left, width = 1e3 * (start - begin), 1e3 * (end - start)
            axis.barh(stage, width, 0.85, left, color=COLORS[kind], edgecolor="white")
            axis.text(
                left + width / 2, stage, micro, ha="center", va="center", fontsize=7, color="w"
            )
        axis.set(yticks=range(stages), ylabel="stage")
        axis.invert_yaxis()
        axis.set_title(f"{name}: bubble {bubble(events):.0%}", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("milliseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, LABELS.values(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def main(args: Args, device: torch.device) -> dict[str, list[Event]]:
    """Run the schedules one after another and draw them. Every rank calls this."""
    mesh, charts = make_mesh(device.type, dist.get_world_size(), 120.0), {}
    forms: Any = {"GPipe": (Pipeline, gpipe), "1F1B": (Pipeline, one_forward_one_backward)}
    forms |= {"ZB-H1": (ZeroBubblePipeline, zero_bubble_h1)}
    for name, (form, schedule) in forms.items():
        stages, index = mesh.size(1), mesh.get_local_rank("pp")
        stage = build_stage(args.arch, 10, "group", stages, index, args.cuts).to(device)
        pipeline = form(stage, mesh, schedule, args.micro_batches, 120.0)
        charts[name] = run(args, pipeline, split=form is ZeroBubblePipeline)
        print0(f"{name}: bubble {bubble(charts[name]):.0%}")
    if dist.get_rank() == 0:
        draw(charts, args.out)
        print0(f"picture: {args.out}")
    return charts


if __name__ == "__main__":
    main(tyro.cli(Args), init_distributed(RunArgs(), int(os.environ.get("LOCAL_RANK", "0"))))
    dist.destroy_process_group()
