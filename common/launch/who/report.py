"""The report that one rank prints: when another one is lost or does not come, and when asked."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from common.launch import last_words, place, rendezvous
from common.launch.console import say
from common.launch.who import ask, calls, watcher
from common.launch.who.table import report_of
from common.launch.who.watcher import Watcher

_handlers: list[Any] = []  # called from C: they must not be collected


def _of_this_process() -> Watcher | None:
    """Not that of the rank from which a loader's worker was forked."""
    own = watcher.watching
    return own if own is not None and own.pid == os.getpid() else None


def show(twice: bool = False) -> None:
    """Print what all ranks do.

    Args:
        twice: ask them again half a second later, to see whether the run goes on.
    """
    own = _of_this_process()
    if own is None:
        return
    states, before = ask.everybody(own.roll, own.token), []
    if twice:
        time.sleep(0.5)
        before, states = states, ask.everybody(own.roll, own.token)
    say(report_of(states, before), sys.stderr)


def report(error: BaseException | None = None, seconds: float = 2.0) -> None:
    """Print, once for the job, what all ranks do: another one was lost, or does not come.

    Not if a rank has said already why it ends. The ranks that do not print it stay to answer.

    Args:
        error: what this rank has met.
        seconds: the longest wait for the rank that prints it.
    """
    own = _of_this_process()
    if own is None or len(own.roll) == 1:
        return
    if error is not None and own.frozen is None:
        with contextlib.suppress(Exception):  # as below
            own.frozen = own.state(error.__traceback__)
    if last_words.answer(_first_to_report, place.current().local_rank == 0):
        with contextlib.suppress(Exception):  # the reason of the end is what counts
            show()
        last_words.answer(_reported, None, 1.0)
    else:
        last_words.answer(lambda: _await_report(seconds), None, seconds)


def _first_to_report() -> bool:
    store, me = rendezvous.joined, str(place.current().rank)
    if store is None:
        return False
    store = store.clone()
    if store.check(["end reported"]):
        return False
    return bool(store.compare_set("ranks asked", "", me) == me.encode())


def _reported() -> None:
    if rendezvous.joined is not None:
        rendezvous.joined.clone().set("ranks shown", "")


def _await_report(seconds: float) -> None:
    store, began = rendezvous.joined, time.monotonic()
    if store is None:
        return
    store = store.clone()
    while (waited := time.monotonic() - began) < seconds and not store.check(["ranks shown"]):
        if store.check(["end reported"]) and not store.check(["ranks asked"]):
            return
        time.sleep(max(0.02, waited / 4))


def report_at_abort(end: Callable[[str], None]) -> None:
    """Report before this process is ended by SIGABRT: it could not be asked any more.

    gloo ends the process so when a message has another size than the rank expects, nccl's watchdog
    when the time is up. Both do it in threads of their own, in which Python runs no handlers.

    Args:
        end: called if the time of a collective is up; it says that another process was lost, and
            does not return.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def at_abort(_: int) -> None:
        late = ""
        with contextlib.suppress(Exception):  # as in `report`
            late = _overdue()
        report()
        if late:
            end(late)

    _handlers.append(at_abort)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), at_abort)


def _overdue() -> str:
    """The collective of this rank that has not ended within --timeout; empty if there is none."""
    limit = time.time() - place.current().flags.timeout
    for call in calls.collectives(lines=False):
        if not call["done"] and call["made"] <= limit:
            return f"{call['kind']} {call['number']} did not end within --timeout"
    return ""
