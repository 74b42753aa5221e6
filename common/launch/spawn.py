"""Processes that this program starts: the store at which they meet, and the wait for them."""

import contextlib
import multiprocessing.connection
import os
import pickle
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from common.launch.args import STOPPING, fail
from common.launch.console import complain, listed
from common.launch.errors import UserError, note
from common.launch.place import Place
from common.launch.rendezvous import listen

# Seconds that workers get to finish a step and save after a signal; torchrun obeys the same.
GRACE = float(os.environ.get("PET_SHUTDOWN_TIMEOUT", 30))
TWICE = 1.0  # seconds: a signal that comes again so soon is the same wish


def launch(worker: Callable[[int, Place, Any], None], place: Place, args: object) -> None:
    """Run `worker(local_rank, place, args)` in every process of this node and wait for them.

    Args:
        worker: a rank's main function, decorated with `record`.
        place: of this process.
        args: the flags.

    Raises:
        SystemExit: a worker that this function has started ended with an error.
    """
    if place.launched:
        worker(place.local_rank, place, args)
        return
    workers = mp.start_processes(
        worker, (place, args), place.local_world_size, join=False, start_method="forkserver"
    )
    wait_for(workers)


@contextlib.contextmanager
def hosted(place: Place) -> Generator[Place]:
    """Host the store at which the workers of a job meet, in the process that spawns them.

    Node 0 does; the others only pass through. Signals are held back until `wait_for` can pass them
    on: workers that are being started must not miss them.

    Raises:
        SystemExit: code 2, the port of `--dist-url` is in use.
    """
    if place.launched:
        yield place
        return
    listener = None
    if place.node_rank == 0:
        try:
            listener = listen(place.port, place.loopback)
        except UserError as error:
            fail(error)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # the store's thread, too, would take them
    try:
        if listener is None:
            yield place
            return
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store owns it from here on
        )
        yield replace(place, port=port)
        del store
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def wait_for(context: mp.ProcessContext | None) -> None:
    """Wait for spawned workers; when one fails, end all; pass SIGTERM and Ctrl-C on to them.

    Raises:
        SystemExit: with the exit code of the first worker that failed, 1 if it was killed,
            128 + n after signal n.
    """
    assert context is not None
    code = _Watch(context).code()
    if code:
        raise SystemExit(code)


class _Watch:
    """Waits for the workers of one node."""

    def __init__(self, context: mp.ProcessContext) -> None:
        self.context = context
        self.asked: list[float] = []  # when signals came
        self.first = 0  # and which was the first
        self.failed: tuple[int, int] | None = None  # local rank and code of the first that failed
        self.deadline = float("inf")
        self.alive = {process.sentinel: rank for rank, process in enumerate(context.processes)}

    def code(self) -> int:
        """Wait until nothing is left; the exit code of the node."""
        previous = {signum: signal.signal(signum, self._pass_on) for signum in STOPPING}
        previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        try:
            while self.alive:
                wait = min(1.0, max(0.0, self.deadline - time.monotonic()))
                for sentinel in multiprocessing.connection.wait(list(self.alive), timeout=wait):
                    self._ended(self.alive.pop(sentinel))  # type: ignore[arg-type, index]
                if time.monotonic() >= self.deadline:
                    self._kill()
        finally:
            # On the way out, one more signal would say that nothing was saved.
            stopped = self.asked and self.failed
            deaf = {signum: lambda *_: None for signum in STOPPING if stopped}
            for signum, handler in (previous | deaf).items():
                signal.signal(signum, handler)
        return self._meaning()

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and now - self.asked[0] < TWICE:
            return
        self.asked.append(now)
        if len(self.asked) == 1:
            self.first, self.deadline = signum, min(self.deadline, now + GRACE)
        for rank in self.alive.values():  # the second signal does not wait for a checkpoint
            self._send(rank, signum if len(self.asked) == 1 else signal.SIGKILL)

    def _send(self, local_rank: int, signum: int) -> None:
        """Send a signal to a worker, which may have just ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.context.processes[local_rank].pid, signum)

    def _ask(self, signum: int, _: FrameType | None) -> None:
        """Have one worker print what all ranks do."""
        for rank in sorted(self.alive.values())[:1]:
            self._send(rank, signum)

    def _ended(self, local_rank: int) -> None:
        process = self.context.processes[local_rank]
        process.join()
        if process.exitcode == 0 or self.failed is not None:
            return
        self.failed = local_rank, process.exitcode
        if not self.asked:  # the others may be printing their own error
            self.deadline = time.monotonic() + 2.0
        if process.exitcode > 0 or self.asked:
            return
        if process.exitcode == -signal.SIGKILL:  # it could not leave a note itself
            note(128 + signal.SIGKILL, len(self.context.processes))
        name = signal.Signals(-process.exitcode).name
        why = " (out of memory?)" if name == "SIGKILL" else ""
        advice = "Start again with --resume auto to go on from the last checkpoint"
        if name in ("SIGABRT", "SIGSEGV"):
            advice = "See what it printed"
        complain(
            f"the process with local rank {local_rank} was ended by {name}{why}; the others end, "
            f"too. {advice}"
        )

    def _kill(self) -> None:
        self.deadline = float("inf")
        if self.alive and self.asked:
            late = listed(sorted(self.alive.values()))
            complain(
                f"local rank(s) {late} did not stop within {GRACE:g} s and were killed; "
                f"what was saved is the last checkpoint"
            )
        for rank in self.alive.values():
            self._send(rank, signal.SIGKILL)

    def _meaning(self) -> int:
        if self.failed is None:
            return 0
        local_rank, code = self.failed
        if code < 0:
            if len(self.asked) > 1:
                complain(
                    f"ended by the second {signal.Signals(self.first).name}, without waiting for a "
                    f"checkpoint: what was saved is the last one; go on with --resume auto"
                )
            return 128 + self.first if self.asked else 1
        unreported = Path(self.context.error_files[local_rank])  # an exception outside of `record`
        if unreported.exists():
            complain(pickle.loads(unreported.read_bytes()))  # noqa: S301 - of our own process
            unreported.unlink()
        return code
