"""Makes one page of HTML from the results of the benchmarks, whichever there are, without measuring anything.

    python -m benchmarks.report                                   # benchmarks/results/*.json -> report.html
    python -m benchmarks.report --results DIR --page FILE

The page needs no network: charts are inside of it, drawn from the samples in the JSON files. What was not
measured is named, with the command that would. A file that `registry.py` does not know gets a table of its numbers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from common.errors import UserError
from common.flags import fail, parse

RUN = "bench"  # the file in which `make bench` says what it ran and what it skipped
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 0 1rem 3rem;
  color: #222; background: #fff }
h1 { line-height: 1.2 } h2 { border-top: 1px solid #ccc; padding-top: 1.2rem; margin-top: 2.5rem }
code, pre { font: 14px/1.4 ui-monospace, monospace; background: #f3f3f3 }
pre { padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere } code, td, th, li, p { overflow-wrap: anywhere }
figure { margin: 1rem 0; display: inline-block; max-width: 100%; vertical-align: top }
figure img { width: 28rem; max-width: 100%; height: auto } figcaption { font-size: 14px; color: #555 }
table { border-collapse: collapse; width: 100%; font-size: 15px; margin: .5rem 0 1rem }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #ddd }
caption { text-align: left; font-weight: 600 } .met { color: #00664c } .missed { color: #a33b00 } .open { color: #666 }
.about { font-size: 14px; color: #555 }
@media (max-width: 40rem) {
  thead { display: none } table, tbody, tr, td, caption { display: block }
  tr { border-bottom: 1px solid #ccc; padding: .4rem 0 } td { border: 0; padding: 0 }
  td[data-head]:not([data-head=""])::before { content: attr(data-head) ": "; color: #555 }
  td:first-child { font-weight: 600 }
}
"""


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    results: Path = Path("benchmarks/results")
    """Folder of the results (.json)."""
    page: Path | None = None
    """The page to write (default: report.html in the folder of the results)."""


if __name__ == "__main__":
    args = parse(Args, description=__doc__)

from benchmarks import charts
from benchmarks.registry import BENCHMARKS, Benchmark, Table, View


def load(folder: Path) -> dict[str, Any]:
    """The results by the name of their file.

    Raises:
        UserError: no such folder, or a file that is no JSON.
    """
    if not folder.is_dir():
        raise UserError(f"--results {folder}: no such folder")
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = json.loads(file.read_text())
        except ValueError as error:
            raise UserError(f"{file} is no JSON ({error}): delete it, or measure again") from None
    return found


def numbers(found: Any, path: str = "") -> Iterator[tuple[str, list[float]]]:
    """All numbers and lists of numbers in a result, each with the way to it."""
    if isinstance(found, Mapping):
        for name, value in found.items():
            yield from numbers(value, f"{path} / {name}" if path else str(name))
    elif isinstance(found, list) and found and not all(isinstance(one, int | float) for one in found):
        for number, value in enumerate(found):
            yield from numbers(value, f"{path} / {number}")
    elif isinstance(found, list) and found:
        yield path, [float(one) for one in found]
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield path, [float(found)]


def any_view(found: Mapping[str, Any]) -> View:
    """What can be shown of results of any form: each number; of samples the median and the range, and a chart."""
    rest = {name: value for name, value in found.items() if name not in ("date", "machine", "versions")}
    each = list(numbers(rest))
    samples = {name: median(values) for name, values in each if len(values) > 1}
    rows = [
        (
            name,
            f"{median(values):.5g}",
            f"{min(values):.5g} to {max(values):.5g}" if len(values) > 1 else "",
            str(len(values)),
        )
        for name, values in each
    ]
    drawn = [("medians of the samples", charts.bars(samples, "as in the table"))] if 0 < len(samples) <= 20 else []
    return View(drawn, [Table("", ("what", "value or median", "range", "samples"), rows)])


def table(shown: Table, kinds: Sequence[str] = ()) -> str:
    """HTML of a table, of which a narrow screen makes a list."""
    head = "".join(f"<th>{escape(name)}</th>" for name in shown.head)
    rows = "".join(
        f'<tr class="{kinds[number] if kinds else ""}">'
        + "".join(
            f'<td data-head="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(shown.head, row, strict=True)
        )
        + "</tr>\n"
        for number, row in enumerate(shown.rows)
    )
    caption = f"<caption>{escape(shown.title)}</caption>" if shown.title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>\n"


def about(found: Mapping[str, Any], whole: bool = True) -> str:
    """Where and when something was measured, in a line; parts of a result may have been measured apart."""
    if "machine" not in found:
        parts = {part: value for part, value in found.items() if isinstance(value, Mapping) and "machine" in value}
        return "; ".join(f"{part}: {about(value, whole)}" for part, value in parts.items()) or "not recorded"
    machine = found["machine"]
    words = [str(found.get("date", "date not recorded")), f"{machine['cpu']}, {machine['cores']} core(s)"]
    words += [f"{machine['memory_gib']} GiB", ", ".join(machine["gpus"]) or "no GPU"]
    if whole:
        words += [", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items())]
    if "load_before" in found:
        words.append(f"load of other programs at the start {found['load_before']:.1f}")
    return ", ".join(words)


def shown(results: Mapping[str, Any]) -> list[Benchmark]:
    """The benchmarks of the registry that are in this checkout, or have results."""
    here = {path.stem for path in Path(__file__).parent.glob("*.py")}
    return [benchmark for benchmark in BENCHMARKS if benchmark.module in here or benchmark.result in results]


def claims(results: Mapping[str, Any], known: Sequence[Benchmark]) -> str:
    """The table of all claims: goal, what was measured, and whether that meets it."""
    rows, kinds = [], []
    for benchmark in known:
        for claim in benchmark.claims:
            found = results.get(benchmark.result)
            value = None if found is None else claim.measured(found)
            goal = f"{'at most' if claim.most else 'at least'} {claim.goal:g} {claim.unit}".strip()
            verdict = "not measured" if value is None else "met" if claim.met(value) else "NOT met"
            kinds.append({"met": "met", "NOT met": "missed"}.get(verdict, "open"))
            rows.append((claim.text, goal, "-" if value is None else f"{value:.3g} {claim.unit}".strip(), verdict))
    return table(Table("", ("claim", "goal", "measured", "verdict"), rows), kinds)


def without_peer(benchmark: Benchmark, found: Mapping[str, Any]) -> bool:
    """Whether a result, or a part of it, was measured without the peer that belongs there."""
    parts = [found, *(part for part in found.values() if isinstance(part, Mapping))]
    return bool(benchmark.peer) and any(benchmark.peer not in part["medians"] for part in parts if "medians" in part)


def section(name: str, benchmark: Benchmark | None, found: Mapping[str, Any] | None) -> str:
    """One benchmark."""
    title = benchmark.title if benchmark else f"{name}.json"
    command = f"<pre>{escape(benchmark.command)}</pre>\n" if benchmark else ""
    text = [f'<section id="{escape(name)}"><h2>{escape(title)}</h2>\n{command}']
    if found is None:
        return f'{text[0]}<p class="open">Not measured: there is no {escape(name)}.json.</p></section>\n'
    text.append(f'<p class="about">{escape(name)}.json: {escape(about(found))}</p>\n')
    if benchmark and without_peer(benchmark, found):
        text.append(f"<p>Skipped: the peer {escape(benchmark.peer)}: PEER was not given, or was not there.</p>\n")
    view = None
    if benchmark and benchmark.view:
        try:
            view = benchmark.view(found)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            text.append(f"<p>Not of the form that this report knows ({escape(repr(error))}): all its numbers.</p>\n")
    view = view or any_view(found)
    for caption, figure in view.charts:
        text.append(f'<figure><img alt="{escape(caption)}" src="{charts.picture(figure)}">'
                    f"<figcaption>{escape(caption)}</figcaption></figure>\n")  # fmt: skip
    text += [f"<p>{escape(line)}</p>\n" for line in view.text.splitlines()]
    text += [table(one) for one in view.tables]
    return "".join(text) + "</section>\n"


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    results = dict(results)
    run = results.pop(RUN, None)
    known = shown(results)
    names = {benchmark.result: benchmark for benchmark in known}
    text = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Benchmarks</title><style>{STYLE}</style></head><body>\n<h1>Benchmarks</h1>\n",
        "<p>Each program was measured side by side with what it is compared to, in turns, on one machine. A ratio is "
        "the median of the rounds' ratios. The raw samples are in the JSON files beside this page. Times on a "
        "machine that others use, too, are longer and uneven: look at ratios, and at the load where it is given.</p>\n"
        "<p>All of this again: <code>make bench</code>; this page: <code>python -m benchmarks.report</code></p>\n",
        "<h2>Claims</h2>\n", claims(results, known),
    ]  # fmt: skip
    if run:
        rows = [(one["name"], one["state"], one["why"], one["command"], f"{one['seconds']:.0f}") for one in run["runs"]]
        quick = ": quick, the figures mean nothing" if run["quick"] else ""
        text += [f'<h2>The last run</h2>\n<p class="about">{escape(about(run))}{quick}</p>\n',
                 table(Table("", ("benchmark", "state", "why", "command", "seconds"), rows))]  # fmt: skip
    for name, benchmark in names.items():
        text.append(section(name, benchmark, results.get(name)))
    for name in sorted(results.keys() - names.keys()):
        text.append(section(name, None, results[name]))
    return "".join(text) + "</body></html>\n"


def write(folder: Path, file: Path | None = None) -> Path:
    """Make the page from a folder of results; returns where it is."""
    file = file or folder / "report.html"
    text = page(load(folder))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


if __name__ == "__main__":
    try:
        print(f"report: {write(args.results, args.page)}")
    except UserError as mistake:
        fail(mistake)
