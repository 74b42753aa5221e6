"""What the time of each step went into, on each rank.

| share | what it is | what it cannot see |
|---|---|---|
| data | the loop has asked for a batch, and has none yet | loaders that the program reads itself |
| communication | the rank stands still in a call of which all ranks are in already | see below |
| others | the rank stands still in a call to which another rank has not come yet | see below |
| computing | the rest of the step: operators, Python, and what none of the above sees | - |

"Stands still": it is in `wait` of a message or collective; or DDP, whose waits are in C++, has a
collective under way, and no operator runs; or NCCL's kernels run on the GPU, and no other. So
communication behind computation is not counted. Waits in torch's store, files and shared memory
look like computing, and with NCCL, whose kernels wait on the GPU, `others` is in `communication`.
A step begins when its batch is asked for; evaluating and saving are between steps. On a GPU, which
is behind the host, kernels may be counted in the step after theirs.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.launch.who.table import columns
from common.train.files import writing
from common.train.parts import Part, Point, Span, where

SHARES = {
    "computing": ("computing", "#0b5cad"),
    "communication": ("communication", "#9a6700"),
    "others": ("waits for others", "#c4391d"),
    "data": ("waits for data", "#8250df"),
}
MOST_BARS = 80  # in the picture


def aligned(parts: Sequence[Part]) -> tuple[list[Part], float]:
    """The same by the clock of rank 0, and by how much the clocks may still differ (microseconds).

    A barrier ends nowhere before it has begun everywhere: so each of them bounds the difference of
    two clocks from both sides. Where 0 is within the bounds, as on one machine, it stays 0.
    """
    found, error = [], 0.0
    for part in parts:
        pairs = list(zip(part.clock, parts[0].clock, strict=True))
        low = max(own[0] - first[1] for own, first in pairs) / 1000
        high = min(own[1] - first[0] for own, first in pairs) / 1000
        offset = 0.0 if low <= 0 <= high else (low + high) / 2
        if part.rank != parts[0].rank:
            error = max(error, abs(high - offset), abs(offset - low))
        found.append(_moved(part, -offset))
    return found, error


def _moved(part: Part, by: float) -> Part:
    def spans(of: Iterable[Span]) -> list[Span]:
        return [(start + by, end + by) for start, end in of]

    def points(of: Mapping[str, Point]) -> dict[str, Point]:
        moved = (Point(p.time + by, p.thread, p.since + by, p.opened + by) for p in of.values())
        return dict(zip(of, moved, strict=True))

    return replace(
        part,
        offset=-by,
        steps=dict(zip(part.steps, spans(part.steps.values()), strict=True)),
        data=spans(part.data),
        exposed=spans(part.exposed),
        begun=points(part.begun),
        ended=points(part.ended),
    )


def late(part: Part, parts: Sequence[Part]) -> Iterator[Span]:
    """When a rank has come to a call, and another one has not.

    Args:
        part: of the rank.
        parts: of all ranks, with equal clocks.
    """
    for name, (end, _, since, _) in part.ended.items():
        kind, _, ends = name.partition(" ")
        other = {"send": f"recv {ends}", "recv": f"send {ends}"}.get(kind, name)
        begun = [each.begun[other].time for each in parts if other in each.begun]
        if begun:
            yield since, min(end, max(begun))


def shares(part: Part, parts: Sequence[Part]) -> dict[int, dict[str, float]]:
    """Milliseconds of each share of each step, by its number; `total` is their sum."""
    waits = [
        where(lambda data, *_: data, part.data),
        where(lambda exposed, late: exposed and late, part.exposed, late(part, parts)),
        part.exposed,
    ]
    found = {}
    for number, step in part.steps.items():
        data = where(lambda step, data: step and data, [step], waits[0])
        others = where(lambda step, it, no: step and it and not no, [step], waits[1], data)
        rest = where(
            lambda step, it, *no: step and it and not any(no), [step], waits[2], data, others
        )
        total, lengths = (
            step[1] - step[0],
            [sum(e - s for s, e in it) for it in (rest, others, data)],
        )
        values = dict(zip(SHARES, (total - sum(lengths), *lengths), strict=True))
        found[number] = {name: round(v / 1000, 3) for name, v in {"total": total, **values}.items()}
    return found


def facts(parts: Sequence[Part], error: float) -> dict[str, Any]:
    """For result.json: milliseconds by step and rank.

    Args:
        parts: of all ranks, with equal clocks.
        error: of the clocks, in microseconds.
    """
    of_ranks = [shares(part, parts) for part in parts]
    numbers = [number for number in of_ranks[0] if all(number in of for of in of_ranks)]
    steps = [{"step": number, "ranks": [of[number] for of in of_ranks]} for number in numbers]
    return {"clock_error": round(error / 1000, 3), "unit": "ms", "steps": steps}


def table(found: Mapping[str, Any]) -> str:
    """The means over the steps, a line per rank."""
    steps = found["steps"]
    rows = [["rank", "step", *(words for words, _ in SHARES.values())]]
    for rank in range(len(steps[0]["ranks"])):
        means = {
            name: sum(step["ranks"][rank][name] for step in steps) / len(steps)
            for name in ("total", *SHARES)
        }
        shown = (f"{means[name]:.1f} ms {means[name] / means['total']:.0%}" for name in SHARES)
        rows.append([str(rank), f"{means['total']:.1f} ms", *shown])
    return columns(rows)


def draw(path: Path, found: Mapping[str, Any], title: str) -> None:
    """Draw a bar for each rank in each step.

    Args:
        path: of the PNG.
        found: what `facts` returns; the last steps are left out where there are too many bars.
        title: of the picture.

    Raises:
        UserError: the disk is full, for example.
    """
    import matplotlib  # a second, which only --profile costs

    matplotlib.use("agg")
    from matplotlib import pyplot  # as above

    ranks = len(found["steps"][0]["ranks"])
    steps = found["steps"][: max(1, MOST_BARS // ranks)]
    figure, axis = pyplot.subplots(figsize=(7.5, 1.6 + 0.24 * len(steps) * (ranks + 0.6)))
    places = [
        number * (ranks + 0.6) + rank for number in range(len(steps)) for rank in range(ranks)
    ]
    left = [0.0] * len(places)
    for name, (label, colour) in SHARES.items():
        widths = [of[name] for step in steps for of in step["ranks"]]
        axis.barh(places, widths, 0.85, left, label=label, color=colour)
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    names = [f"step {step['step']}  rank {rank}" for step in steps for rank in range(ranks)]
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.grid(alpha=0.25, axis="x")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("milliseconds")
    figure.legend(loc="outside lower center", ncols=len(SHARES), frameon=False, fontsize=8)
    figure.suptitle(textwrap.fill(title, 90), fontsize=10, x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    with writing(path):
        figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)
