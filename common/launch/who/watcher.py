"""The thread by which a rank answers others.

It sleeps on a datagram socket: it is never in a training's way, a lost rank breaks no
connection, and strangers, who do not know the job's token, get no answer.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from common.launch import place
from common.launch.who import ask, calls, process
from common.launch.who.words import State, doing

watching: "Watcher | None" = None
"""That of this process."""


class Watcher:
    """Answers for this process.

    Args:
        roll: an address, process and node for each rank.
        token: what a process that asks must know.
        listening: the socket.
        patience: --timeout in seconds.
    """

    def __init__(
        self, roll: list[ask.Member], token: str, listening: socket.socket, patience: float
    ) -> None:
        self.roll, self.token, self.socket, self.pid = roll, token, listening, os.getpid()
        self.frozen: State | None = None
        self.file: Path | None = None
        self._leaving = False
        self._active: tuple[float, set[tuple[str, int]]] = 0.0, set()
        self._begun: list[dict[str, int]] = []
        self._counted: bytes | None = None
        self.socket.settimeout(min(1.0, patience / 4))
        threading.Thread(target=self._serve, daemon=True, name="who").start()

    def _serve(self) -> None:
        while True:
            try:
                asked, sender = self.socket.recvfrom(1024)
                if self._leaving:
                    self.socket.close()
                    return
                if asked == self.token.encode():
                    with _soon():
                        self.socket.sendto(json.dumps(self._answer()).encode(), sender)
            except TimeoutError:
                with contextlib.suppress(Exception):  # a group may be destroyed meanwhile
                    self._look()
            except Exception:  # noqa: S112 - a report is not worth a traceback, nor an end
                continue

    def _look(self) -> None:
        """Keep what goes on if nothing has begun since the last look."""
        begun = list(calls.begun().values())
        if begun != self._begun:
            self._begun, self._counted = begun, None
        elif (counted := calls.counted()) != self._counted:
            self._counted = counted
            self._active = time.time(), calls.active()

    def _answer(self) -> State:
        state = self.frozen or self.state()
        # A call that has just failed looks as if it had ended, until its error is caught.
        until = time.monotonic() + 0.3
        while doing(state) in ("runs", "waits") and time.monotonic() < until:
            time.sleep(0.02)
            state = self.frozen or state
        return state

    def state(self, trace: TracebackType | None = None) -> State:
        """What this rank does; with a traceback, what it did when it failed."""
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        frames = process.main_thread(trace and trace.tb_frame)
        if trace is not None:  # the line that failed, not the one that handles it
            frames = _lines_of(trace, frames)
        told = [*calls.collectives(), *calls.messages()]
        if trace is not None:
            self._mark_failed(told)
        where = process.of_example(frames)[:8]
        return {
            "rank": place.current().rank,
            "ranks": len(self.roll),
            "node": place.current().node_rank,
            "pid": self.pid,
            "loads": any(frame[0].endswith(calls.LOADERS) for frame in frames),
            "busy": trace is None and process.busy(),
            "where": where,
            "code": process.source(*where[0][:2]) if where else "",
            "calls": sorted(told, key=lambda call: call["made"]),
            "now": time.time(),
            "memory": process.memory(),
            "peak": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0,
            **calls.progress,
        }

    def _mark_failed(self, told: list[dict[str, Any]]) -> None:
        """Show the calls that failed as such that have not ended: the recorder ends them, too."""
        if any(not call["done"] for call in told) or not told:
            return
        when, active = self._active
        newest = max(told, key=lambda call: call["made"])
        if newest["made"] > when:
            active = set()
        for call in told:
            if (call["group"], call["number"]) in active and "peer" not in call:
                call["done"] = False
        newest["done"] = False

    def close(self) -> None:
        """Take the file away, and end the thread."""
        self._leaving = True
        if self.file is not None:
            self.file.unlink(missing_ok=True)
        self.socket.sendto(b"", self.socket.getsockname())


@contextlib.contextmanager
def _soon(seconds: float = 1e-4) -> Generator[None]:
    """Have a main thread that computes in Python let this thread go on sooner.

    An answer opens some files. After each, this thread waits for the interpreter: 5 ms, more on a
    busy machine; and the question ends after 1.5 s.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _lines_of(trace: TracebackType, frames: list[process.Frame]) -> list[process.Frame]:
    return [(frames[0][0], trace.tb_lineno, frames[0][2]), *frames[1:]]


def listen(loopback: bool, host: str, port: int) -> tuple[socket.socket, ask.Member]:
    """A socket for the questions, and what others need to know to ask.

    Args:
        loopback: whether all processes are on one machine.
        host: of the store; otherwise the address is that of the interface that leads to it.
        port: of the store.
    """
    # torch records 2,000 calls, which takes 20 ms to read; the process group does not exist yet.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    if loopback:
        listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listening.bind(("127.0.0.1", 0))
    else:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
        listening = socket.socket(family, kind)
        listening.bind((own, 0))
    return listening, {
        "address": [*listening.getsockname()[:2]],
        "pid": os.getpid(),
        "began": ask.began(),
        "table": ask.here(),
        "node": place.current().node_rank,
    }


def watch(roll: list[ask.Member], token: str, listening: socket.socket, patience: float) -> None:
    """Answer from now on."""
    global watching
    if watching is not None:
        watching.close()
    watching = Watcher(roll, token, listening, patience)
    calls.note_messages()


def publish(folder: Path) -> None:
    """Tell `python -m common.who FOLDER` where the ranks are; rank 0 calls this."""
    if watching is not None:
        file = folder / ask.FILE
        content = {"token": watching.token, "ranks": watching.roll}
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
            descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            os.write(descriptor, json.dumps(content).encode())
            os.close(descriptor)
            watching.file = file


def leave() -> None:
    """This process ends, or, in a notebook, what it has run: another may begin."""
    global watching
    if watching is not None and watching.pid == os.getpid():
        with contextlib.suppress(OSError):
            watching.close()
        watching = None
