"""Training under torchrun while its workers, its agents and whole nodes are killed: the same bits at the end."""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import Programs
from tests.faults.conftest import FLAGS, TRAIN
from tests.machine import here
from tests.runs import RECORD, Eventually, accounted, losses, newest_step, result, slow, tiny_imagenet

TORCHRUN = ("-m", "torch.distributed.run")
STEPS, EVERY = 108, 3
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


def same(out: Path, other: Path) -> bool:
    """Whether two runs ended with the same bits, after the same losses."""
    return result(out)["parameter_hash"] == result(other)["parameter_hash"] and losses(out) == losses(other)


@pytest.mark.parametrize(("nproc", "seed"), [(2, 0), (3, 1), (2, 2)])
def test_six_kills_in_a_row(
    programs: Programs, tmp_path: Path, folder: Path, undisturbed: dict[int, Path], eventually: Eventually,
    nproc: int, seed: int,
) -> None:  # fmt: skip
    """Each at a random moment after a restart, of a random rank; less than a checkpoint interval is done again."""
    chance, log = random.Random(seed), tmp_path / "log"
    process = programs.start(
        *TORCHRUN, "--standalone", "--nproc-per-node", nproc, "--max-restarts", 6, "--monitor-interval", 0.1,
        *TRAIN, *FLAGS, "--checkpoint-every", EVERY, "--out", tmp_path, folder, log=log,
        cwd=tiny_imagenet(tmp_path / "slow", slow(0.03)),  # it lasts until the sixth
    )  # fmt: skip
    killed_at = []
    for kills in range(6):
        eventually(lambda kills=kills: log.read_text().count("resumed from") == kills, 60, f"start {kills}")
        goal = newest_step(tmp_path) + chance.randint(1, 6)
        eventually(lambda goal=goal: newest_step(tmp_path) >= goal, 60, f"step {goal}")
        time.sleep(chance.uniform(0, 0.05))
        killed_at.append(newest_step(tmp_path))
        os.kill(programs.worker(chance.randrange(nproc)), signal.SIGKILL)
    programs.finish(process)
    steps = [int(step) for step in re.findall(r"resumed from .* at step (\d+)", log.read_text())]
    assert len(steps) == 6
    assert all(before <= step < STEPS for before, step in zip(killed_at, steps, strict=True))
    assert same(tmp_path, undisturbed[nproc])


def agent(
    programs: Programs, port: int, tiny: Path, out: Path, *more: object, hosts: bool, nodes: str = "1:2"
) -> "subprocess.Popen[str]":
    """A node: torchrun with one worker, which meets the other at a port of this machine. Its output: `out`/log."""
    return programs.start(
        *TORCHRUN, "--nnodes", nodes, "--nproc-per-node", 1, "--max-restarts", 9, "--monitor-interval", 0.1,
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job",
        "--local-addr", "127.0.0.1", "--rdzv-conf", f"{QUICK},is_host={int(hosts)}",
        *TRAIN, *FLAGS, "--checkpoint-every", EVERY, "--out", out, *more,
        cwd=tiny, log=out / "log", env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip


def rank_of(programs: Programs, node: "subprocess.Popen[str]") -> int:
    """The rank of the worker of one of two nodes: torch orders nodes by their process numbers, not by their starts."""
    parents = [Path(f"/proc/{programs.worker(rank)}/stat").read_text().rpartition(")")[2].split()[1] for rank in (0, 1)]
    return parents.index(str(node.pid))


@pytest.mark.timed
def test_a_node_is_lost_and_comes_back(
    programs: Programs, tmp_path: Path, tiny: Path, folder: Path, free_port: int, eventually: Eventually
) -> None:
    """Training goes on with one node, then with two again; each sample of each epoch is trained on once."""

    def said(words: str, times: int = 1) -> bool:
        return (tmp_path / "log").read_text().count(words) >= times

    code = tiny_imagenet(tmp_path / "code", RECORD)
    more = ("--epochs", 2000, folder)
    first = agent(programs, free_port, code, tmp_path, *more, hosts=True)
    second = agent(programs, free_port, code, tmp_path, *more, hosts=False)
    eventually(lambda: said(", 2 x cpu"), 60, "two nodes")  # the first may have begun alone
    begun = newest_step(tmp_path)
    eventually(lambda: newest_step(tmp_path) >= begun + 12, 60, "12 steps")
    for pid in (second.pid, programs.worker(rank_of(programs, second))):
        os.kill(pid, signal.SIGKILL)
    second.wait()
    before = (tmp_path / "log").read_text().count("world 1 -> 2")
    started = time.monotonic()
    eventually(
        lambda: said("warning: continuing with 1 node(s), world 2 -> 1: the same samples follow in the same order"),
        60,
        "training with one node",
    )
    assert time.monotonic() - started < here(15)
    second = agent(programs, free_port, code, tmp_path, *more, hosts=False)
    started = time.monotonic()
    back = "warning: continuing with 2 node(s), world 1 -> 2: the same samples follow in the same order"
    eventually(
        lambda: said(back, before + 1),
        60,
        "training with two nodes",
    )
    assert time.monotonic() - started < here(20)
    stopped = newest_step(tmp_path)
    eventually(lambda: newest_step(tmp_path) > stopped + 9, 60, "training")
    for node in (first, second):
        node.send_signal(signal.SIGTERM)
    for node in (first, second):
        assert node.wait(here(30)) == 1, "torchrun's own code"
    log = (tmp_path / "log").read_text()
    assert "CheckError" not in log
    epochs = [int(epoch) for epoch in re.findall(r"^epoch (\d+)/2000  loss", log, re.MULTILINE)]
    assert sorted(set(epochs)) == list(range(1, max(epochs) + 1))
    assert stopped > 9 * epochs[0], "there were whole epochs in between"
    trained_on = accounted(tmp_path)
    for epoch in range(max(epochs)):
        assert sorted(trained_on[epoch]) == list(range(101)), f"epoch {epoch}: each sample once, and none lost"


@pytest.mark.timed
def test_workers_end_with_their_agent(
    programs: Programs, tmp_path: Path, tiny: Path, folder: Path, free_port: int, eventually: Eventually
) -> None:
    """SIGKILL of torchrun's agent: nobody would wait for the workers, restart them, or stop them."""
    node = agent(programs, free_port, tiny, tmp_path, "--epochs", 2000, folder, hosts=True, nodes="1")
    eventually(lambda: newest_step(tmp_path) >= 6, 60, "step 6")
    node.kill()
    node.wait()
    assert programs.gone(within=5)


@pytest.mark.timed
def test_the_rendezvous_host_is_lost(
    programs: Programs, tmp_path: Path, tiny: Path, folder: Path, undisturbed: dict[int, Path], free_port: int,
    eventually: Eventually,
) -> None:  # fmt: skip
    """The other node ends soon, with an error; both started again end with the bits of an undisturbed run."""
    host = agent(programs, free_port, tiny, tmp_path, folder, hosts=True, nodes="2")
    other = agent(programs, free_port, tiny, tmp_path, folder, hosts=False, nodes="2")
    eventually(lambda: newest_step(tmp_path) >= 12, 60, "step 12")
    rank = rank_of(programs, host)
    for pid in (host.pid, programs.worker(rank)):
        os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    assert other.wait(here(20)) != 0
    assert time.monotonic() - started < here(5)
    host_named = (
        r"lost another process "
        rf"\((the host of the rendezvous, 127\.0\.0\.1:\d+, is gone, too,|no word from rank {rank})"
    )
    assert re.search(host_named, (tmp_path / "log").read_text())
    host.wait()
    again = ("--resume", "auto", folder)
    nodes = [agent(programs, free_port, tiny, tmp_path, *again, hosts=hosts, nodes="2") for hosts in (True, False)]
    for node in nodes:
        assert node.wait(here(100)) == 0
    assert same(tmp_path, undisturbed[2])
