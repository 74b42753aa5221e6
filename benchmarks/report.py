"""Makes one page of HTML from the results of the benchmarks, without measuring anything.

    python -m benchmarks.report                          # benchmarks/results/*.json -> report.html
    python -m benchmarks.report --results DIR --page FILE

The page needs no network: its charts are inside. What was not measured is named, with the command
that measures it. A file that registry.toml does not name gets a table of all its numbers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import charts, harness
from benchmarks.registry import BENCHMARKS, Benchmark
from benchmarks.tables import Table, all_numbers, tables
from common.launch.errors import UserError

RUN = "bench"  # the file in which `make bench` says what it ran and what it skipped
INTRODUCTION = """
<p>Each program was measured side by side with what it is compared to, in turns, on one machine. A
ratio is the median of the rounds' ratios. The raw samples are in the JSON files beside this page.
Times on a machine that others use, too, are longer and uneven: look at ratios, and at the load
where it is given.</p>
<p>All of this again: <code>make bench</code>; this page: <code>python -m benchmarks.report</code>
</p>
<h2>Claims</h2>
"""


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    results: Path = Path("benchmarks/results")
    """Folder of the results (.json)."""
    page: Path | None = None
    """The page to write (default: report.html in the folder of the results)."""


def load(folder: Path) -> dict[str, Any]:
    """The results by the name of their file.

    Raises:
        UserError: no such folder, or a file that is not JSON.
    """
    if not folder.is_dir():
        raise UserError(f"--results {folder}: no such folder")
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = json.loads(file.read_text())
        except ValueError as error:
            raise UserError(f"{file} is not JSON ({error}): delete it, or measure again") from None
    return found


def html_table(shown: Table, kinds: Sequence[str] = ()) -> str:
    """A table, of which a narrow screen makes a list."""
    head = "".join(f"<th>{escape(name)}</th>" for name in shown.head)
    rows = ""
    for number, row in enumerate(shown.rows):
        cells = (
            f'<td data-head="{escape(name)}">{escape(text)}</td>'
            for name, text in zip(shown.head, row, strict=True)
        )
        rows += f'<tr class="{kinds[number] if kinds else ""}">{"".join(cells)}</tr>\n'
    caption = f"<caption>{escape(shown.title)}</caption>" if shown.title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>\n"


def html_chart(chart: charts.Chart) -> str:
    """A chart, as a picture within the page."""
    title = escape(chart.title)
    picture = f'<img alt="{title}" src="{charts.picture(chart)}">'
    return f"<figure>{picture}<figcaption>{title}</figcaption></figure>\n"


def all_of(found: Mapping[str, Any]) -> str:
    """Every number of results of any form; of samples the median and the range, and a chart."""
    rest = {k: v for k, v in found.items() if k not in ("date", "machine", "versions")}
    each = list(all_numbers(rest))
    samples = {name: median(values) for name, values in each if len(values) > 1}
    head = ("what", "value or median", "range", "samples")
    rows = []
    for name, values in each:
        spread = f"{min(values):.5g} to {max(values):.5g}" if len(values) > 1 else ""
        rows.append((name, f"{median(values):.5g}", spread, str(len(values))))
    chart = charts.Bars("medians of the samples", "as in the table", samples)
    return (html_chart(chart) if 0 < len(samples) <= 20 else "") + html_table(Table("", head, rows))


def about(found: Mapping[str, Any]) -> str:
    """Where and when something was measured; parts of a result may have been measured apart."""
    if "machine" not in found:
        parts = {name: of for name, of in found.items() if isinstance(of, Mapping)}
        each = (f"{name}: {about(of)}" for name, of in parts.items() if "machine" in of)
        return "; ".join(each) or "not recorded"
    machine = found["machine"]
    words = [str(found.get("date", "date not recorded"))]
    words += [f"{machine['cpu']}, {machine['cores']} core(s)", f"{machine['memory_gib']} GiB"]
    words += [", ".join(machine["gpus"]) or "no GPU"]
    words += [f"{name} {version}" for name, version in found.get("versions", {}).items()]
    if "load_before" in found:
        words.append(f"load of other programs at the start {found['load_before']:.1f}")
    return ", ".join(words)


def shown(results: Mapping[str, Any]) -> list[Benchmark]:
    """The benchmarks of the registry that are in this checkout, or have results."""
    here = {path.stem for path in Path(__file__).parent.glob("*.py")}
    return [one for one in BENCHMARKS if one.module in here or one.result in results]


def claims(results: Mapping[str, Any], known: Sequence[Benchmark]) -> str:
    """The table of all claims: goal, what was measured, and whether that meets it."""
    rows, kinds = [], []
    for benchmark in known:
        for claim in benchmark.claims:
            value = claim.measured(results.get(benchmark.result, {}))
            measured = "-" if value is None else f"{value:.3g} {claim.unit}".strip()
            verdict, kind = ("met", "met") if value is not None else ("not measured", "open")
            if value is not None and not claim.met(value):
                verdict, kind = "NOT met", "missed"
            kinds.append(kind)
            rows.append((claim.text, claim.goal, measured, verdict))
    return html_table(Table("", ("claim", "goal", "measured", "verdict"), rows), kinds)


def without_peer(benchmark: Benchmark, found: Mapping[str, Any]) -> bool:
    """Whether a result, or a part of it, was measured without the peer that belongs there."""
    parts = [part for part in (found, *found.values()) if isinstance(part, Mapping)]
    measured = [part["medians"] for part in parts if "medians" in part]
    return bool(benchmark.peer) and any(benchmark.peer not in one for one in measured)


def section(benchmark: Benchmark, found: Mapping[str, Any] | None) -> str:
    """One benchmark."""
    name = escape(benchmark.result)
    text = (
        f'<section id="{name}"><h2>{escape(benchmark.title or f"{benchmark.result}.json")}</h2>\n'
    )
    if benchmark in BENCHMARKS:
        text += f"<pre>{escape(benchmark.command)}</pre>\n"
    if found is None:
        return f'{text}<p class="open">Not measured: there is no {name}.json.</p></section>\n'
    text += f'<p class="about">{name}.json: {escape(about(found))}</p>\n'
    if without_peer(benchmark, found):
        peer = escape(benchmark.peer)
        text += f"<p>Skipped: the peer {peer}: PEER was not given, or was not there.</p>\n"
    try:
        drawn = [chart for each in benchmark.pictures(found).values() for chart in each]
        pictures = "".join(map(html_chart, drawn))
        listed = "".join(map(html_table, benchmark.tables_of(found)))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        why = escape(repr(error))
        text += f"<p>Not of the form that this report knows ({why}): all its numbers.</p>\n"
        pictures = listed = ""
    words = f"<p>{escape(benchmark.text)}</p>\n" if benchmark.text and pictures else ""
    return text + (pictures + words + listed or all_of(found)) + "</section>\n"


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    results = dict(results)
    run = results.pop(RUN, None)
    known = shown(results)
    style = (Path(__file__).parent / "report.css").read_text()
    text = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Benchmarks</title><style>\n{style}</style></head><body>\n<h1>Benchmarks</h1>",
        INTRODUCTION,
        claims(results, known),
    ]
    if run:
        quick = ": quick, the figures mean nothing" if run["quick"] else ""
        text.append(f'<h2>The last run</h2>\n<p class="about">{escape(about(run))}{quick}</p>\n')
        runs = {one["name"]: {**one, "seconds": round(one["seconds"])} for one in run["runs"]}
        text += map(html_table, tables("", runs))
    text += [section(benchmark, results.get(benchmark.result)) for benchmark in known]
    others = sorted(results.keys() - {benchmark.result for benchmark in known})
    text += [section(Benchmark(name), results[name]) for name in others]
    return "".join(text) + "</body></html>\n"


def write(folder: Path, file: Path | None = None) -> Path:
    """Make the page from a folder of results; returns where it is."""
    file = file or folder / "report.html"
    text = page(load(folder))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def main(args: Args) -> None:
    """Make the page."""
    print(f"report: {write(args.results, args.page)}")


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
