"""Numbers beside a link to a result are those of its JSON; machine and inputs, too."""

import calendar
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path as File
from statistics import median
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.docs.markdown import translations

Way = tuple[str, ...]
Leaf = tuple[Way, float]
RESULTS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))}
PAGES = [page for pair in translations() for page in pair]
CHARTS = {
    "allreduce_step": "allreduce",
    "bert_dataparallel": "bert_throughput",
    "scaling_exchange": "scaling",
}  # the others have the name of their result
RAW = ("samples", "lines")  # what no page quotes; their medians stand beside them
MONTHS = list(calendar.month_name)
NUMBER = re.compile(r"(?<![A-Za-z0-9_.,-])(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(?= ?([^\W\d_]+|%|µs)?)")
FACTORS = {"ms": 1e3, "µs": 1e6, "%": 100, "KiB": 2**-10, "MiB": 2**-20, "GB": 1e-9, "MB": 1e-6}


def leaves(found: Any, path: Way = ()) -> Iterator[Leaf]:
    """The numbers of a result with the ways to them; of a list of numbers the median, and of a short one each."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name not in RAW or isinstance(value, int | float):
                key, _, count = name.rpartition(" ")  # "hand 1f1b 4"
                yield from leaves(value, (*path, *((key, count) if key and count.isdigit() else (name, ""))))
    elif isinstance(found, list):
        numbers = [value for value in found if type(value) in (int, float)]
        if len(numbers) > 1:
            yield path, median(numbers)
        for number, value in enumerate(found if len(found) < 10 else ()):
            yield from leaves(value, (*path, str(number)))
    elif type(found) in (int, float):
        yield path, float(found)


def inputs(found: Any) -> set[float]:
    """The numbers in the names and words of a result: "-b 32", "padded to 128", a batch."""
    if isinstance(found, dict):
        return set().union(*map(inputs, found), *map(inputs, found.values()))
    return {
        float(number)
        for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", found if isinstance(found, str) else "")
    }


def fits(token: str, unit: str, values: Iterable[float]) -> bool:
    """Whether one of the values is shown so, rounded as the number is, in its unit."""
    shown = float(token.replace(",", ""))
    step = 10.0 ** -len(token.partition(".")[2]) if "e" not in token else shown / float(token.partition("e")[0])
    factors = [1.0, FACTORS.get(unit, 1.0)] + ([1 / 1024] if unit == "GiB" else [])
    return any(abs(value * factor - shown) <= 0.5001 * step for value in values for factor in factors)


def groups(found: list[Leaf]) -> list[list[float]]:
    """The values whose ways differ in one name only: a record, or one figure of several records."""
    together: dict[tuple[int, Way], list[float]] = {}
    for path, value in found:
        for place in range(len(path)):
            together.setdefault((place, (*path[:place], "*", *path[place + 1 :])), []).append(value)
    return list(together.values())


def plain(text: str) -> str:
    """Words without code, targets of links, comments and names with numbers."""
    text = re.sub(r"```.*?```|<!--.*?-->|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[.*?\]\(.*?\)|\]\([^)]*\)|`[^`]*`", " ", text)
    return re.sub(r"\b\d+F\d+B\b|\btorch \d[\d.]*|[Pp]ython \d[\d.]*|\d+x\d+", "", text)  # sizes: `circumstances`


def named(text: str) -> list[str]:
    """The results that a text links to, or names: by their file, or by a chart of it."""
    stems = re.findall(r"benchmarks/results/(\w+)\.(?:json|png)", text)
    return [one for one in dict.fromkeys(CHARTS.get(stem, stem) for stem in stems) if one in RESULTS]


def units(page: File, text: str) -> Iterator[tuple[str, str, list[str]]]:
    """What cites results: in the page of an example a section; elsewhere a row or a paragraph. With its section."""
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        if page.parent.parent.name == "examples":
            if names := named(section):
                yield section, section, names
            continue
        for block in re.split(r"\n\s*\n", section):
            parts = block.splitlines() if block.startswith("|") else [block]
            yield from ((part, section, named(part)) for part in parts if named(part))


def numbers(line: str) -> list[tuple[str, str]]:
    """The numbers of a line with their units; a row says its unit in the first cell, too. "2 processes" is none."""
    head = re.match(r"\|[^|]*[,，] ?(ms|s) *\|", line)
    found = [(match[1].rstrip(","), match[2] or "") for match in NUMBER.finditer(plain(line))]
    return [(token, head[1] if head and not word else word) for token, word in found if len(token) > 1]


def unknown(line: str, results: list[Any]) -> list[str]:
    """The numbers of a line that none of the results has. Those of a row are of one record, or of one kind."""
    found = [leaf for result in results for leaf in leaves(result)]
    values = [value for _, value in found] + [value for result in results for value in inputs(result)]
    wrong = [f"{token} {word}".strip() for token, word in numbers(line) if not fits(token, word, values)]
    if wrong or not line.startswith("|") or re.search(r"benchmarks/results", line):
        return wrong
    cells = numbers(line)[len(numbers(line[: line.index("|", 1) + 1])) :]
    if all(fits(token, word, [value for result in results for value in inputs(result)]) for token, word in cells):
        return []  # the head of a table
    whole = any(all(fits(token, word, group) for token, word in cells) for group in groups(found))
    return [] if whole else [f"not of one record: {line}"]


def dates(text: str) -> set[str]:
    """The days that a text writes down, in ISO's form."""
    named = re.findall(rf"(\d{{1,2}}) ({'|'.join(MONTHS[1:])}) (\d{{4}})", text)
    found = [(year, MONTHS.index(month), day) for day, month, year in named]
    found += re.findall(r"(\d{4})(?: 年 ?|-)(\d{1,2})(?: 月 ?|-)(\d{1,2})", text)
    return {f"{year}-{int(month):02}-{int(day):02}" for year, month, day in found}


def measured_on(result: Any) -> set[str]:
    """The days on which a result, or its parts, was measured."""
    parts = [result, *(part for part in result.values() if isinstance(part, dict))]
    return {part["date"][:10] for part in parts if "date" in part}


def wrong(page: File, text: str) -> list[str]:
    """The numbers of a page that no linked result has, and machines and inputs that it does not name."""
    days = set().union(*(measured_on(RESULTS[name]) for name in named(text)))
    found = [f"nothing here was measured on {day}" for day in sorted(dates(plain(text)) - days) if days]
    for unit, section, names in units(page, text):
        results = [RESULTS[name] for name in names]
        found += [f"{names}: {each}" for line in plain_lines(unit) for each in unknown(line, results)]
        cites = any(numbers(line) for line in plain_lines(unit))
        for name in names if cites else ():
            found += [f"{name}: does not name {missing}" for missing in circumstances(name, unit, section)]
    return found


def plain_lines(unit: str) -> list[str]:
    """The lines of a text without its code."""
    return re.sub(r"```.*?```|<!--.*?-->", "", unit, flags=re.DOTALL).splitlines()


def circumstances(name: str, unit: str, section: str) -> list[str]:
    """What a text has to say of a result and does not: the processor or GPU, and the size of images."""
    result, found = RESULTS[name], []
    parts = [result, *(part for part in result.values() if isinstance(part, dict))]
    for machine in [part["machine"] for part in parts if "machine" in part]:
        found += [maker for maker in ("AMD", "Intel") if maker in machine["cpu"] and maker not in section]
        found += [gpu for gpu in machine["gpus"] if gpu.split()[-1] not in section]
    images = result.get("input", {}).get("images")
    speeds = [value for _, value in leaves(result.get("input", {}).get("medians"))]
    if images and any(fits(token, "", speeds) for line in unit.splitlines() for token, _ in numbers(line)):
        size = f"{images['median_width']:.0f}x{images['median_height']:.0f}"
        found += [words for words in (f"{images['count']:,}", size) if words not in section]
    return sorted(set(found))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_numbers_are_those_of_the_results(page: File) -> None:
    assert wrong(page, page.read_text()) == []


def test_a_changed_digit_is_seen() -> None:
    """Each number of each page, its last digit changed: five of six are seen; on the first page all."""
    seen, missed = 0, dict[str, list[str]]()
    for page in PAGES:
        for unit, _, names in units(page, page.read_text()):
            for line in plain_lines(unit):
                for token, word in numbers(line):
                    other = token[:-1] + str((int(token[-1]) + 3) % 10)
                    changed = re.sub(rf"(?<![\d.,]){re.escape(token)}(?![\d.,]*\d)", other, line)
                    if changed == line or unknown(changed, [RESULTS[name] for name in names]):
                        seen += 1
                    else:
                        missed.setdefault(str(page.relative_to(ROOT)), []).append(f"{token} {word} -> {other}")
    assert seen > 200
    assert sum(map(len, missed.values())) < 0.2 * seen, missed
    assert not missed.keys() & {"README.md", "README.zh-CN.md"}


def test_another_machine_and_other_images_are_seen() -> None:
    page = ROOT / "examples/imagenet_ddp/README.md"
    text = page.read_text()
    assert wrong(page, text) == []
    measured = ("lost_ranks_imagenet", "pixels", "imagenet_throughput")
    assert wrong(page, text.replace("Intel", "AMD")) == [f"{result}: does not name Intel" for result in measured]
    drawn = text.replace("215", "1,000").replace("500x375", "224x224")
    assert "imagenet_throughput: does not name 215" in wrong(page, drawn)


@pytest.mark.parametrize(
    ("page", "true", "planted"),
    [
        ("README.md", "5.3 s", "5.9 s"),
        ("README.zh-CN.md", "5.3", "5.9"),
        ("docs/en/comparison.md", "3,949", "3,849"),
        ("docs/zh/comparison.md", "3,949", "3,849"),
        ("docs/en/comparison.md", "500x375", "501x375"),
        ("docs/zh/comparison.md", "500x375", "501x375"),
        ("docs/en/comparison.md", "215 ", "225 "),
        ("docs/zh/comparison.md", "215 ", "225 "),
        ("docs/en/comparison.md", "27 November 2026", "28 November 2026"),
        ("docs/zh/comparison.md", "11 月 27 日", "11 月 28 日"),
        ("examples/imagenet_ddp/README.md", "500x375", "501x375"),
        ("examples/imagenet_ddp/README.zh-CN.md", "500x375", "501x375"),
    ],
)
def test_a_changed_value_size_count_or_date_is_seen(page: str, true: str, planted: str) -> None:
    text = (ROOT / page).read_text()
    assert true in text
    assert wrong(ROOT / page, text.replace(true, planted)) != []
