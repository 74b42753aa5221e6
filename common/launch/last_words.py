"""What ranks ask each other at their end, through the store: who speaks, and who is silent."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from common.launch import place, rendezvous
from common.launch.muster import not_there

Value = TypeVar("Value")
UNREACHABLE = (dist.DistError, RuntimeError)
_given = set[str]()  # the signs of this process


def speaks_first(busy: bool = False) -> bool:
    """Whether no other rank has reported its end yet: the first reason is the others' cause.

    Args:
        busy: the main thread may be waiting for an answer of the store.
    """
    store, here = rendezvous.joined, place.current()
    if store is None:  # the ranks have not met: each node speaks for itself
        return here.local_rank == 0
    try:
        store = store.clone() if busy else store
        me = str(here.rank)
        return bool(store.compare_set("end reported", "", me) == me.encode())
    except UNREACHABLE:  # the host of the store is gone: better twice than not at all
        return True


def without_word(cut_off: str) -> str:
    """The ranks that do not say within a second that they lost somebody, too: they hang, or ended.

    Args:
        cut_off: what to say if the store cannot be reached.
    """
    try:
        silent = [] if _all_give("still here", patience=1.0) else _who_gave_none("still here")
    except UNREACHABLE:
        return cut_off
    return f"no word from rank {', '.join(silent)}" if silent else "all are still here"


def await_stops() -> None:
    """Wait a few seconds until all ranks have stopped, and written what they had to."""
    if rendezvous.joined is not None:
        with contextlib.suppress(*UNREACHABLE):
            _all_give("stopped", patience=3.0)


def end_together() -> None:
    """Wait a few seconds until all ranks have come to their end.

    A rank that still connects when another one is gone would have gloo complain of it, beside the
    line that says what is wrong. Rank 0 ends last, since it may host the store. The wait is short:
    where one rank alone met a mistake, the others wait for it.
    """
    store, here = rendezvous.joined, place.current()
    if store is None:
        return
    with contextlib.suppress(*UNREACHABLE):
        if _all_give("at its end", patience=min(3.0, here.flags.timeout / 2)):
            if here.rank == 0:
                _all_give("gone", patience=1.0)
            else:
                _give("gone")


def _all_give(sign: str, patience: float) -> bool:
    """Give a sign, and wait `patience` seconds for all others to give it; whether they did.

    The last one says so: hundreds of ranks that each looked for the signs of all others would keep
    the store's host busy for longer than that.
    """
    _give(sign)
    return _comes(f"{sign}, all", patience)


def _give(sign: str) -> None:
    store, here = rendezvous.joined, place.current()
    assert store is not None
    if sign in _given:  # counted once
        return
    _given.add(sign)
    store.set(f"{sign}/{here.rank}", "")
    if store.add(f"{sign}, ranks", 1) == here.world_size:
        store.set(f"{sign}, all", "")


def _comes(key: str, patience: float) -> bool:
    """Wait `patience` seconds for a key; whether it came."""
    store, began = rendezvous.joined, time.monotonic()
    assert store is not None
    while not store.check([key]):
        waited = time.monotonic() - began
        if waited > patience:
            return False
        time.sleep(min(0.2, max(0.02, waited / 4)))
    return True


def _who_gave_none(sign: str) -> list[str]:
    """The ranks that have not given a sign. One rank looks for all, and tells the others."""
    store, here = rendezvous.joined, place.current()
    assert store is not None
    key, me = f"{sign}, missing", str(here.rank)
    looks = store.compare_set(f"{sign}, looks", "", me) == me.encode()
    if not looks and _comes(key, 1.0):
        return json.loads(store.get(key))
    missing = not_there(store, [f"{sign}/{rank}" for rank in range(here.world_size)])
    store.set(key, json.dumps(found := [str(rank) for rank in missing]))
    return found


def answer(ask: Callable[[], Value], otherwise: Value, seconds: float = 3.0) -> Value:
    """Ask the store, but not without end: across a network that is cut, no answer comes.

    Hundreds of ranks that ask at once wait longer.
    """
    seconds += place.current().world_size / 16
    answers: list[Value] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else otherwise
