"""What each benchmark was given: a table from the JSON alone."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.tables import Table, cores_of, measured

HEAD = ("result", "date", "machine", "ranks", "threads", "images or texts", "batch")
OF_IMAGES = (
    "{count:,} JPEGs of {median_width:.0f}x{median_height:.0f} pixels (median), "
    "{mean_kib:.3g} KiB each (mean)"
)
BY_IMAGES = ("pixel_cache",)  # whose sizes are numbers of images, not of ranks
NOT_GIVEN = ("extrapolation", "unequal")  # calculated, or an experiment of its own
# How results write it: as a value, in a command, or in the name of what was measured.
RANKS = r'"(?:ranks|processes)": (\d+)|--nproc (\d+)|ours, (\d+) process|"(\d+) ranks?"'
THREADS = r'"threads": (\d+)|--threads (\d+)'
BATCH = r'"(?:batch_size|batch_per_rank|batch)": (\d+)|-b (\d+)'


def inputs(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each result, or part of one that was measured apart; "-" is not recorded."""
    rows = []
    for name, found in results.items():
        for part, of in measured(found).items():
            machine = of["machine"]
            text = json.dumps({key: one for key, one in of.items() if key not in NOT_GIVEN})
            by_images = f"{', '.join(of['sizes'])} JPEGs" if name in BY_IMAGES else ""
            bf16 = ["native bf16"] * bool(machine.get("bf16_flags"))
            here = [machine["cpu"], *cores_of(machine), *bf16, *machine["gpus"]]
            rows.append(
                (
                    f"{name}, {part}" if part else name,
                    str(of.get("date", "-"))[:10],
                    ", ".join(here),
                    each_once([*numbers(RANKS, text), *(() if by_images else ranks_of(of))]),
                    each_once(numbers(THREADS, text)),
                    by_images or data(of, text),
                    each_once([*numbers(BATCH, text), *map(int, of.get("batches", ()))]),
                )
            )
    return Table("", HEAD, rows)


def numbers(pattern: str, text: str) -> list[int]:
    """What the groups of a pattern match."""
    return [int(one) for match in re.findall(pattern, text) for one in match if one]


def ranks_of(found: Mapping[str, Any]) -> list[int]:
    """The keys of what was measured by ranks: all-reduces, steps."""
    each = found.get("sizes") or found.get("steps")
    return [int(key) for key in each if key.isdigit()] if isinstance(each, Mapping) else []


def each_once(found: Iterable[int]) -> str:
    """Each number once, in order."""
    return ", ".join(map(str, sorted(set(found)))) or "-"


def data(found: Mapping[str, Any], text: str) -> str:
    """Images by count and size, a data set, reviews: whatever of it the result says."""
    words = []
    if isinstance(images := found.get("images"), Mapping):
        words.append(OF_IMAGES.format_map(images))
    words += [f"{size}x{size} pixels" for size in numbers(r'"image_size": (\d+)()', text)]
    words += re.findall(r'(?:--dataset |"dataset": ")(\w+)', text)
    words += [f"{count:,} reviews" for count in numbers(r'"reviews": (\d+)()', text)]
    words += re.findall(r"padded to \d+", text)
    if isinstance(files := found.get("files"), Mapping):
        words.append(f"{sum(files.values()):,} JPEGs")
    return ", ".join(dict.fromkeys(words)) or "-"
