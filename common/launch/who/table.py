"""A row per rank: where it is, and in which call. No torch."""

from collections.abc import Sequence

from common.launch.who.verdict import verdict
from common.launch.who.words import State, doing, idle, peer_of, pending, place, size

HEAD = ("rank", "node", "step", "does", "call", "group", "shape", "bytes", "line", "since")
WORDS = {
    "data": "waits for data",
    "call": "in a call",
    "runs": "runs",
    "waits": "waits",
    "busy": "no answer, busy",
}


def report_of(states: Sequence[State], before: Sequence[State] = ()) -> str:
    """The table, and one sentence below it.

    Args:
        states: of all ranks.
        before: the same, a moment earlier: to see whether the run goes on.
    """
    rows = [HEAD, *(_row(state) for state in states)]
    return f"{columns(rows)}\n{_sentence(states, before)}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of words as lines, each column as wide as its widest word."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _sentence(states: Sequence[State], before: Sequence[State]) -> str:
    newest = [
        {state["rank"]: state["calls"][-1]["made"] for state in each if state["calls"]}
        for each in (states, before)
    ]
    if before and not any("silent" in state for state in states):
        if newest[0] != newest[1]:
            return "the run makes progress: no rank hangs"
        if not newest[0]:
            return "; ".join(f"rank {s['rank']} {doing(s)} at {_line(s)}" for s in states)
    return verdict(states)


def _line(state: State) -> str:
    return place(*state["where"][0][:2]) if state["where"] else "?"


def _row(state: State) -> tuple[str, ...]:
    task = doing(state)
    start = (str(state["rank"]), str(state["node"]), str(state.get("step", "-")))
    if "silent" in state:
        return (*start, WORDS.get(task, task), *"-" * 6)
    since = f"{idle(state):.1f} s" if state["calls"] else "-"
    told = pending(state)[:1] if task == "call" else []
    for call in told:
        group = "all" if len(call["ranks"]) == state["ranks"] else str(call["ranks"])
        shape = " ".join(str(shape).replace(" ", "") for shape in call["shapes"]) or "-"
        what = (
            f"{call['kind']} {call['number']}{peer_of(call)}",
            group,
            shape,
            size(call["bytes"]),
        )
        since = f"{state['now'] - call['made']:.1f} s"
        return (*start, WORDS[task], *what, place(call["file"], call["line"]), since)
    return (*start, WORDS[task], "-", "-", "-", "-", _line(state), since)
