"""What runs have left, and what differs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.launch.errors import UserError
from common.train.curves import Line, lines_of, read_points

# What differs between any two runs and says nothing, or is said by another name.
SILENT = (
    *("argv", "out", "resume", "config", "save_config", "settings", "final_loss"),
    *("started", "ended", "starts"),
)
OUTCOME = ("steps", "samples_per_second", "seconds", "peak_memory_mb", "parameter_hash")
GROUPS = ("arguments", "results", "machine and data")  # the order of the table

Row = tuple[str, list[str]]  # a name, and a value per run


@dataclass(frozen=True)
class Left:
    """What a run has left: its name, what result.json says by group and name, its curves by name.

    A run that has not finished says nothing: `facts` is empty.
    """

    name: str
    facts: dict[str, dict[str, str]]
    curves: dict[str, Line]


def load(folders: Sequence[Path]) -> list[Left]:
    """Read what runs have left. One that goes on, or has failed, has curves only.

    Raises:
        UserError: a file cannot be read.
    """
    last = [folder.resolve().name for folder in folders]
    unique = len(set(last)) == len(last)
    names = last if unique else [str(folder) for folder in folders]
    return [_load(*named) for named in zip(names, folders, strict=True)]


def _load(name: str, folder: Path) -> Left:
    facts: dict[str, dict[str, str]] = {}
    file = folder / "result.json"
    try:
        points = read_points(folder / "metrics.jsonl")
        if file.exists():
            facts = grouped(json.loads(file.read_text()))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{folder} cannot be read: {error}") from None
    return Left(name, facts, lines_of(points))


def grouped(result: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The values of a result as text, by group and name.

    The argument `world_size` is the number of nodes that was asked for, the fact `world_size` that
    of the processes that ran: groups keep them apart.
    """
    arguments, outcome, place = GROUPS
    facts = {name: value for name, value in result.items() if name not in SILENT}
    asked = flat(facts.pop("arguments", {}))
    if "peak_memory_mb" in facts:
        ranks = facts["peak_memory_mb"]
        facts["peak_memory_mb"] = {k: max(rank.get(k, 0) for rank in ranks) for k in ranks[0]}
    came = facts.pop("metrics", {}) | {name: facts.pop(name) for name in OUTCOME if name in facts}
    ran = {name: value for name, value in flat(facts).items() if asked.get(name) != value}
    return {arguments: asked, outcome: flat(came), place: ran}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Values by name, as text; those of an inner group as `seconds.train`."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None and name not in SILENT:
            found[prefix + name] = f"{value:,.6g}" if isinstance(value, float) else str(value)
    return found


def differing(runs: Sequence[Left]) -> dict[str, list[Row]]:
    """What is not the same in all runs, by group."""
    rows = {group: [row for row in _rows(runs, group) if len(set(row[1])) > 1] for group in GROUPS}
    return {group: found for group, found in rows.items() if found}


def same(runs: Sequence[Left], group: str) -> list[Row]:
    """What is the same in all runs of a group; a run alone is not compared."""
    rows = _rows(runs, group) if len(runs) > 1 else []
    return [row for row in rows if len(set(row[1])) == 1]


def _rows(runs: Sequence[Left], group: str) -> list[Row]:
    facts = [run.facts.get(group, {}) for run in runs]
    names = dict.fromkeys(name for own in facts for name in own)
    absent = "not given" if group == GROUPS[0] else "-"
    return [(name, [own.get(name, absent) for own in facts]) for name in names]
