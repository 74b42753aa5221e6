"""Two nodes with a network of their own, which is cut. Needs root, and `ip` (Debian: iproute2)."""

import os
import re
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.conftest import Programs
from tests.faults.conftest import FLAGS
from tests.faults.test_restarts import same
from tests.runs import Eventually, newest_step

NODE = """
import os, sys
space, device, *command = sys.argv[1:]
os.environ["GLOO_SOCKET_IFNAME"] = device
os.execvp("ip", ["ip", "netns", "exec", space, sys.executable, "-m", "common.entrypoint", "--stuck", "8", "--",
                 sys.executable, "-m", "torch.distributed.run", *command])
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Generator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, joined by a cable."""
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


@pytest.mark.timed
def test_the_network_between_two_nodes_is_cut(
    programs: Programs, tmp_path: Path, tiny: Path, folder: Path, undisturbed: dict[int, Path], eventually: Eventually,
    network: tuple[str, str],
) -> None:  # fmt: skip
    """Both sides end, and write no checkpoint any more; when the cable is back, they go on."""

    def nodes() -> list["subprocess.Popen[str]"]:
        return [
            programs.start(
                "-c", NODE, space, "cable", "--nnodes", 2, "--nproc-per-node", 1, "--node-rank", number,
                "--master-addr", "10.77.0.1", "--master-port", 29500, "-m", "examples.imagenet_ddp.train", *FLAGS,
                "--checkpoint-every", 3, "--timeout", 8, "--resume", "auto", "--out", tmp_path, folder,
                cwd=tiny, log=tmp_path / f"log-{number}",
            )
            for number, space in enumerate(network)
        ]  # fmt: skip

    both = nodes()
    eventually(lambda: newest_step(tmp_path) >= 9, 100, "step 9")
    ip("-n", network[0], "link", "set", "cable", "down")
    started = time.monotonic()
    time.sleep(1)
    stopped = newest_step(tmp_path)
    codes = [node.wait(60) for node in both]
    assert time.monotonic() - started < 45
    assert codes == [75, 75], "start again"
    assert newest_step(tmp_path) == stopped
    logs = [(tmp_path / f"log-{number}").read_text() for number in (0, 1)]
    assert re.search(
        r"lost another process \(no word from rank 1 in step \d+.*: .*Timed out waiting 8000ms", logs[0]
    ), logs[0]
    assert "lost another process (the host of the rendezvous, 10.77.0.1:29500, is gone, too, in step" in logs[1], logs[
        1
    ]
    ip("-n", network[0], "link", "set", "cable", "up")
    assert [node.wait(100) for node in nodes()] == [0, 0]
    assert same(tmp_path, undisturbed[2])
