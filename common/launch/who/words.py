"""What one rank does, in words. No torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.launch.console import listed

State = dict[str, Any]
"""What a rank says of itself: see `watcher.Watcher.state`."""
Call = Mapping[str, Any]
"""A collective or a message: see `calls`."""
# A rank that spins in one of these waits; on CUDA the host does.
WAITING = re.compile(
    r"wait\(|item\(|cpu\(|synchronize|backward|barrier|reduce|gather|broadcast|send|recv|tolist"
)


def pending(state: State) -> list[Call]:
    """The calls that have begun and not ended, the oldest first."""
    return [call for call in state["calls"] if not call["done"]]


def doing(state: State) -> str:
    """In a word: what a rank does."""
    if "silent" in state:
        return state["silent"]
    if state["loads"]:
        return "data"
    if pending(state) and (not state["busy"] or WAITING.search(state["code"])):
        return "call"
    return "runs" if state["busy"] else "waits"


def idle(state: State) -> float:
    """Seconds since the rank began its last call."""
    return state["now"] - state["calls"][-1]["made"] if state["calls"] else 0.0


def place(file: str, line: int) -> str:
    """A line of a program."""
    return f"{Path(file).name}:{line}"


def size(count: float) -> str:
    """Bytes."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def named(call: Call) -> str:
    """A call: kind, number, bytes, and the line that makes it."""
    what = f"{size(call['bytes'])}, " * bool(call["shapes"])
    peer = peer_of(call).replace(" to ", " to rank ").replace(" from ", " from rank ")
    return f"{call['kind']} {call['number']}{peer} ({what}{place(call['file'], call['line'])})"


def peer_of(call: Call) -> str:
    """The other end of a message; empty for a collective."""
    ways = {"send": "to", "recv": "from"}
    return f" {ways[call['kind']]} {call['peer']}" if "peer" in call else ""


def these(ranks: Sequence[int]) -> str:
    """Ranks as the subject of a sentence."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def are(ranks: Sequence[int], one: str = "is", several: str = "are") -> str:
    """Ranks, with a verb."""
    return f"{these(ranks)} {several if len(ranks) > 1 else one}"
