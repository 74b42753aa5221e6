"""Tables of results, generated from the JSON: any mapping of mappings is one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table: its rows have as many cells as its head."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        """In aligned columns."""
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cells = (
            (one.ljust(width) for one, width in zip(line, widths, strict=True)) for line in lines
        )
        return "\n".join([self.title, *(f"  {'  '.join(line)}".rstrip() for line in cells)])


def numbers(value: Any) -> list[float]:
    """The samples that a value consists of; none if it is anything else than numbers."""
    values = value if isinstance(value, list) else [value]
    ours = all(type(one) in (int, float) for one in values)
    return [float(one) for one in values] if ours else []


def cell(value: Any) -> str:
    """A value as a table shows it; of more than four samples the median and the range."""
    samples = numbers(value)
    if len(samples) > 4:
        return f"{median(samples):.4g} ({min(samples):.4g} to {max(samples):.4g})"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(map(cell, value)) or "-"
    if samples:
        return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"
    return "-" if value is None else str(value)


def filled(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the columns in which no row says anything."""
    said = [place for place in range(len(head)) if {row[place] for row in rows} - {"", "-"}]
    return Table(title, [head[one] for one in said], [[row[one] for one in said] for row in rows])


def table(title: str, rows: Mapping[str, Any]) -> Table:
    """A row per key, a column per key within."""
    within = {name: of if isinstance(of, Mapping) else {"": of} for name, of in rows.items()}
    columns = list(dict.fromkeys(chain(*within.values())))
    cells = [(name, *(cell(of.get(one)) for one in columns)) for name, of in within.items()]
    return filled(title, ("", *map(in_words, columns)), cells)


def in_words(name: str) -> str:
    """A key of the JSON as the head of a column."""
    return name.replace("peer_ratio", "times as fast as the peer").replace("_", " ")


def find(found: Any, path: Sequence[str]) -> Any:
    """Follow a path of keys into the JSON; None where a key is missing.

    The key (last) selects the last one there is. The key * selects all: the result is a mapping
    from each of them to what is found there.
    """
    if not path or found is None:
        return found
    if not isinstance(found, Mapping):
        return None
    if path[0] == "(last)":
        return find(list(found.values())[-1], path[1:])
    if path[0] != "*":
        return find(found.get(path[0]), path[1:])
    each = {key: find(value, path[1:]) for key, value in found.items()}
    return {key: value for key, value in each.items() if value is not None} or None


def tables(title: str, found: Any) -> Iterator[Table]:
    """The table of a mapping of mappings or list of records; if it is deeper, one for each key."""
    if isinstance(found, list):
        found = {str(number): record for number, record in enumerate(found, 1)}
    for key, rows in (found or {}).items():
        if not (isinstance(rows, Mapping) and all(isinstance(of, Mapping) for of in rows.values())):
            yield table(title, found)
            return
        yield table(f"{title}: {key}", rows)


def all_numbers(found: Any, path: str = "") -> Iterator[tuple[str, list[float]]]:
    """All numbers and lists of numbers in a result, each with the path to it."""
    samples = numbers(found)
    if samples:
        yield path, samples
    elif isinstance(found, Mapping | list):
        inner = found.items() if isinstance(found, Mapping) else enumerate(found)
        for name, value in inner:
            yield from all_numbers(value, f"{path} / {name}" if path else str(name))


def measured(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What was measured at one time, on one machine: a result (named ""), or each of its parts."""
    parts = {"": found} | {name: of for name, of in found.items() if isinstance(of, Mapping)}
    return {name: part for name, part in parts.items() if "machine" in part}


def counted(number: int, noun: str) -> str:
    """1 core, 2 cores."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def short(number: float) -> str:
    """A number as an axis shows it: 512, 4,096, 400 k, 1.28 M."""
    for letter, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= max(unit, 1e4):
            return f"{number / unit:.3g} {letter}"
    return f"{number:,.0f}" if number >= 1e3 else f"{number:g}"


def machines(found: Mapping[str, Any]) -> str:
    """The machines of a result, or of its parts, which may have been measured on several."""
    known = [part["machine"] for part in measured(found).values()]
    names = (", ".join([one["cpu"], *cores_of(one), *one["gpus"]]) for one in known)
    return "; ".join(dict.fromkeys(names))


def cores_of(machine: Mapping[str, Any]) -> list[str]:
    """The number of a machine's cores in words; nothing of a result that was calculated."""
    return [counted(machine["cores"], "core")] if machine["cores"] else []
