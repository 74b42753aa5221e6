"""What runs have left, and what differs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.launch.errors import UserError
from common.train.curves import Line, lines_of, read_points

# What differs between any two runs and says nothing, or is said by another name.
SILENT = ("argv", "out", "resume", "config", "save_config", "settings", "final_loss")


@dataclass(frozen=True)
class Finished:
    """A run: its name, what result.json says, and its curves by name."""

    name: str
    facts: dict[str, str]
    curves: dict[str, Line]


def load(folders: Sequence[Path]) -> list[Finished]:
    """Read what runs have left. One that goes on, or has failed, has curves only.

    Raises:
        UserError: a file cannot be read.
    """
    last = [folder.resolve().name for folder in folders]
    unique = len(set(last)) == len(last)
    names = last if unique else [str(folder) for folder in folders]
    return [_load(*named) for named in zip(names, folders, strict=True)]


def _load(name: str, folder: Path) -> Finished:
    facts: dict[str, str] = {}
    file = folder / "result.json"
    try:
        points = read_points(folder / "metrics.jsonl")
        if file.exists():
            facts = flat(json.loads(file.read_text()))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{folder} cannot be read: {error}") from None
    return Finished(name, facts, lines_of(points))


def flat(result: dict[str, Any], group: str = "") -> dict[str, str]:
    """The values of a result by name, as text: `lr`, `metrics.accuracy`, `seconds.train`."""
    found: dict[str, str] = {}
    for name, value in result.items():
        if name in SILENT:
            continue
        if name == "peak_memory_mb":
            value = {kind: max(rank.get(kind, 0) for rank in value) for kind in value[0]}
        if isinstance(value, dict):
            found |= flat(value, "" if name == "arguments" else f"{name}.")
        elif value is not None:
            text = f"{value:,.6g}" if isinstance(value, float) else str(value)
            found.setdefault(group + name, text)
    return found


def differing(runs: Sequence[Finished]) -> list[tuple[str, list[str]]]:
    """Names and values, one per run, of what is not the same in all; `-` where it is not said."""
    names = dict.fromkeys(name for run in runs for name in run.facts)
    rows = [(name, [run.facts.get(name, "-") for run in runs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
