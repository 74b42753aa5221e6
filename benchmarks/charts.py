"""Charts for the report, from the measurements alone: no torch. Narrow enough that a phone shows their words."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.latency_bandwidth import Link, ring_seconds

WIDTH = 5.0  # inches: 360 points, so that a letter of 9 points has 9 pixels on a phone
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#000000", "#999999")
WAYS = {"compute": "#000000", "flat": "#0072b2", "ring": "#56b4e9", "ddp": "#009e73", "pipeline": "#d55e00"}
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "report",
    "svg.fonttype": "none",
}


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


def picture(figure: Figure) -> str:
    """An `src` that holds the chart itself, as SVG; the same bytes for the same figures."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def bars(values: Mapping[str, float], unit: str, notes: Mapping[str, str] | None = None, grey: str = "") -> Figure:
    """A horizontal bar per name, with its value and a note above; `grey` is what the others are compared with."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.6 + 0.42 * len(values)))
        axis = figure.subplots()
        places = list(range(len(values)))
        axis.barh(
            places, list(values.values()), 0.35, color=["#999999" if name == grey else "#0072b2" for name in values]
        )
        for place, (name, value) in enumerate(values.items()):
            note = f", {notes[name]}" if notes and name in notes else ""
            axis.annotate(f"{name}: {value:.4g}{note}", (0, place), (0, 7), textcoords="offset points", va="bottom")
        axis.set(yticks=[], xlabel=unit, ylim=(len(values) - 0.5, -0.6))
        axis.spines["left"].set_visible(False)
        figure.tight_layout()
    return figure


def lines(drawn: Sequence[Line], x: str, y: str, ticks: Sequence[float] = (), from_zero: bool = False) -> Figure:
    """Lines with a point at each value, on logarithmic axes; the legend is below.

    Args:
        drawn: the lines.
        x: what the horizontal axis shows.
        y: what the vertical axis shows.
        ticks: of the horizontal axis.
        from_zero: whether the vertical axis is linear, and begins with 0.
    """
    with mpl.rc_context(STYLE):
        rows = -(-len(drawn) // 2)
        figure = Figure(figsize=(WIDTH, 3.2 + 0.2 * rows))
        axis = figure.subplots()
        for line in drawn:
            axis.plot(line.xs, line.ys, line.dashes, color=line.colour, marker="o", markersize=4.5, label=line.name,
                      markerfacecolor="white" if line.calculated else line.colour)  # fmt: skip
        axis.set_xscale("log")
        axis.set(ylim=(0, None)) if from_zero else axis.set_yscale("log")
        if ticks:
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
        axis.set(xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
        figure.legend(loc="lower center", ncols=2, frameon=False, fontsize=7.5)
        figure.tight_layout(rect=(0, 0.2 * rows / (3.2 + 0.2 * rows) + 0.02, 1, 1))
    return figure


def _rows(result: Mapping[str, Any], gigabits: int) -> list[Mapping[str, Any]]:
    """The calculated rows of a network, with the latency that was assumed."""
    return [row for row in result["extrapolation"] if (row["gigabits"], row["alpha_from"]) == (gigabits, "assumed")]


def _networks(result: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The networks, and how their lines are drawn."""
    found = sorted({row["gigabits"] for row in result["extrapolation"]})
    return list(zip(found, (":", "--", "-."), strict=False))


def step_chart(result: Mapping[str, Any]) -> Figure:
    """Steps against ranks, from scaling.json: measured, and calculated for more ranks."""
    measured = {int(ranks): seconds for ranks, seconds in result["steps"].items()}
    drawn = [
        Line(f"{way}, measured", list(measured), [1e3 * median(seconds[way]) for seconds in measured.values()], colour)
        for way, colour in WAYS.items()
    ]
    for way in ("flat", "ddp", "pipeline"):
        for gigabits, dashes in _networks(result):
            rows = _rows(result, gigabits)
            seconds = [1e3 * row["seconds"][way] for row in rows]
            name = f"{way}, {gigabits} Gb/s, calculated"
            drawn.append(Line(name, [row["ranks"] for row in rows], seconds, WAYS[way], dashes))
    ticks = sorted({*measured, *(row["ranks"] for row in result["extrapolation"])})
    return lines(drawn, "ranks", "ms per step", ticks, from_zero=True)


def exchange_chart(result: Mapping[str, Any]) -> Figure:
    """All-reduces of the gradients against ranks, from scaling.json: measured, by the fit, and for other networks."""
    size, more = result["gradient_bytes"], sorted({row["ranks"] for row in result["extrapolation"]})
    drawn = []
    for (way, link), colour in zip(result["fit"].items(), COLOURS, strict=False):
        sizes = {int(ranks): found for ranks, found in result["all_reduce"].items()}
        nearest = min((int(s) for s in next(iter(sizes.values()))), key=lambda one: abs(one - size))
        measured = [1e3 * median(found[str(nearest)][way]) for found in sizes.values()]
        drawn.append(Line(f"{way}, measured", list(sizes), measured, colour))
        fitted = Link(link["alpha"], link["beta"])
        ranks = [*sizes, *more]
        drawn.append(
            Line(f"{way}, by the fit", ranks, [1e3 * ring_seconds(n, size, fitted) for n in ranks], colour, ":")
        )
    for (gigabits, _), colour in zip(_networks(result), COLOURS[2:], strict=False):
        link = Link.network(gigabits, _rows(result, gigabits)[0]["alpha"])
        seconds = [1e3 * ring_seconds(n, size, link) for n in more]
        drawn.append(Line(f"{gigabits} Gb/s, {1e6 * link.alpha:g} µs, calculated", more, seconds, colour, "--"))
    return lines(drawn, "ranks", "ms per all-reduce", [*sizes, *more])
