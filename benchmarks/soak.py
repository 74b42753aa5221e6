"""Trains imagenet_ddp on two "nodes" under torchrun while ranks, agents and nodes are killed, one every few seconds.

    python -m benchmarks.soak --minutes 10

Each node is a torchrun agent with one worker; this program does for them what Kubernetes does for pods: it starts
again what has ended without success. When a training is done, its parameters and the loss of each step are
compared with those of a training that nobody disturbed, its samples are counted, and the next one begins, until the
time is over. The kills
follow from --seed:

* rank: SIGKILL of a worker; its agent, or both agents together, start the workers again;
* agent: SIGKILL of an agent; its worker must end by itself, or two of a kind would meet;
* node: SIGKILL of an agent and its worker at once; every other one is the host of the rendezvous.

Processes are forked from one that has imported torch (`tests/warm.py`), and the model has a few layers only, so that
kills can come faster than imports would allow.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from common.flags import at_least, parse


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    minutes: float = 10.0
    """How long kills go on."""
    pause: float = 4.0
    """Seconds between kills, on average."""
    seed: int = 0
    """What the kills follow from."""
    epochs: int = 120
    """Epochs of 9 steps of each training."""
    out: Path = Path("benchmarks/results/soak.json")
    """The measurements."""

    def __post_init__(self) -> None:
        at_least(0, minutes=self.minutes, pause=self.pause)
        at_least(1, epochs=self.epochs)


if __name__ == "__main__":
    args = parse(Args, description=__doc__)

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime

from benchmarks.machine import describe_machine, describe_software
from tests.conftest import Programs
from tests.make_data import draw_folder
from tests.runs import RECORD, accounted, losses, newest_step, result, tiny_imagenet

TRAIN = ("-m", "examples.imagenet_ddp.train", "-b", 12, "--image-size", 32, "--lr", 0.05)
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


class Nodes:
    """Two agents, started again whenever they end without success."""

    def __init__(self, programs: Programs, port: int, flags: tuple[object, ...], out: Path, code: Path) -> None:
        self.programs, self.port, self.flags, self.out, self.code = programs, port, flags, out, code
        self.agents: list[subprocess.Popen[str] | None] = [None, None]
        self.starts = 0

    def tend(self) -> bool:
        """Start what has to be started; whether the training is done, and both have ended."""
        done = (self.out / "result.json").exists()
        if done:  # a node that is killed now has nothing to go on with
            for agent in self.agents:
                with suppress(subprocess.TimeoutExpired):
                    assert agent is not None
                    agent.wait(20)
            self.programs.kill()
            assert self.programs.gone(), f"left over: {self.programs.left()}"
            return True
        for number, agent in enumerate(self.agents):
            if agent is None or agent.poll() is not None:
                self.agents[number] = self.programs.start(
                    "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 1000,
                    "--monitor-interval", 0.1, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}",
                    "--rdzv-id", "soak", "--rdzv-conf", f"{RENDEZVOUS},is_host={int(number == 0)}",
                    "--local-addr", "127.0.0.1", *self.flags, log=self.out / f"node-{number}.log",
                    cwd=self.code, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                )  # fmt: skip
                self.starts += 1
        return False

    def kill(self, kind: str, number: int) -> bool:
        """Kill a node's worker, its agent, or both; whether there was anything to kill."""
        agent = self.agents[number]
        assert agent is not None
        worker, found = self.worker(agent.pid), False
        for pid in {"rank": [worker], "agent": [agent.pid], "node": [agent.pid, worker]}[kind]:
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    found = True
        return found

    def worker(self, agent: int) -> int:
        """The process of an agent's worker, or 0 if there is none just now."""
        for pid in self.programs.left():
            with suppress(OSError, ValueError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(state[1]) == agent and int(state[3]) == pid:  # its child, in a session of its own
                    return pid
        return 0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shared_memory() -> set[Path]:
    """The pieces of shared memory that have a name."""
    folder = Path("/dev/shm")  # noqa: S108 - only looked at
    return set(folder.iterdir()) if folder.is_dir() else set()


def soak(args: Args, programs: Programs, folder: Path) -> dict[str, object]:
    """Train and kill until the time is over, and the last training is done."""
    draw_folder(folder / "images", train=101, val=23, size=40)
    code = tiny_imagenet(folder / "code", RECORD)
    train = (*TRAIN, "--epochs", args.epochs, "--checkpoint-every", 3, folder / "images")
    programs.run(*train, "--nproc", 2, "--out", folder / "undisturbed", cwd=code, limit=600)
    expected = result(folder / "undisturbed")["parameter_hash"], losses(folder / "undisturbed")
    memory = shared_memory()
    chance, kills, runs, starts = random.Random(args.seed), Counter[str](), 0, 0  # noqa: S311 - no secret
    end = time.monotonic() + 60 * args.minutes
    while time.monotonic() < end:
        out = folder / f"run-{runs}"
        out.mkdir()
        nodes = Nodes(programs, free_port(), (*train, "--resume", "auto", "--out", out), out, code)
        due = time.monotonic() + chance.uniform(0, 2 * args.pause)
        shown = 0.0
        while not nodes.tend():
            time.sleep(0.05)
            now = time.monotonic()
            if due < now < end and newest_step(out) > 0:
                kind, number = chance.choice(("rank", "rank", "agent", "node")), chance.randrange(2)
                if nodes.kill(kind, number):
                    kills[f"{kind}{' (host)' if number == 0 and kind != 'rank' else ''}"] += 1
                due = now + chance.uniform(0, 2 * args.pause)
            if now - shown > 20:
                shown = now
                print(f"run {runs}: step {newest_step(out)} of {len(expected[1])}, {kills.total()} kills", flush=True)
            assert now < end + 300, f"run {runs} does not end: {(out / 'node-0.log').read_text()[-3000:]}"
        found = result(out)["parameter_hash"], losses(out)
        assert found[0] == expected[0], f"run {runs} ended with other parameters"
        assert found[1] == expected[1], f"run {runs}: the accounted steps have other losses"
        for epoch, samples in accounted(out).items():
            assert sorted(samples) == list(range(101)), f"run {runs}: epoch {epoch} lost samples, or has some twice"
        assert not list(out.rglob(".*.tmp")), "a half-written file is left"
        with socket.create_server(("127.0.0.1", nodes.port)):
            pass  # nobody listens there any more
        runs, starts = runs + 1, starts + nodes.starts
        shutil.rmtree(out)
    assert programs.gone(), f"left over: {programs.left()}"
    left = shared_memory() - memory
    assert not left, f"left over: {left}"
    return {
        "minutes": args.minutes, "pause": args.pause,
        "kills": kills.total(), "by_kind": dict(sorted(kills.items())), "trainings": runs,
        "steps_each": len(expected[1]), "starts_of_agents": starts, "parameter_hash": expected[0],
        "other_parameters": 0, "other_losses": 0, "samples_lost": 0, "samples_twice": 0, "left_over": 0,
    }  # fmt: skip


def main(args: Args) -> None:
    """Soak, and write what was seen."""
    programs = Programs()
    folder = Path(tempfile.mkdtemp())
    try:
        found = soak(args, programs, folder)
    finally:
        programs.kill()
        shutil.rmtree(folder, ignore_errors=True)
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine(),
        "versions": describe_software("torch"), "seed": args.seed,
    } | found  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    sys.exit(main(args))
