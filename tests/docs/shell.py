"""A shell whose `python` and `torchrun` start warm programs (see tests/warm.py)."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests import warm
from tests.conftest import STARTED

# Asks for a program, passes signals on to it, and ends as it does. With -IS it starts in 20 ms.
SHIM = """#!{python} -IS
import json, os, signal, socket, sys
stops = signal.SIGINT, signal.SIGTERM
signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # until there is somebody to pass them on to
words = [*{before}, *sys.argv[1:]]
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect({address!r})
socket.send_fds(asked, [json.dumps([words, dict(os.environ), os.getcwd()]).encode()], [1, 2])
answer = asked.recv(64)
if answer == b"cold":
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    os.execv({python!r}, [{python!r}, *words])
for signum in stops:
    signal.signal(signum, lambda signum, _: os.kill(int(answer), signum))
signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
code = int(asked.recv(64))
sys.exit(code if code >= 0 else 128 - code)
"""
COMMANDS: dict[str, tuple[str, ...]] = {"python": (), "torchrun": ("-m", "torch.distributed.run")}


@dataclass
class WarmShell:
    """Runs scripts; what their commands start is forked, but for modules in `cold`, which start from nothing."""

    folder: Path
    cold: set[str] = field(default_factory=set)

    def run(
        self, script: str, cwd: Path, env: dict[str, str], timeout: float, cold: set[str]
    ) -> subprocess.CompletedProcess[str]:
        self.cold = cold
        return subprocess.run(
            [shutil.which("bash") or "bash", "-c", f"set -e\n{script}"],
            cwd=cwd,
            env=env | {"PATH": f"{self.folder}:{Path(sys.executable).parent}:{env['PATH']}"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def serve(self, listening: socket.socket) -> None:
        with suppress(OSError):  # shut down at the end
            while True:
                threading.Thread(target=self.answer, args=(listening.accept()[0],), daemon=True).start()

    def answer(self, asked: socket.socket) -> None:
        """Start one program for a shim, and tell it the process and the exit code."""
        message, fds, _, _ = socket.recv_fds(asked, 1 << 20, 2)
        words, env, cwd = json.loads(message)
        own = {name: value for name, value in env.items() if name not in warm.PASSED_ON}
        modules = {name for flag, name in pairwise(words) if flag == "-m"}
        if not words or not warm.possible(words, own) or modules & self.cold:
            asked.send(b"cold")
        else:
            program = warm.Warm([sys.executable, *words], stdout=fds[0], stderr=fds[1], cwd=cwd, env=env, text=True)
            STARTED.add(program)
            asked.send(str(program.pid).encode())
            asked.send(str(program.wait()).encode())
        asked.close()
        for descriptor in fds:
            os.close(descriptor)


@contextmanager
def shell(folder: Path) -> Generator[WarmShell]:
    """A shell whose commands are in `folder`."""
    warm.start()
    address = str(folder / "socket")
    for name, before in COMMANDS.items():
        (folder / name).write_text(SHIM.format(python=sys.executable, before=before, address=address))
        (folder / name).chmod(0o755)
    found = WarmShell(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        serving = threading.Thread(target=found.serve, args=(listening,))
        serving.start()
        yield found
        listening.shutdown(socket.SHUT_RDWR)
        serving.join()
