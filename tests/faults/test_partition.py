"""Two nodes with a network of their own, which is cut. Needs root, and `ip` (Debian: iproute2)."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import Programs
from tests.faults.conftest import FLAGS
from tests.faults.network import NODE, ip
from tests.faults.test_restarts import same
from tests.machine import here
from tests.runs import Eventually, newest_step, tiny_imagenet


@pytest.mark.timed
def test_the_network_between_two_nodes_is_cut(
    programs: Programs, tmp_path: Path, tiny: Path, folder: Path, undisturbed: dict[int, Path], eventually: Eventually,
    network: tuple[str, str],
) -> None:  # fmt: skip
    """Both sides end, and write no checkpoint any more; when the cable is back, they go on."""

    def nodes(timeout: int) -> list["subprocess.Popen[str]"]:
        return [
            programs.start(
                "-c", NODE, space, "cable", "--nnodes", 2, "--nproc-per-node", 1, "--node-rank", number,
                "--master-addr", "10.77.0.1", "--master-port", 29500, "-m", "examples.imagenet_ddp", *FLAGS,
                "--checkpoint-every", 3, "--timeout", timeout, "--resume", "auto", "--out", tmp_path, folder,
                cwd=tiny, log=tmp_path / f"log-{number}",
            )
            for number, space in enumerate(network)
        ]  # fmt: skip

    timeout = round(here(8))  # both nodes import torch before they meet
    both = nodes(timeout)
    eventually(lambda: newest_step(tmp_path) >= 9, 100, "step 9")
    ip("-n", network[0], "link", "set", "cable", "down")
    started = time.monotonic()
    codes = [node.wait(timeout + here(52)) for node in both]
    assert time.monotonic() - started < timeout + here(37)
    assert codes == [75, 75], "start again"
    logs = [(tmp_path / f"log-{number}").read_text() for number in (0, 1)]
    lost = re.search(
        rf"lost another process \(no word from rank 1 in step (\d+).*: .*Timed out waiting {timeout}000ms", logs[0]
    )
    assert lost, logs[0]
    check_saved([newest_step(tmp_path)], int(lost[1]))
    assert "lost another process (the host of the rendezvous, 10.77.0.1:29500, is gone, too, in step" in logs[1], logs[
        1
    ]
    ip("-n", network[0], "link", "set", "cable", "up")
    assert [node.wait(here(100)) for node in nodes(60)] == [0, 0]
    assert same(tmp_path, undisturbed[2])


def check_saved(steps: list[int], lost_in: int) -> None:
    """What was saved needed both sides: whoever went on alone would save the step in which it was alone, or later."""
    assert all(step % 3 == 0 and step < lost_in for step in steps), (steps, lost_in)


WRITES = (  # whoever writes a checkpoint notes it
    "common/train/checkpoint.py",
    "        write(self.folder, step, state)\n",
    "        write(self.folder, step, state)\n"
    "        with open(__import__('os').environ['WRITES'], 'a') as notes:\n"
    "            notes.write(str(step) + '\\n')\n",
)


@pytest.mark.timed
def test_a_writer_that_is_cut_off_writes_no_more(
    programs: Programs, tmp_path: Path, folder: Path, eventually: Eventually, network: tuple[str, str]
) -> None:
    """Two ranks, of which one writes the checkpoints, on the side that cannot see the rendezvous any more."""
    code, timeout = tiny_imagenet(tmp_path / "code", WRITES), round(here(8))
    nodes = [
        programs.start(
            "-c", NODE, space, "cable", "--nnodes", 2, "--nproc-per-node", 2 - number, "--rdzv-backend", "c10d",
            "--rdzv-id", "job", "--rdzv-endpoint", "10.77.0.2:29500", "--rdzv-conf", f"is_host={number}",
            "--local-addr", f"10.77.0.{number + 1}", "-m", "examples.imagenet_ddp", *FLAGS,
            "--checkpoint-every", 3, "--timeout", timeout, "--resume", "auto", "--out", tmp_path / "out", folder,
            cwd=code, log=tmp_path / f"log-{number}",
            env={"WRITES": str(tmp_path / f"writes-{number}"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        for number, space in enumerate(network)
    ]  # fmt: skip
    eventually(lambda: newest_step(tmp_path / "out") >= 9, 100, "step 9")
    ip("-n", network[0], "link", "set", "cable", "down")
    started = time.monotonic()
    assert all(node.wait(timeout + here(52)) != 0 for node in nodes)
    assert time.monotonic() - started < timeout + here(37)
    assert not (tmp_path / "writes-1").exists(), "the writer is on the other side than the rendezvous"
    lost = re.search(r"lost another process \(.* in step (\d+)", (tmp_path / "log-0").read_text())
    assert lost, (tmp_path / "log-0").read_text()
    check_saved([int(step) for step in (tmp_path / "writes-0").read_text().split()], int(lost[1]))
