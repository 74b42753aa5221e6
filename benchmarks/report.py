"""Makes one page of HTML from the results of the benchmarks, without measuring anything.

    python -m benchmarks.report                          # benchmarks/results/*.json -> report.html
    python -m benchmarks.report --results DIR --page FILE

The page needs no network: its charts are inside. What was not measured is named, with the command
that measures it. A file that registry.toml does not name gets a table of all its numbers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from benchmarks import harness
from benchmarks.charts import Bars, Chart, picture
from benchmarks.inputs import inputs
from benchmarks.registry import BENCHMARKS, Benchmark
from benchmarks.tables import Table, all_numbers, cores_of, filled, measured, tables
from common.launch.errors import UserError

HERE = Path(__file__).parent
RUN = "bench"  # the file in which `make bench` says what it ran and what it skipped


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    results: Path = Path("benchmarks/results")
    """Folder of the results (.json)."""
    page: Path | None = None
    """The page to write (default: report.html in the folder of the results)."""


@dataclass(frozen=True)
class Shown:
    """What the page shows of a result; `unknown` says why, if that is only a list of numbers."""

    charts: Sequence[Chart]
    tables: Sequence[Table]
    unknown: str = ""


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


def shown_of(benchmark: Benchmark, found: Mapping[str, Any]) -> Shown:
    """The charts and tables of a result; if it has none, all its numbers."""
    try:
        charts = [chart for each in benchmark.pictures(found).values() for chart in each]
        listed = benchmark.tables_of(found)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return all_of(found, unknown=repr(error))
    return Shown(charts, listed) if charts or listed else all_of(found)


def all_of(found: Mapping[str, Any], unknown: str = "") -> Shown:
    """Every number of results of any form; of samples the median and the range, and a chart."""
    rest = {k: v for k, v in found.items() if k not in ("date", "machine", "versions")}
    rows, samples = [], {}
    for name, values in all_numbers(rest):
        spread = ""
        if len(values) > 1:
            spread, samples[name] = f"{min(values):.5g} to {max(values):.5g}", median(values)
        rows.append((name, f"{median(values):.5g}", spread, str(len(values))))
    charts = [Bars("medians of the samples", "as in the table", samples)]
    table = filled("", ("what", "value or median", "range", "samples"), rows)
    return Shown(charts if 0 < len(samples) <= 20 else [], [table], unknown)


def about(found: Mapping[str, Any]) -> str:
    """Where and when something was measured; parts of a result may have been measured apart."""
    texts = []
    for name, part in measured(found).items():
        machine = part["machine"]
        words = [str(part.get("date", "date not recorded")).partition("T")[0]]
        words += [machine["cpu"], *cores_of(machine)]
        if machine["cores"]:
            words += [f"{machine['memory_gib']} GiB", ", ".join(machine["gpus"]) or "no GPU"]
        words += [f"{package} {version}" for package, version in part.get("versions", {}).items()]
        if "load_before" in part:
            words.append(f"load of other programs at the start {part['load_before']:.1f}")
        texts.append(f"{name}: {', '.join(words)}" if name else ", ".join(words))
    return "; ".join(texts) or "not recorded"


def without_peer(benchmark: Benchmark, found: Mapping[str, Any]) -> bool:
    """Whether a result, or a part of it, was measured without the peer that belongs there."""
    compared = [part["medians"] for part in measured(found).values() if "medians" in part]
    return bool(benchmark.peer) and any(benchmark.peer not in one for one in compared)


def shown(results: Mapping[str, Any]) -> list[Benchmark]:
    """The benchmarks of the registry that are in this checkout, or have results."""
    here = {path.stem for path in HERE.glob("*.py")}
    return [one for one in BENCHMARKS if one.module in here or one.result in results]


def claims(results: Mapping[str, Any], known: Sequence[Benchmark]) -> Table:
    """The table of all claims: goal, what was measured, and whether that meets it."""
    rows = []
    for benchmark in known:
        for claim in benchmark.claims:
            value = claim.measured(results.get(benchmark.result, {}))
            if value is None:
                rows.append((benchmark.result, claim.text, claim.aim, "-", "not measured"))
            else:
                verdict = "met" if claim.met(value) else "NOT met"
                rows.append((benchmark.result, claim.text, claim.aim, claim.told(value), verdict))
    return Table("", ("result", "claim", "goal", "measured", "verdict"), rows)


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    results = dict(results)
    run = results.pop(RUN, None)
    known = shown(results)
    others = sorted(results.keys() - {benchmark.result for benchmark in known})
    sections = []
    for benchmark in [*known, *map(Benchmark, others)]:
        found = results.get(benchmark.result)
        sections.append((benchmark, found, shown_of(benchmark, found or {})))
    rows = [{**one, "seconds": round(one["seconds"])} for one in run["runs"]] if run else []
    loader = jinja2.FileSystemLoader(HERE)
    page = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return page.get_template("report.html.jinja").render(
        style=(HERE / "report.css").read_text(),
        claims=claims(results, known),
        inputs=inputs(results),
        run=run,
        runs=tables("", {row.pop("name"): row for row in rows}),
        sections=sections,
        benchmarks=BENCHMARKS,
        about=about,
        picture=picture,
        without_peer=without_peer,
    )


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
