"""benchmarks/README.md from the results: the claims and the charts, for readers on a code host.

python -m benchmarks.readme
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import charts
from benchmarks.inputs import OF_IMAGES, inputs
from benchmarks.registry import Benchmark
from benchmarks.report import RUN, about, claims, load, shown
from benchmarks.tables import machines, measured

HERE = Path(__file__).parent
IMAGES_OF_PAGES = HERE.parent / "docs" / "images"
HEAD = """# Benchmarks

Each program was measured side by side with what it is compared to, in turns, on the machine that
its section names. A ratio is the median of the rounds' ratios, so it may differ from the ratio of
the medians. The raw samples are in the JSON files; [the report](results/report.html) has all
tables, and opens from the disk. `make bench` measures again; `make report` makes this page and the
report from the results.

"""


def cells(row: Sequence[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n"


def section(benchmark: Benchmark, found: Mapping[str, Any]) -> str:
    """One result: where, when and on what it was measured, its charts, and the command."""
    name = f"{benchmark.result}.json"
    lines = [f"## {benchmark.title}\n", f"[{name}](results/{name}): {about(found)}.\n"]
    images = [
        part["images"] for part in measured(found).values() if isinstance(part.get("images"), dict)
    ]
    lines += [f"Measured on {OF_IMAGES.format_map(one)}.\n" for one in images]
    for stem, drawn in benchmark.pictures(found).items():
        if (HERE / "results" / f"{stem}.png").exists():
            titles = "; ".join(chart.title for chart in drawn)
            lines.append(f"![{titles}](results/{stem}.png)\n")
    lines += [f"{benchmark.text}\n"] * bool(benchmark.text)
    return "\n".join([*lines, f"    {benchmark.command}\n"])


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    results = {name: found for name, found in results.items() if name != RUN}
    known = shown(results)
    table = claims(results, known)
    text = HEAD + cells(table.head) + "|---" * len(table.head) + "|\n"
    text += "".join(map(cells, table.rows))
    given = inputs(results)
    text += '\n## Inputs\n\nWhat each figure was measured on; "-" means not recorded.\n\n'
    text += cells(given.head) + "|---" * len(given.head) + "|\n" + "".join(map(cells, given.rows))
    parts = [section(one, results[one.result]) for one in known if one.result in results]
    return "\n".join([text, *parts])


def draw(results: Mapping[str, Any]) -> None:
    """The charts of the README files anew, from the results alone."""
    for one in shown(results):
        if found := results.get(one.result):
            for stem, drawn in one.pictures(found).items():
                file = IMAGES_OF_PAGES / f"{stem}.png"
                file = file if file.exists() else HERE / "results" / f"{stem}.png"
                charts.save(file, drawn, f"{one.title}\n{machines(found)}")


def main() -> None:
    """Write the page, and the charts that it and others show."""
    draw(load(HERE / "results"))
    (HERE / "README.md").write_text(page(load(HERE / "results")), encoding="utf-8")


if __name__ == "__main__":
    main()
