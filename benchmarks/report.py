"""Write benchmarks/README.md and its charts from the result files.

python -m benchmarks.report
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.figure import Figure

from benchmarks.harness import RESULTS

HEAD = """# Benchmarks

Each program of this folder compares this project with a baseline in one run:

```sh
python -m benchmarks.NAME             # measures, and writes results/NAME.json
python -m benchmarks.NAME --quick     # shows that it works; writes nothing
python -m benchmarks.report           # writes this page and its charts from the result files
```

mnist, imagenet and bert need data, in the folder `--data`. mnist also needs `--peer`, a checkout of
[pytorch/examples](https://github.com/pytorch/examples); the other programs contain the recipe that
they compare with.

Programs run in turn. Figures are medians of the rounds, and ratios are taken within a round. The
result files have every sample.

Other files in results/ are from an earlier, larger version (revision `acc0cf5`), whose programs
were deleted. [Scale](../docs/en/scale.md) and [Faults](../docs/en/faults.md) quote them.
"""


def load() -> dict[str, dict[str, Any]]:
    """Return the results of the current version by name."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: result for name, result in found.items() if "tables" in result}


def claims(results: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table of all claims."""
    rows = [
        "| claim | measured | required | holds | result, revision, day |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        place = f"[{name}](results/{name}.json), `{result['revision']}`, {result['date'][:10]}"
        for claim in result["claims"]:
            limit = f"{'at most' if claim['at_most'] else 'at least'} {claim['bound']:g}"
            verdict = "yes" if claim["holds"] else "**no**"
            measured = f"{claim['value']:.3g} {claim['unit']}"
            rows.append(f"| {claim['text']} | {measured} | {limit} | {verdict} | {place} |")
    return "\n".join(rows) + "\n"


def section(name: str, result: dict[str, Any]) -> str:
    """Return the section of a benchmark: its inputs, the machine and the medians."""
    machine, versions = result["machine"], result["versions"]
    inputs = "; ".join(f"{key}: {value}" for key, value in result["inputs"].items())
    facts = [
        f"`python -m benchmarks.{name.replace('_', ' --device ')}`",
        result["date"][:10],
        f"revision `{result['revision']}`",
        *(f"{key.replace('_', ' ')}: {value}" for key, value in machine.items()),
        *(f"{key} {value}" for key, value in versions.items()),
    ]
    text = f"\n## {name}\n\n{', '.join(facts)}.\n\nInputs: {inputs}.\n"
    for title, table in result["tables"].items():
        rounds = len(next(iter(table["samples"].values())))
        text += f"\n| {title} | {table['unit']}, median of {rounds} |\n|---|---|\n"
        text += "".join(f"| {key} | {value:.4g} |\n" for key, value in table["medians"].items())
    return text + f"\n![medians and samples](results/{name}.png)\n"


def draw_tables(tables: dict[str, Any], path: Path) -> None:
    """Draw one chart per table, with medians as bars and samples as dots."""
    rows = [len(table["medians"]) for table in tables.values()]
    figure = Figure((7.5, 0.4 * sum(rows) + 0.9 * len(rows)), dpi=110, layout="constrained")
    grid = figure.subplots(len(rows), squeeze=False, height_ratios=[n + 1 for n in rows])
    for axes, (title, table) in zip(grid[:, 0], tables.items(), strict=True):
        axes.barh(list(table["medians"]), table["medians"].values(), color="#0b5cad", height=0.6)
        for row, name in enumerate(table["medians"]):
            values = table["samples"][name]
            axes.plot(values, [row] * len(values), "o", color="black", markersize=3)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel(table["unit"])
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_curves(curves: dict[str, list[float]], path: Path) -> None:
    """Plot losses over steps; later curves are thinner, so that identical curves remain visible."""
    figure = Figure((7.5, 3.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    colors = ("#f0b84b", "#0b5cad", "black")
    for number, (name, losses) in enumerate(curves.items()):
        width = 2 * (len(curves) - number)
        axes.plot(losses, label=name, linewidth=width, color=colors[number % len(colors)])
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page, which contains the claims and a section per benchmark."""
    sections = "".join(section(name, result) for name, result in results.items())
    return f"{HEAD}\n## Claims\n\n{claims(results)}{sections}"


if __name__ == "__main__":
    results = load()
    (RESULTS.parent / "README.md").write_text(page(results))
    for name, result in results.items():
        draw_tables(result["tables"], RESULTS / f"{name}.png")
        if "curves" in result:  # shown in the main README
            draw_curves(result["curves"], RESULTS / "same_training.png")
