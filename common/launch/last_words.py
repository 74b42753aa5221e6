"""What ranks ask each other at their end, through the store: who speaks, and who is silent."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from common.launch import place, rendezvous

Value = TypeVar("Value")
UNREACHABLE = (dist.DistError, RuntimeError)


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
        silent = _silent("still here", patience=1.0)
    except UNREACHABLE:
        return cut_off
    return f"no word from rank {', '.join(silent)}" if silent else "all are still here"


def await_stops() -> None:
    """Wait a few seconds until all ranks have stopped, and written what they had to."""
    if rendezvous.joined is not None:
        with contextlib.suppress(*UNREACHABLE):
            _silent("stopped", patience=3.0)


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
        if not _silent("at its end", patience=min(3.0, here.flags.timeout / 2)):
            if here.rank == 0:
                _silent("gone", patience=1.0)
            else:
                store.set(f"gone/{here.rank}", "")


def _silent(sign: str, patience: float) -> list[str]:
    """Give a sign and wait `patience` seconds for the others'; the ranks that gave none."""
    store, here = rendezvous.joined, place.current()
    assert store is not None
    store.set(f"{sign}/{here.rank}", "")
    deadline = time.monotonic() + patience
    while True:
        ranks = range(here.world_size)
        silent = [str(rank) for rank in ranks if not store.check([f"{sign}/{rank}"])]
        if not silent or time.monotonic() > deadline:
            return silent
        time.sleep(0.02)


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
