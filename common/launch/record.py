"""`@record`, the frame around the work of one rank: a clean end in every case.

It has the name and the place of torch's `torch.distributed.elastic.multiprocessing.errors.record`,
and does more: an error is one line for the whole job, a signal is answered, and the exit code says
what happened.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar

from common.launch import last_words, place, rendezvous
from common.launch.args import STOPPING
from common.launch.console import to_terminal
from common.launch.errors import RETRY, Absent, Lost, Stopped, UserError, note
from common.launch.parent import end_with_parent
from common.launch.who import report, watcher

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

# What backends' errors say when another process died, or was silent for longer than --timeout.
LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "timeout caused pair closure",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
    "remote process exited or there was a network error",
)
# What else can be said in a line: words of the error's message, and what to do.
REMEDIES = {
    "shared memory": "more shared memory (a container's --shm-size), or --workers 0",
    "DataLoader worker (pid": "more memory, or --workers 0",
    "out of memory": "a smaller --batch-size, or more processes",
    "allocate memory": "a smaller --batch-size, or more processes",
    "does not have a deterministic implementation": "to leave --deterministic out",
    "Duplicate GPU detected": "fewer processes than GPUs, or --dist-backend gloo",
    "Multiple Ranks are using the same GPU": "fewer processes than GPUs, or --dist-backend gloo",
}
OUTSIDE = "outside of training, nothing to save"
_ignored = list[int]()  # signals that came when this process was ending already


def record(main_worker: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Decorate a rank's main function.

    A user's mistake and an unexpected exception are printed by the first rank that meets them, once
    for the job. After an exception the process ends with exit code 1, without waiting for the
    others; after a mistake, which mostly all ranks meet, with 2; after signal n in training, at
    which all stop, with 128 + n, together with them.
    """

    @functools.wraps(main_worker)
    def recorded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        # Of torchrun's agent; `multiprocessing` knows its own parent.
        end_with_parent(agent="TORCHELASTIC_RUN_ID" in os.environ)
        try:
            for signum in STOPPING:
                signal.signal(signum, _stop_now)
            signal.signal(signal.SIGUSR1, lambda *_: None)  # what it asks for: see below
            _stop_without_main_thread()
            report.report_at_abort(_end_as_lost)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # one may have come already
            returned = main_worker(*args, **kwargs)
            watcher.leave()
            return returned
        except UserError as error:
            _end(f"error: {error}", 2, again=isinstance(error, Absent), together=True)
        except Stopped as stop:
            if together := str(stop) != OUTSIDE:
                last_words.answer(last_words.await_stops, None, 5.0)
            _end(_stopped(stop), 128 + stop.signum, together=together)
        except Exception as error:
            _ignore_signals()  # torchrun stops the others while this one asks who has ended
            lost = isinstance(error, Lost) or any(words in str(error) for words in LOST)
            if lost:
                report.report(error)
            text = _lost(error) if lost else _explained(error)
            _end(f"error: rank {place.current().rank}: {text}", 1, again=lost)
        raise AssertionError("_end does not return")

    return recorded


def _end(message: str, code: int, again: bool = False, together: bool = False) -> None:
    """Say why, once for the job, and end this process.

    Args:
        message: for the terminal.
        code: the exit code.
        again: whether the cause lies elsewhere, so that starting again may help.
        together: whether all ranks come to this end.
    """
    watcher.leave()
    _ignore_signals()  # one that comes now would be an exception outside of `recorded`
    spoke = last_words.answer(last_words.speaks_first, True) or _nobody_ends_this(code)
    if spoke:
        to_terminal(message)
    note(RETRY if again else code, place.current().local_world_size, message, spoke)
    sys.stdout.flush()
    if together:
        last_words.answer(last_words.end_together, None, 5.0)
    # Not sys.exit: the destructors of a process group whose peers are gone may wait for them.
    os._exit(code)


def _nobody_ends_this(code: int) -> bool:
    """Wait, in silence, for the end that follows when local rank 0 speaks; whether it did not come.

    Until the ranks have met, local rank 0 speaks for its node. torchrun ends all processes as soon
    as one has ended, so the others must not end first; and an error of theirs alone would go
    unsaid. A parent ends them only after an error.
    """
    launcher = place.current().launcher
    ended_by_launcher = launcher == "torchrun" or (launcher == "spawn" and code == 1)
    if rendezvous.joined is not None or code not in (1, 2) or not ended_by_launcher:
        return False
    deadline = time.monotonic() + (10.0 if launcher == "torchrun" else 5.0)
    while not _ignored and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _ignored


def _end_as_lost(reason: str) -> None:
    """The end at which nccl's watchdog would leave a trace of C++ only."""
    error = RuntimeError(reason)
    _end(f"error: rank {place.current().rank}: {_lost(error)}", 1, again=True)


def _stop_now(signum: int, _: FrameType | None) -> None:
    _ignore_signals()  # a terminal's Ctrl-C comes twice: from the terminal, and from the parent
    raise Stopped(signum, OUTSIDE)


def _ignore_signals() -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # only that one may, and at an abort another one ends the process
    for signum in STOPPING:  # not SIG_IGN: Python would complain of one that a thread just takes
        signal.signal(signum, lambda number, _: _ignored.append(number))


def _stop_without_main_thread(patience: float = 2.0) -> None:
    """End this process after a signal that `_stop_now` does not get to see.

    Python runs handlers in the main thread, which may wait in a collective, or for a process that
    has stopped.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    # A signal to a loader's worker is not for this process.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        while True:
            signum = os.read(reading, 1)[0]
            if signum == signal.SIGUSR1:
                with contextlib.suppress(Exception):  # the thread is needed for the other signals
                    report.show(twice=True)
            if signum in STOPPING and signal.getsignal(signum) is _stop_now:
                time.sleep(patience)
                if signal.getsignal(signum) is _stop_now:
                    message = _stopped(Stopped(signum, OUTSIDE))
                    spoke = last_words.answer(lambda: last_words.speaks_first(busy=True), True)
                    if spoke:
                        to_terminal(message)
                    note(128 + signum, place.current().local_world_size, message, spoke)
                    os._exit(128 + signum)

    threading.Thread(target=watch, daemon=True).start()


def _stopped(stop: Stopped) -> str:
    return f"stopped by {signal.Signals(stop.signum).name}: {stop}"


def _lost(error: Exception) -> str:
    """One line about another process that ended or fell silent."""
    where = f" {getattr(error, '__notes__', [''])[0]}".rstrip()
    here = place.current()
    cut_off = f"the host of the rendezvous, {place.address(here.host, here.port)}, is gone, too,"
    who = ""
    if rendezvous.joined is not None:
        silent = last_words.answer(lambda: last_words.without_word(cut_off), cut_off)
        who = f" ({silent}{where})"
    return f"lost another process{who}: {str(error).splitlines()[0]}"


def _explained(error: Exception) -> str:
    """One line if the cause is known, otherwise the traceback."""
    text = f"out of memory: {error}" if isinstance(error, MemoryError) else str(error)
    if "DataLoader worker" in (cause := str(error.__cause__)):
        text = cause  # it says what ended the worker, and the error itself does not
    frames = traceback.extract_tb(error.__traceback__)
    semaphore = isinstance(error, OSError) and Path(frames[-1].filename).match(
        "multiprocessing/synchronize.py"
    )
    if semaphore:  # says "no space left on device", and not where
        text = f"no shared memory for a semaphore: {error}"
    for words, remedy in REMEDIES.items():
        if (isinstance(error, (MemoryError, RuntimeError)) or semaphore) and words in text:
            line = next(line for line in text.splitlines() if words in line)
            return f"{line.removeprefix('RuntimeError: ').strip()} (what may help: {remedy})"
    return traceback.format_exc()
