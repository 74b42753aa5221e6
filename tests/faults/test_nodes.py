"""Two nodes of every program: one is lost and comes back, the host of the rendezvous is lost, the network is cut.

imagenet_ddp, with an account of each sample: tests/faults/test_restarts.py and tests/faults/test_partition.py.
"""

import re
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.conftest import Programs
from tests.faults.jobs import PROGRAMS, Job, Jobs
from tests.faults.network import ended, ip, power_off
from tests.faults.test_restarts import QUICK, same
from tests.machine import here
from tests.runs import Eventually, newest_step, slow
from tests.warm import SPACE

OTHERS = [program for program in PROGRAMS if program != "imagenet_ddp"]


class Nodes:
    """Starts two nodes with one process each; both write into one log."""

    def __init__(self, programs: Programs, job: Job, network: tuple[str, str], out: Path) -> None:
        self.programs, self.network, self.out, self.log = programs, network, out, out.with_suffix(".log")
        self.job, self.code = job, job.code
        self.timeout = round(here(8))

    def start(self, number: int, *words: object, timeout: int) -> "subprocess.Popen[str]":
        flags = (*self.job.every, "--timeout", timeout, "--resume", "auto", "--out", self.out)
        env = {SPACE: self.network[number], "GLOO_SOCKET_IFNAME": "cable", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return self.programs.start(*words, *flags, cwd=self.code, log=self.log, env=env)

    def elastic(self, number: int) -> "subprocess.Popen[str]":
        """Under torchrun: one or two nodes, which meet at the first."""
        return self.start(
            number, "-m", "torch.distributed.run", "--nproc-per-node", 1, "--nnodes", "1:2", "--max-restarts", 9,
            "--monitor-interval", 0.1, "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29500",
            "--rdzv-id", "job", "--local-addr", f"10.77.0.{number + 1}",
            "--rdzv-conf", f"{QUICK},is_host={1 - number}", *self.job.endless, timeout=self.timeout,
        )  # fmt: skip

    def static(self, number: int, timeout: int) -> "subprocess.Popen[str]":
        """By itself: two nodes, which have numbers. (Under torchrun: tests/faults/test_partition.py.)"""
        url = ("--world-size", 2, "--rank", number, "--dist-url", "tcp://10.77.0.1:29500")
        return self.start(number, *self.job.words, *url, timeout=timeout)

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def timed_out(self) -> int:
        """How often gloo has waited for `--timeout`, as it does when a rank is lost in the middle of a message."""
        return self.log.read_text().count(f"Timed out waiting {self.timeout}000ms for")


@pytest.fixture
def nodes(programs: Programs, jobs: Jobs, program: str, network: tuple[str, str], tmp_path: Path) -> Generator[Nodes]:
    """Two nodes; what they have said is shown if the test fails, but for the stacks of C++."""
    nodes = Nodes(programs, jobs[program], network, tmp_path / "out")
    yield nodes
    print(re.sub(r"^(frame #.*|<omitting python frames>|)\n", "", nodes.log.read_text(), flags=re.MULTILINE))


@pytest.mark.timed
@pytest.mark.parametrize("program", OTHERS)
def test_a_node_is_lost_and_comes_back_and_the_host_is_lost(
    nodes: Nodes, network: tuple[str, str], program: str, eventually: Eventually
) -> None:
    """Training goes on with one node, then with two; the programs check each epoch themselves."""
    first, second = nodes.elastic(0), nodes.elastic(1)
    eventually(lambda: nodes.said(", 2 x cpu"), 60, "two nodes")  # the first may have begun alone
    begun = newest_step(nodes.out)
    eventually(lambda: newest_step(nodes.out) >= begun + 6, 60, "6 steps")
    power_off(network[1], eventually)
    second.wait()
    started = time.monotonic()
    eventually(
        lambda: nodes.said(
            "warning: continuing with 1 node(s), world 2 -> 1: the same samples follow in the same order"
        ),
        60,
        "training with one node",
    )
    assert time.monotonic() - started < here(15) + (nodes.timeout if nodes.timed_out() else 0)
    again = "warning: continuing with 2 node(s), world 1 -> 2: the same samples follow in the same order"
    before = nodes.log.read_text().count(again)
    second = nodes.elastic(1)
    started = time.monotonic()
    eventually(
        lambda: nodes.log.read_text().count(again) > before,
        60,
        "training with two nodes",
    )
    assert time.monotonic() - started < here(20)
    stopped = newest_step(nodes.out)
    eventually(lambda: newest_step(nodes.out) > stopped + 9, 60, "training")
    assert not nodes.said("CheckError")
    timed_out = nodes.timed_out()
    power_off(network[0], eventually)
    first.wait()
    started = time.monotonic()
    assert second.wait(nodes.timeout + here(20)) == 1, "torchrun's own code"
    assert time.monotonic() - started < here(5) + (nodes.timeout if nodes.timed_out() > timed_out else 0)
    host = r"lost another process \((the host of the rendezvous, 10\.77\.0\.1:\d+, is gone, too,|no word from rank \d)"
    assert re.search(host, nodes.log.read_text())


@pytest.mark.timed
@pytest.mark.parametrize("program", OTHERS)
def test_the_network_is_cut(nodes: Nodes, jobs: Jobs, program: str, eventually: Eventually) -> None:
    """Both sides end, and write no checkpoint any more; when the cable is back, they go on to the same bits."""
    timeout, nodes.code = nodes.timeout, jobs.broken("slow", slow(0.05))
    both = [nodes.static(0, timeout), nodes.static(1, timeout)]
    eventually(lambda: newest_step(nodes.out) >= 6, 60, "step 6")
    ip("-n", nodes.network[0], "link", "set", "cable", "down")
    started = time.monotonic()
    assert [node.wait(timeout + here(52)) for node in both] == [1, 1]
    assert time.monotonic() - started < timeout + here(37)
    said = nodes.log.read_text()
    lost = re.search(r"rank 0: lost another process \(no word from rank 1 in step (\d+)", said)
    assert lost, said
    assert newest_step(nodes.out) < int(lost[1]), "what was saved needed both sides"
    assert re.search(
        r"rank 1: lost another process \(the host of the rendezvous, 10\.77\.0\.1:29500, is gone, too,", said
    )
    ip("-n", nodes.network[0], "link", "set", "cable", "up")
    nodes.code = nodes.job.code
    assert [node.wait(here(100)) for node in (nodes.static(0, 60), nodes.static(1, 60))] == [0, 0]
    assert same(nodes.out, jobs.whole(program, 2))


def test_a_process_has_ended_with_its_last_thread(programs: Programs, tmp_path: Path, eventually: Eventually) -> None:
    """One whose first thread has ended looks like a zombie, and keeps its connections."""
    # the system call exit, of this thread only: 60 on x86-64, 93 on arm64
    first_ends = "syscall(60 if platform.machine() == 'x86_64' else 93, 0)"
    process = programs.start(
        "-c",
        "import ctypes, platform, threading, time\n"
        f"threading.Thread(target=time.sleep, args=(1000,)).start()\nctypes.CDLL(None).{first_ends}",
        cold=True,
        log=tmp_path / "log",
    )
    state = Path(f"/proc/{process.pid}/stat")
    eventually(lambda: ") Z " in state.read_text(), 20, "the end of the first thread")
    assert not ended(process.pid)
    process.kill()
    eventually(lambda: ended(process.pid), 20, "the end")
    assert process.wait() == -9
