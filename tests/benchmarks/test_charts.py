"""The pictures of the pages: every word can be read."""

from itertools import combinations

import pytest
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks import charts, report
from benchmarks.charts import Line, Lines
from benchmarks.registry import BENCHMARKS, Benchmark
from benchmarks.tables import machines
from tests.conftest import ROOT

FOUND = report.load(ROOT / "benchmarks/results")
DRAWN = [benchmark for benchmark in BENCHMARKS if benchmark.result in FOUND]


def unreadable(figure: Figure) -> list[str]:
    """Words that are cut off, or that overlap others."""
    figure.draw_without_rendering()
    beyond = set()
    for one in (one for axes in figure.axes for one in (axes.xaxis, axes.yaxis)):
        low, high = one.get_view_interval()
        ticks = [*one.get_major_ticks(), *one.get_minor_ticks()]
        beyond |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()]
    texts = [text for text in texts if text.get_text() and text not in beyond]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    whole = figure.bbox
    found = [
        f"{text!r} is cut off"
        for text, box in boxes
        if box.x0 < whole.x0 - 1 or box.x1 > whole.x1 + 1 or box.y0 < whole.y0 - 1 or box.y1 > whole.y1 + 1
    ]
    for (one, first), (other, second) in combinations(boxes, 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        high = min(first.y1, second.y1) - max(first.y0, second.y0)
        if wide > 1 and high > 3:  # a box has room above its letters
            found.append(f"{one!r} overlaps {other!r}")
    return found


@pytest.mark.parametrize("benchmark", DRAWN, ids=lambda benchmark: benchmark.result)
def test_words_of_the_pictures_can_be_read(benchmark: Benchmark) -> None:
    found = FOUND[benchmark.result]
    with style.context(charts.STYLE):
        for stem, drawn in benchmark.pictures(found).items():
            picture = charts.figure(drawn, f"{benchmark.title}\n{machines(found)}")
            picture.dpi = charts.DPI
            assert (stem, unreadable(picture)) == (stem, [])


def test_what_cannot_be_read_is_seen() -> None:
    figure = Figure((2, 2))
    figure.text(0.1, 0.5, "one two")
    figure.text(0.15, 0.52, "three four")
    figure.text(0.1, 0.2, "longer than this figure is wide, by far")
    found = unreadable(figure)
    assert found == ["'longer than this figure is wide, by far' is cut off", "'one two' overlaps 'three four'"]


def test_a_name_leaves_the_lines_free() -> None:
    """The short line ends where the long one passes."""
    lines = [Line("long", [1, 10, 100], [1.0, 2.0, 3.0], "#000000"), Line("short", [1, 10], [2.0, 2.0], "#000000")]
    figure = charts.figure([Lines("title", "x", "y", lines, from_zero=True)])
    figure.draw_without_rendering()
    (axis,) = figure.axes
    (name,) = (text for text in axis.texts if text.get_text() == "short")
    box = name.get_window_extent()
    for share in range(101):
        x, y = axis.transData.transform((10 ** (share / 50), 1 + share / 50))
        assert not box.contains(x, y)
