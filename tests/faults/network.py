"""Two nodes on one machine: network namespaces, joined by a cable that can be cut. Needs root, and `ip` (iproute2)."""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager

from tests.conftest import ROOT

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
    """All processes of a node."""
    return [int(pid) for pid in ip("netns", "pids", space).split()]


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
