"""Charts of results, from the JSON alone: bars and lines. No torch.

A chart is a description (`Bars`, `Lines`, `Curves`). The report draws each as an SVG that a phone
can show; the README pictures are PNGs with the charts of one result, two in a row.
"""

import base64
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from benchmarks.tables import short
from common.train.curves import spread

WIDTH = 5.0  # inches: 360 points, so that a letter of 9 points has 9 pixels on a phone
ROW = 9.0  # inches of two charts: a page that is 700 pixels wide shows 9 points as 10 pixels
DPI = 110  # of the pictures of pages
NAMES = 8  # points of the names of lines
LETTER = 0.6 * NAMES  # how wide a letter of them is, at most
BLUE, GREY = "#0072b2", "#999999"
COLOURS = (BLUE, "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#000000")
COLOURS += ("#882255", "#44aa99", "#999933", "#332288", GREY)
CONTRAST = 4.5  # of small text with the page, by the accessibility guidelines of the web
STYLE = Path(__file__).with_suffix(".mplstyle")


def contrast(colour: str) -> float:
    """Of a colour with white: from 1 to 21."""
    channels = [
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in to_rgb(colour)
    ]
    return 1.05 / (0.05 + sum(map(mul, (0.2126, 0.7152, 0.0722), channels)))


def ink(colour: str) -> str:
    """A colour for text on white: itself, or as dark a shade of it as can be read."""
    red, green, blue = to_rgb(colour)
    while contrast(to_hex((red, green, blue))) < CONTRAST:
        red, green, blue = 0.99 * red, 0.99 * green, 0.99 * blue
    return to_hex((red, green, blue))


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, each with its name, its value and a note above it.

    Args:
        title: of the chart.
        unit: of the values.
        values: of each bar; a mapping stacks its parts.
        notes: by the name of the bar.
        grey: the bar that the others are compared with.
        totals: by the name of the bar, what to print instead of the sum of its parts.
    """

    title: str
    unit: str
    values: Mapping[str, float | Mapping[str, float]]
    notes: Mapping[str, str] = field(default_factory=dict)
    grey: str = ""
    totals: Mapping[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        """Names of the stacked parts; none if every bar is a single value."""
        stacks = [value for value in self.values.values() if isinstance(value, Mapping)]
        return list(dict.fromkeys(part for stack in stacks for part in stack))

    @property
    def height(self) -> float:
        """Inches."""
        return 0.8 + 0.42 * len(self.values) + 0.2 * math.ceil(len(self.parts) / 2)

    def draw(self, axis: Axes) -> None:
        """Draw the bars from the top down."""
        for place, (name, value) in enumerate(self.values.items()):
            stack = value if isinstance(value, Mapping) else {"": value}
            end = 0.0
            for part, length in stack.items():
                grey = BLUE if name != self.grey else GREY
                colour = COLOURS[self.parts.index(part) % len(COLOURS)] if part else grey
                label = part if place == 0 else ""
                axis.barh(place, max(0.0, length), 0.35, left=end, color=colour, label=label)
                end += max(0.0, length)
            note = f", {self.notes[name]}" if self.notes.get(name) else ""
            total = self.totals.get(name, sum(stack.values()))
            shown = f"{total:,.0f}" if total >= 1000 else f"{total:.3g}"
            text = f"{name}: {shown}{note}" if not self.unit.startswith("%") else name
            at = (0, place - 0.175)  # the bar's upper edge
            axis.annotate(text, at, (0, 2), textcoords="offset points", va="bottom")
        axis.set(yticks=[], xlabel=self.unit, ylim=(len(self.values) - 0.5, -0.6))
        axis.spines["left"].set_visible(False)


@dataclass(frozen=True)
class Line:
    """A line of a chart; `calculated` ones are drawn dashed or dotted, with hollow points."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    dashes: str = "-"

    @property
    def calculated(self) -> bool:
        """Whether it was not measured."""
        return self.dashes != "-"


@dataclass(frozen=True)
class Lines:
    """Lines with a point at each value, on logarithmic axes, with their names at their ends.

    Args:
        title: of the chart.
        x: what the horizontal axis shows.
        y: what the vertical axis shows.
        lines: what to draw.
        ticks: of the horizontal axis.
        from_zero: whether the vertical axis is linear, and begins with 0.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    ticks: Sequence[float] = ()
    from_zero: bool = False

    parts: Sequence[str] = ()  # no legend

    @property
    def height(self) -> float:
        """Inches."""
        return max(3.4, 0.9 + 0.22 * len(self.lines))

    def draw(self, axis: Axes) -> None:
        """Draw the lines."""
        for line in self.lines:
            fill = "white" if line.calculated else line.colour
            looks: dict[str, Any] = {"color": line.colour, "marker": "o", "markersize": 4.5}
            axis.plot(line.xs, line.ys, line.dashes, label=line.name, markerfacecolor=fill, **looks)
        axis.set(xscale="log", xlabel=self.x, ylabel=self.y)
        axis.set(ylim=(0, None)) if self.from_zero else axis.set_yscale("log")
        label_powers(axis)
        if self.ticks:
            axis.set_xticks(self.ticks, [short(tick) for tick in self.ticks])
            axis.minorticks_off()
        axis.grid(alpha=0.3)
        self._name_lines(axis)

    def _name_lines(self, axis: Axes) -> None:
        """Write each name to the right of its last point, or as near as the others let it."""
        most = max(line.xs[-1] for line in self.lines)
        longest = [line for line in self.lines if line.xs[-1] == most]
        looks: dict[str, Any] = {"fontsize": NAMES, "annotation_clip": False}
        for line, height in zip(longest, self._heights(axis, longest), strict=True):
            at, colour = (1.02, height), ink(line.colour)
            axis.annotate(line.name, at, None, "axes fraction", color=colour, va="center", **looks)
        others = [line for line in self.lines if line.xs[-1] < most]
        if not others:
            return
        beside = LETTER * max(len(line.name) for line in longest)
        plane = Plane(axis, 72 * (WIDTH - 0.7) - beside)
        taken = [box for line in self.lines for box in plane.along(line)]
        for line in sorted(others, key=lambda line: line.xs[-1]):
            end, looks["color"] = (line.xs[-1], line.ys[-1]), ink(line.colour)
            at = plane.free_place(end, line.name, taken), "data", "offset points"
            axis.annotate(line.name, end, *at, **looks)

    def _heights(self, axis: Axes, lines: Sequence[Line]) -> list[float]:
        """Where the names of lines stand beside the axis, as shares of its height."""
        bottom, top = axis.transScale.transform([(1, y) for y in axis.get_ylim()])[:, 1]
        ends = axis.transScale.transform([(1, line.ys[-1]) for line in lines])[:, 1]
        highest = 0.97  # below the title
        room = 0.16 / (self.height - 0.8) / highest  # a line of text, as a share of the axis
        places = spread([(y - bottom) / (top - bottom) / highest for y in ends], room)
        return [highest * place for place in places]


def label_powers(axis: Axes) -> None:
    """Numbers, not powers, at logarithmic axes; where they span little, at 2 and 5, too."""
    for one in (axis.xaxis, axis.yaxis):
        if one.get_scale() == "log":
            low, high = one.get_view_interval()
            steps = (1.0,) if high / low > 100 else (1.0, 2.0, 5.0)
            one.set_major_locator(LogLocator(subs=steps))
            one.set_minor_locator(NullLocator())
            one.set_major_formatter(FuncFormatter(lambda number, _: short(number)))


class Plane:
    """Where things of an axis are, in points, before the layout is made.

    Args:
        axis: with its lines.
        width: in points, that the layout will give it.
    """

    def __init__(self, axis: Axes, width: float) -> None:
        axis.get_xlim(), axis.get_ylim()  # only now are the limits known
        self.wide, self.high = width / axis.get_window_extent().width, 72 / axis.figure.dpi
        self.transform = axis.transData.transform

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is."""
        right, up = self.transform((x, y))
        return self.wide * right, self.high * up

    def along(self, line: Line) -> list[Bbox]:
        """Small boxes along a line."""
        ends = [self.at(x, y) for x, y in zip(line.xs, line.ys, strict=True)]
        found = []
        for (x1, y1), (x2, y2) in pairwise([*ends, ends[-1]]):
            for step in range(40):
                x, y = x1 + (x2 - x1) * step / 40, y1 + (y2 - y1) * step / 40
                found.append(Bbox.from_extents(x - 2, y - 2, x + 2, y + 2))
        return found

    def free_place(self, end: tuple[float, float], name: str, taken: list[Bbox]) -> tuple[int, int]:
        """Where to write a name near the end of its line, as an offset; it is taken then."""
        x, y = self.at(*end)
        offsets = [(6, -3), (6, -11), (6, 5), (0, 6), (0, -13), (6, -20), (6, 14)]
        boxes = [
            Bbox.from_bounds(x + right, y + up - 1, LETTER * len(name), NAMES)
            for right, up in offsets
        ]
        free = [number for number, box in enumerate(boxes) if not box.count_overlaps(taken)]
        chosen = free[0] if free else 0
        taken.append(boxes[chosen])
        return offsets[chosen]


@dataclass(frozen=True)
class Curves:
    """Curves that may lie on one another: the first is the widest, and below the others.

    Args:
        title: of the chart.
        x: what the horizontal axis shows.
        y: what the vertical axis shows.
        lines: what to draw.
        at: where something happened, on the horizontal axis.
        event: what it was.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    at: float
    event: str
    height: float = 3.4

    @property
    def parts(self) -> list[str]:
        """Names of the curves."""
        return [line.name for line in self.lines]

    def draw(self, axis: Axes) -> None:
        """Draw the curves."""
        for line, width in zip(self.lines, (7, 3.2, 1.2), strict=False):
            axis.plot(line.xs, line.ys, line.dashes, label=line.name, color=line.colour, lw=width)
        axis.axvline(self.at, color=GREY, linestyle=":", linewidth=1)
        axis.annotate(
            self.event, (self.at, 0.5), (5, 0), ("data", "axes fraction"), "offset points"
        )
        axis.set(xlabel=self.x, ylabel=self.y)
        axis.grid(alpha=0.3)


Chart = Bars | Lines | Curves


def wrapped(text: str, width: int) -> str:
    """In lines of about the same length."""
    lines = math.ceil(len(text) / width)
    return textwrap.fill(text, min(width, len(text) // lines + 8))


def figure(charts: Sequence[Chart], title: str = "") -> Figure:
    """The charts, two in a row, each with its legend below; with a title, each has its own, too."""
    columns = min(2, len(charts))
    rows = [charts[first : first + 2] for first in range(0, len(charts), 2)]
    heights = [max(chart.height for chart in row) + (0.2 if title else 0) for row in rows]
    width = WIDTH if columns == 1 else ROW
    size = (width, sum(heights) + (0.45 if title else 0))
    whole = Figure(figsize=size, layout="constrained")
    if title:
        whole.suptitle(title, fontsize=9, color="#555555")
    places = whole.subfigures(len(rows), columns, squeeze=False, height_ratios=heights)
    for number, chart in enumerate(charts):
        place, height = places[number // 2][number % 2], heights[number // 2]
        own = chart.height + (0.2 if title else 0)
        if isinstance(chart, Bars) and height - own > 0.1:  # else its bars become thick
            place = place.subfigures(2, 1, height_ratios=(own, height - own))[0]
        axis = place.subplots()
        chart.draw(axis)
        if title:
            beside = 0.1 if isinstance(chart, Bars) else 0.65  # the numbers left of the axis
            axis.set_title(wrapped(chart.title, int(13.5 * (width / columns - beside))))
        if chart.parts:
            place.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return whole


def picture(chart: Chart) -> str:
    """An `src` that holds the chart itself, as SVG; the same bytes for the same figures."""
    buffer = io.BytesIO()
    with style.context(STYLE):
        figure([chart]).savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def save(path: Path, charts: Sequence[Chart], title: str) -> None:
    """Write the charts of one result as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with style.context(STYLE):
        figure(charts, title).savefig(path, dpi=DPI)
