"""Curves of one run, or of several on top of each other. No torch here."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from common.train.files import writing

Point = tuple[int, dict[str, float]]
Line = list[tuple[int, float]]
PANELS = {"test": "test set", "loss": "loss"}  # groups of names, from the top down
COLOURS = ("#c4391d", "#1a7f37", "#8250df", "#9a6700", "#0b5cad", "#57606a", "#bf3989", "#0f7b8a")
FLAT = 3  # a few values that stretch an axis by more than this are cut off


def read_points(file: Path) -> list[Point]:
    """The records of metrics.jsonl; the last line may have been cut when the run was killed."""
    points: list[Point] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            points.append((record.pop("step"), record))
    return points


def lines_of(points: Sequence[Point]) -> dict[str, Line]:
    """The curves of a run, by their names."""
    lines: dict[str, Line] = {}
    for step, values in points:
        for name, value in values.items():
            lines.setdefault(name, []).append((step, value))
    return lines


def draw_curves(
    path: Path, points: Sequence[Point], title: str, label_smoothing: float = 0.0
) -> None:
    """Draw a run: the accuracy on the test set, or all metrics of one without it; then the losses.

    Precision, recall and F1 would lie on the accuracy; metrics.jsonl has them.

    Args:
        path: of the PNG.
        points: steps, and values by name: `loss/train`, `test/accuracy`.
        title: of the picture.
        label_smoothing: of the training loss, which is above the test loss for that.

    Raises:
        UserError: the disk is full, for example.
    """
    curves = lines_of(points)
    panels: dict[str, dict[str, Line]] = {}
    for group, name in PANELS.items():
        own = {key.partition("/")[2]: line for key, line in curves.items() if key.startswith(group)}
        if "accuracy" in own:  # drawn last: on top
            own = {key: own[key] for key in ("top5", "accuracy") if key in own}
        if group == "loss" and label_smoothing:
            name += f" (train: with label smoothing {label_smoothing:g})"
        if own:
            panels[name] = distinct(own)
    if panels:  # there are none where a run was resumed at its end, in another folder
        draw_panels(path, panels, title)


def distinct(lines: Mapping[str, Line]) -> dict[str, Line]:
    """Of equal lines the last: a GAN's training loss is that of its discriminator."""
    names = {tuple(line): name for name, line in lines.items()}
    return {name: line for name, line in lines.items() if names[tuple(line)] == name}


def draw_panels(path: Path, panels: Mapping[str, Mapping[str, Line]], title: str) -> None:
    """Draw panels below each other; each line has its name at its end.

    Args:
        path: of the PNG, or of an SVG.
        panels: lines by name, by the panel's title. The last line of a panel is on top.
        title: of the picture.

    Raises:
        UserError: the disk is full, for example.
    """
    from matplotlib.figure import Figure  # a second, after the training
    from matplotlib.ticker import MaxNLocator  # as above

    width, height, lines_above = 7.5, 0.7 + 2.6 * len(panels), textwrap.wrap(title, 90)
    figure = Figure((width, height), dpi=110)
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)
    labels = dict.fromkeys(label for lines in panels.values() for label in lines)
    colours = dict(zip(labels, cycle(COLOURS), strict=False))
    for axis, (name, lines) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_panel(axis, lines, colours)
        axis.set_title(name, loc="left", fontsize=9, y=1)  # without y, all labels are measured
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle("\n".join(lines_above), fontsize=10, x=0.02, y=1 - 0.1 / height, ha="left")
    # Room in inches. `tight_layout` measures all text to find it, nearly as long as drawing takes.
    # Of names that are very long, the end is cut off: half of the width stays for the lines.
    beside = min(0.15 + 0.07 * max(map(len, labels)), 0.4 * width)
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - beside / width,
        bottom=0.5 / height,
        top=1 - (0.35 + 0.17 * len(lines_above)) / height,
        hspace=0.2,
    )
    with writing(path):
        figure.savefig(path, format=path.suffix[1:])


def _draw_panel(axis: Any, lines: Mapping[str, Line], colours: Mapping[str, str]) -> None:
    low, high = limits([value for line in lines.values() for _, value in line])
    ends = []
    for label, line in lines.items():
        colour, marker = colours[label], "o" if len(line) < 30 else ""
        width = 2.0 if label in ("accuracy", "test") else 1.2
        axis.plot(*zip(*line, strict=True), color=colour, linewidth=width, marker=marker, ms=3)
        ends.append((line[-1][1], label, colour))
        for step, value in line:
            if value > high:
                axis.annotate(
                    f"{value:.3g} ↑",
                    (step, 1),
                    xycoords=("data", "axes fraction"),
                    color=colour,
                    fontsize=7,
                    va="top",
                    ha="left",
                )
    if high < float("inf"):
        axis.set_ylim(low, high)
    bottom, top = axis.get_ylim()
    places = spread([(value - bottom) / (top - bottom) for value, *_ in ends], 0.075)
    for place, (_, label, colour) in zip(places, ends, strict=True):
        axis.annotate(
            label, (1.01, place), xycoords="axes fraction", color=colour, fontsize=8, va="center"
        )


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The range of an axis; a value far above all others is left out of it.

    Returns:
        Lowest and highest; infinite where nothing has to be left out.
    """
    inside = sorted(values)[: -max(1, len(values) // 50)]
    if len(inside) > 3 and max(values) - inside[0] > FLAT * (inside[-1] - inside[0]) > 0:
        room = 0.08 * (inside[-1] - inside[0])
        return inside[0] - room, inside[-1] + room
    return float("-inf"), float("inf")


def spread(places: Sequence[float], distance: float) -> list[float]:
    """Move places apart, so that no two are nearer than a distance; their order stays."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = {number: min(max(places[number], 0.0), 1.0) for number in order}
    for below, above in pairwise(order):
        moved[above] = max(moved[above], moved[below] + distance)
    excess = max([0.0, *(place - 1.0 for place in moved.values())])
    ceiling = 1.0
    for number in reversed(order if excess else []):
        moved[number] = min(moved[number], ceiling)
        ceiling = moved[number] - distance
    return [moved[number] for number in range(len(places))]
