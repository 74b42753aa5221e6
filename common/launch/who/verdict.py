"""One sentence that says what is wrong, from what the ranks say of themselves. No torch.

Nothing is guessed: what the answers do not show is not said, only who is where.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.launch.who.loops import left_loop
from common.launch.who.words import Call, State, are, doing, idle, named, pending, place, these

# Their tensors have one shape on all ranks.
ONE_SHAPE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


def verdict(states: Sequence[State]) -> str:
    """What is wrong, or who is where."""
    tasks = {state["rank"]: doing(state) for state in states}
    calling = [state for state in states if tasks[state["rank"]] == "call"]
    waiting = f"; {_waiting(calling)}" if calling else ""
    if not any(state["calls"] or "silent" in state for state in states):
        where = ", ".join(f"rank {state['rank']} at {_at(state)}" for state in states)
        return f"no call is known (before the first one, or torch does not record them): {where}"
    for task, say in _ABSENT.items():
        found = [state for state in states if tasks[state["rank"]] == task]
        if found:
            return say(found) + waiting
    return _between(calling)


def _each(say: Callable[[State], str]) -> Callable[[Sequence[State]], str]:
    return lambda states: "; ".join(say(state) for state in states)


def _at(state: State) -> str:
    if not state["where"]:
        return "an unknown line"
    lines = [place(*frame[:2]) for frame in state["where"][:2]]
    return " called at ".join(lines)


def _after(state: State) -> str:
    return f"{idle(state):.0f} s after its last call" if state["calls"] else "before its first call"


_ABSENT: dict[str, Callable[[Sequence[State]], str]] = {
    "stopped": _each(
        lambda state: (
            f"rank {state['rank']} is stopped (by SIGSTOP or a debugger): "
            f"kill -CONT {state['pid']} lets it go on"
        )
    ),
    "gone": lambda states: are([s["rank"] for s in states], "has ended", "have ended"),
    "no answer": lambda states: (
        are([s["rank"] for s in states], "gives", "give")
        + " no answer: look at the machine, and at the network to it"
    ),
    "busy": _each(
        lambda state: (
            f"rank {state['rank']} gives no answer and uses a core (process {state['pid']}): "
            f"it is in a loop outside of Python"
        )
    ),
    "data": _each(
        lambda state: f"rank {state['rank']} waits for its data (loader, {idle(state):.0f} s)"
    ),
    "runs": _each(
        lambda state: (
            f"rank {state['rank']} runs at {_at(state)}, {_after(state)}: "
            f"a loop without end, or much work"
        )
    ),
    "waits": _each(
        lambda state: (
            f"rank {state['rank']} waits outside of any call, at {_at(state)}, {_after(state)}"
        )
    ),
}


def _waiting(calling: Sequence[State]) -> str:
    calls = Counter(named(pending(state)[0]) for state in calling)
    where = calls.most_common(1)[0][0]
    ranks = [state["rank"] for state in calling]
    return f"{are(ranks, 'waits', 'wait')} in {where}"


def _between(states: Sequence[State]) -> str:
    """All ranks are in a call: they do not make the same ones."""
    first = {state["rank"]: pending(state)[0] for state in states}
    if any("peer" in call for call in first.values()):
        return _messages(first)
    if len({call["group"] for call in first.values()}) > 1:
        return "the ranks wait in different groups: " + "; ".join(
            f"rank {rank} in {named(call)} of ranks {call['ranks']}" for rank, call in first.items()
        )
    group = next(iter(first.values()))["group"]
    made = {
        state["rank"]: {
            call["number"]: call
            for call in state["calls"]
            if call["group"] == group and "peer" not in call
        }
        for state in states
    }
    common = sorted(set.intersection(*(set(calls) for calls in made.values())))
    for number in common:
        calls = {rank: of[number] for rank, of in made.items()}
        if len({call["kind"] for call in calls.values()}) > 1:
            return _other_calls(states, made, number)
        shapes = {str(call["shapes"]) for call in calls.values()}
        if len(shapes) > 1 and next(iter(calls.values()))["kind"] in ONE_SHAPE:
            return _other_shapes(made, number)
    numbers = {rank: call["number"] for rank, call in first.items()}
    if len(set(numbers.values())) > 1:
        return _behind(first, numbers)
    return (
        f"all ranks are in {named(next(iter(first.values())))}: "
        f"it is slow, or the network between them is"
    )


def _messages(first: Mapping[int, Call]) -> str:
    """Ranks that wait for a message: a ring of them, or the one at the end of the chain."""
    rank, way = next(rank for rank, call in first.items() if "peer" in call), []
    while rank in first and "peer" in first[rank] and rank not in way:
        way.append(rank)
        rank = first[rank]["peer"]
    if rank in way:
        ring = way[way.index(rank) :]
        said = ", ".join(f"rank {r} in {named(first[r])}" for r in ring)
        kinds = {first[r]["kind"] for r in ring}
        why = {"send": ": all send, and none receives", "recv": ": all receive, and none sends"}
        return (
            f"{said}{why.get(kinds.pop(), '') if len(kinds) == 1 else ''}: each waits for the next"
        )
    end = f", which is in {named(first[rank])}" if rank in first else ""
    return f"rank {way[-1]} is in {named(first[way[-1]])}{end}"


def _behind(first: Mapping[int, Call], numbers: Mapping[int, int]) -> str:
    usual = Counter(numbers.values()).most_common(1)[0][0]
    if len(set(Counter(numbers.values()).values())) == 1:
        usual = max(numbers.values())
    odd = [rank for rank, number in numbers.items() if number != usual]
    others = [rank for rank in numbers if rank not in odd]
    off = numbers[odd[0]] - usual
    return (
        f"{are(odd)} in {named(first[odd[0]])}, {these(others)} in {named(first[others[0]])}: "
        f"{are(odd)} "
        f"{abs(off)} call{'s' * (abs(off) > 1)} {'behind' if off < 0 else 'ahead'}"
    )


def _signature(call: Call) -> tuple[Any, ...]:
    return call["kind"], call["file"], call["line"]


Made = Mapping[int, Mapping[int, Call]]


def _odd(made: Made, number: int, of: Callable[[Call], Any]) -> list[int]:
    """The ranks whose call is not the usual one: that of most, or that which came in its place."""
    calls = {rank: of(calls[number]) for rank, calls in made.items()}
    counted = Counter(calls.values()).most_common()
    usual = counted[0][0]
    if len(counted) > 1 and counted[0][1] == counted[1][1]:
        history = next(iter(made.values()))
        before = [n for n in sorted(history) if n < number]
        same = [n for n in before[:-1] if _signature(history[n]) == _signature(history[before[-1]])]
        if same and of(history[same[-1] + 1]) in calls.values():
            usual = of(history[same[-1] + 1])
    return [rank for rank, call in calls.items() if call != usual]


def _other_shapes(made: Made, number: int) -> str:
    calls = {rank: of[number] for rank, of in made.items()}
    shapes: dict[str, list[int]] = {}
    for rank, call in calls.items():
        shape = call["shapes"][0] if len(call["shapes"]) == 1 else call["shapes"]
        shapes.setdefault(str(shape), []).append(rank)
    said = ", ".join(f"{shape} on {these(ranks)}" for shape, ranks in shapes.items())
    first = calls[min(calls)]
    where = f"{first['kind']} {number} at {place(first['file'], first['line'])}"
    return f"the ranks disagree: shape {said}, in {where}"


def _other_calls(states: Sequence[State], made: Made, number: int) -> str:
    odd = _odd(made, number, _signature)
    usual = next(rank for rank in made if rank not in odd)
    mine, theirs = made[odd[0]], made[usual]
    here, there = mine[number], theirs[number]
    others = these([rank for rank in made if rank not in odd])
    where = f"{are(odd)} in {named(here)}, {others} in {named(there)}"
    if any(
        mine[n]["kind"] == there["kind"] and mine[n]["shapes"] == there["shapes"]
        for n in mine
        if n > number
    ) and any(
        theirs[n]["kind"] == here["kind"] and theirs[n]["shapes"] == here["shapes"]
        for n in theirs
        if n > number
    ):
        return f"{where}: the ranks make these two calls in another order"
    frames = {state["rank"]: state["where"] for state in states}
    loop = left_loop(frames[odd[0]], frames[usual])
    if loop:
        return (
            f"{where}: {are(odd, 'has', 'have')} ended the loop at {loop} earlier (fewer batches)"
        )
    known = {_signature(call) for n, call in theirs.items() if n < number}
    if _signature(here) in known:
        return (
            f"{where}: {are(odd, 'has', 'have')} left out {there['kind']} at "
            f"{place(there['file'], there['line'])}; is it in a branch?"
        )
    if any(_signature(call) == _signature(there) for n, call in mine.items() if n < number):
        return f"{where}: {are(odd, 'makes', 'make')} a call that the others do not make"
    return f"{where}: not the same call"
