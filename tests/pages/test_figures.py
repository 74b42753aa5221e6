"""Figures in pages are those of the results that they link to; figures.toml lists them."""

import json
import re
import tomllib
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report

ROOT = Path(__file__).parents[2]
FIGURES = tomllib.loads(Path(__file__).with_name("figures.toml").read_text())
QUOTES = [(page, result) for page, results in FIGURES.items() for result in results]


def sections(page: Path, result: str) -> str:
    """Return the rows of tables that link to a result; or the sections that do."""
    link, text = f"benchmarks/results/{result}.json)", page.read_text()
    rows = [line for line in text.splitlines() if line.startswith("|") and link in line]
    return "\n".join(rows or [part for part in text.split("\n## ") if link in part])


def item(part: Any, key: str) -> Any:
    return part[int(key)] if isinstance(part, list) else part[key]


@pytest.mark.parametrize(("page", "result"), QUOTES, ids=str)
def test_figures_are_those_of_the_result(page: str, result: str) -> None:
    content = json.loads((ROOT / f"benchmarks/results/{result}.json").read_text())
    figures = dict(FIGURES[page][result])
    scale = figures.pop("scale", 1)
    chinese = page.replace("/en/", "/zh/").replace("README.md", "README.zh-CN.md")
    texts = [sections(ROOT / path, result) for path in (page, chinese)]
    for figure, places in figures.items():
        whole = rf"(?<![\d.,]){re.escape(figure)}(?![.,]?\d)"
        assert all(re.search(whole, text) for text in texts), figure
        half = 0.5 / 10 ** len(figure.partition(".")[2])  # of the last decimal place
        for place in places:
            value = scale * reduce(item, place.split("|"), content)
            assert value == pytest.approx(float(figure.replace(",", "")), abs=1.001 * half), place


def test_all_quoted_results_are_listed() -> None:
    quoted = set()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/en/*.md"), *ROOT.glob("examples/*/*.md")]:
        if "zh-CN" not in page.name:
            found = re.findall(r"benchmarks/results/([\w/]+)\.json\)", page.read_text())
            quoted |= {(str(page.relative_to(ROOT)), result) for result in found}
    assert quoted == set(QUOTES)


def test_page_of_benchmarks_is_written_from_the_results() -> None:
    assert (ROOT / "benchmarks/README.md").read_text() == report.page(report.load())
