"""Two nodes on one machine: network namespaces, joined by a cable that can be cut. Needs root, and `ip` (iproute2)."""

import os
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.conftest import ROOT
from tests.runs import Eventually

# A node is started by NODE, in a namespace, with a device of it, and torchrun's flags.
NODE = f"""
import os, sys
space, device, *command = sys.argv[1:]
os.environ["GLOO_SOCKET_IFNAME"] = device
os.execvp("ip", ["ip", "netns", "exec", space, sys.executable, "{ROOT}/docker/entrypoint.py", "--stuck", "4", "--",
                 sys.executable, "-m", "torch.distributed.run", *command])
"""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def pids(space: str) -> list[int]:
    """The processes of a node; one whose first thread has ended is missing, since `ip` does not see it."""
    return [int(pid) for pid in ip("netns", "pids", space).split()]


def ended(pid: int) -> bool:
    """Whether all threads of a process have ended: only then does the kernel close its connections.

    A thread that is killed while it waits for the disk, as a checkpoint's may, ends when the disk has answered. Until
    then the process looks like a zombie, but /proc/PID/task still lists the thread.
    """
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX" and len(list((process / "task").iterdir())) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def power_off(space: str, eventually: Eventually) -> None:
    """Kill all processes of a node, and wait for their end.

    Unlike at a real loss of power, the kernel closes their connections, so that the other node notices at once.
    """
    killed = set[int]()

    def off() -> bool:
        for pid in pids(space):  # again: one may have been forked meanwhile
            killed.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return all(map(ended, killed)) and not pids(space)

    eventually(off, 60, "the end of what was killed")


@contextmanager
def joined_by_a_cable() -> Generator[tuple[str, str]]:
    """The names of two namespaces, with the addresses 10.77.0.1 and 10.77.0.2."""
    spaces = f"ddp-{os.getpid()}-a", f"ddp-{os.getpid()}-b"
    for space in spaces:
        ip("netns", "add", space)
    try:
        ip("link", "add", "cable", "netns", spaces[0], "type", "veth", "peer", "name", "cable", "netns", spaces[1])
        for number, space in enumerate(spaces):
            ip("-n", space, "address", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", space, "link", "set", device, "up")
        yield spaces
    finally:
        for space in spaces:
            ip("netns", "delete", space)
