"""Who computed what, when: a Gantt chart (PNG) and a trace for ui.perfetto.dev.

In the steps that are recorded on a GPU, the host waits after every operation until it is computed;
otherwise recording costs two readings of the clock per operation.
"""

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.launch.collectives import gather_objects, print0

COLOURS = {"F": "#0072b2", "B": "#e69f00", "I": "#009e73", "W": "#cc79a7"}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
}


class Event(NamedTuple):
    """One operation of one process."""

    row: int
    """Process, or device, that computed it."""
    kind: str
    """F, B, or in zero-bubble schedules I and W, the halves of B."""
    micro: int
    stage: int
    start: float
    """Seconds since the epoch, the clock that processes have in common."""
    end: float


class Timeline:
    """Records the operations of this process.

    Args:
        row: the process.
        device: its device.
        traced: the steps to record. By default not the first, which also allocates memory.
    """

    def __init__(self, row: int, device: torch.device, traced: range = range(1, 6)) -> None:
        self.row, self.device, self.traced = row, device, traced
        self.recording, self.count = False, 0
        self.steps: list[list[Event]] = []

    def begin(self) -> None:
        """Start a step; those that `traced` names are recorded."""
        self.recording = self.count in self.traced
        self.count += 1
        if self.recording:
            self.steps.append([])

    @contextmanager
    def record(self, kind: str, micro: int, stage: int) -> Generator[None]:
        """Record the body as one operation."""
        if not self.recording:
            yield
            return
        start = time.time()
        yield
        if self.device.type == "cuda":
            # Not for the whole device: receives that are posted ahead wait in other streams.
            torch.cuda.current_stream(self.device).synchronize()
        self.steps[-1].append(Event(self.row, kind, micro, stage, start, time.time()))


def span(events: list[Event]) -> float:
    """The seconds between the first start and the last end."""
    return max(event.end for event in events) - min(event.start for event in events)


def bubble(events: list[Event]) -> float:
    """The idle share of the processes' time between the first start and the last end."""
    rows = len({event.row for event in events})
    return 1 - sum(event.end - event.start for event in events) / (rows * span(events))


def report_timeline(timeline: Timeline, folder: Path, title: str) -> float | None:
    """Write the picture and the trace of the recorded step with the median bubble.

    Every rank calls this.

    Args:
        timeline: of this process.
        folder: where rank 0 writes.
        title: of the picture.

    Returns:
        The median of the measured bubbles, on rank 0.
    """
    steps = [step for step in merged(gather_objects(timeline.steps)) if step]
    if not steps:
        return None
    step = sorted(steps, key=bubble)[len(steps) // 2]
    write(folder, step, title)
    idle, file = f"measured bubble: {bubble(step):.1%}", folder / "timeline.png"
    print0(f"{idle}, median of {len(steps)} steps ({file})")
    return round(bubble(step), 4)


def merged(held: list[list[list[Event]]]) -> list[list[Event]]:
    """The events of each step of all processes, from what each of them recorded."""
    return [[event for part in parts for event in part] for parts in zip(*held, strict=True)]


def write(folder: Path, events: list[Event], title: str, rows: str = "process") -> None:
    """Write timeline.png and trace.json.

    Args:
        folder: where to.
        events: of one step, of all processes.
        title: of the chart.
        rows: what a row is.
    """
    start = min(event.start for event in events)
    names = [
        {"name": "process_name", "ph": "M", "pid": row, "args": {"name": f"{rows} {row}"}}
        for row in sorted({event.row for event in events})
    ]
    operations = [
        {
            "name": f"{event.kind}{event.micro}",
            "cat": NAMES[event.kind],
            "ph": "X",
            "pid": event.row,
            "tid": 0,
            "ts": 1e6 * (event.start - start),
            "dur": 1e6 * (event.end - event.start),
            "args": {"stage": event.stage, "micro-batch": event.micro},
        }
        for event in events
    ]
    trace: dict[str, Any] = {"traceEvents": [*names, *operations], "displayTimeUnit": "ms"}
    (folder / "trace.json").write_text(json.dumps(trace) + "\n")
    draw(folder / "timeline.png", {title: events}, rows)


def draw(path: Path, charts: dict[str, list[Event]], rows: str = "process") -> None:
    """Draw Gantt charts below each other, on one scale.

    Time runs to the right, a bar is an operation, white is idle.

    Args:
        path: of the PNG.
        charts: events by title.
        rows: what a row is.
    """
    import matplotlib  # a second, after the training

    matplotlib.use("agg")
    from matplotlib import pyplot  # as above
    from matplotlib.patches import Patch  # as above

    counts = [len({event.row for event in events}) for events in charts.values()]
    span = max(max(e.end for e in part) - min(e.start for e in part) for part in charts.values())
    size = (8, sum(counts) * 0.5 + len(charts) + 0.6)
    figure, axes = pyplot.subplots(
        len(charts), 1, figsize=size, squeeze=False, height_ratios=counts, layout="constrained"
    )
    for axis, (title, events) in zip(axes[:, 0], charts.items(), strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        _draw_bars(axis, events, 1e3 * span)
        axis.set_ylabel(rows)
    several = any("'" in mark for part in charts.values() for mark in _marks(part))
    more = ", with ' in the second stage of a process" if several else ""
    axes[-1, 0].set_xlabel(f"milliseconds; the number is the micro-batch{more}")
    kinds = {event.kind for events in charts.values() for event in events}
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in NAMES if kind in kinds]
    place, columns = "outside lower center", len(handles)
    figure.legend(handles=handles, loc=place, ncols=columns, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _marks(events: list[Event]) -> list[str]:
    """What to write on each bar: the micro-batch, and a ' for each earlier stage of the process."""
    stages: dict[int, set[int]] = {}
    for event in events:
        stages.setdefault(event.row, set()).add(event.stage)
    places = {row: sorted(held) for row, held in stages.items()}
    return [str(e.micro) + "'" * places[e.row].index(e.stage) for e in events]


def _draw_bars(axis: Any, events: list[Event], span: float) -> None:
    """Draw a bar per operation, numbered where there is room; `span` in milliseconds."""
    start = min(event.start for event in events)
    label = {"ha": "center", "va": "center", "fontsize": 7}
    for event, mark in zip(events, _marks(events), strict=True):
        left, width = 1e3 * (event.start - start), 1e3 * (event.end - event.start)
        colour = COLOURS[event.kind]
        axis.barh(event.row, width, 0.8, left, color=colour, edgecolor="white", linewidth=0.5)
        if width > span / 60:
            ink = "white" if event.kind == "F" else "black"  # what can be read on the colour
            axis.text(left + width / 2, event.row, mark, color=ink, **label)
    axis.set(xlim=(0, span), yticks=sorted({event.row for event in events}))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
