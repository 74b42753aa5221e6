"""Write benchmarks/README.md, and a chart per result, from the result files.

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

Each program of this folder compares ours with a peer in one run: `python -m benchmarks.NAME`, or
with `--quick` to see that it works. Programs run in turn; figures are medians of the rounds, and
ratios are taken within a round. The result files have every sample. `python -m benchmarks.report`
writes this page.

Results of an earlier, larger version (revision `acc0cf5`) are in results/ as well; their programs
were deleted, and [the scale page](../docs/en/scale.md) quotes some of them.

"""


def load() -> dict[str, dict[str, Any]]:
    """Return the results with claims, by name."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: result for name, result in found.items() if "claims" in result}


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page: a table of claims, then the medians and inputs of each benchmark."""
    text = (
        HEAD + "## Claims\n\n| claim | measured | floor | holds | result |\n|---|---|---|---|---|\n"
    )
    for name, result in results.items():
        for claim in result["claims"]:
            measured = f"{claim['value']:.3g} {claim['unit']}"
            verdict = "yes" if claim["holds"] else "**no**"
            link = f"[{name}](results/{name}.json)"
            text += f"| {claim['text']} | {measured} | {claim['floor']:g} | {verdict} | {link} |\n"
    for name, result in results.items():
        machine, versions = result["machine"], result["versions"]
        text += (
            f"\n## {name}\n\n{result['date'][:10]}, revision `{result['revision']}`, "
            f"{machine['cpu']}, {machine['cores']} cores, torch {versions['torch']}, "
            f"{result['rounds']} rounds.\n\n| program | median, {result['unit']} |\n|---|---|\n"
        )
        text += "".join(f"| {key} | {value:.4g} |\n" for key, value in result["medians"].items())
        text += f"\n![medians of the programs](results/{name}.png)\n"
    return text


def chart(result: dict[str, Any], path: Path) -> None:
    """Draw the medians of a result as bars, and its samples as dots."""
    names = list(result["medians"])
    figure = Figure((7.5, 0.8 + 0.4 * len(names)), dpi=110)
    axes = figure.subplots()
    axes.barh(names, [result["medians"][name] for name in names], color="#0b5cad", height=0.6)
    for row, name in enumerate(names):
        values = result["samples"][name]
        axes.plot(values, [row] * len(values), "o", color="black", markersize=3)
    axes.invert_yaxis()
    axes.set_xlabel(f"{result['unit']}, median of {result['rounds']} rounds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    results = load()
    (RESULTS.parent / "README.md").write_text(page(results))
    for name, result in results.items():
        chart(result, RESULTS / f"{name}.png")
