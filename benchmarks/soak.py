"""Trains imagenet_ddp on two "nodes" while ranks, agents and nodes are killed, every few seconds.

    python -m benchmarks.soak --minutes 10

Each node is a torchrun agent with one worker; this program does for them what Kubernetes does for
pods: it starts again what has ended without success. When a training is done, its parameters and
the loss of each step are compared with those of an undisturbed one, its samples are counted, and
the next one begins, until the time is over. The kills follow from --seed:

* rank: SIGKILL of a worker; its agent, or both agents together, start the workers again;
* agent: SIGKILL of an agent; its worker must end by itself, or two of a kind would meet;
* node: SIGKILL of an agent and its worker at once; every other one hosts the rendezvous.

Processes are forked from one that has imported torch (`tests/warm.py`), and the model has a few
layers only, so that kills can come faster than imports would allow.
"""

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
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from common.launch.flags import at_least
from tests.conftest import Programs
from tests.make_data import draw_folder
from tests.runs import RECORD, accounted, losses, newest_step, result, tiny_imagenet

TRAIN = ("-m", "examples.imagenet_ddp", "-b", 12, "--image-size", 32, "--lr", 0.05)
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1),
    *("--max-restarts", 1000, "--monitor-interval", 0.1, "--local-addr", "127.0.0.1"),
    *("--rdzv-backend", "c10d", "--rdzv-id", "soak"),
)
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
IMAGES = 101
Words = tuple[object, ...]


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
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json)."""

    def __post_init__(self) -> None:
        at_least(0, minutes=self.minutes, pause=self.pause)
        at_least(1, epochs=self.epochs)


class Nodes:
    """Two agents, started again whenever they end without success.

    Args:
        programs: starts processes, and knows what is left of them.
        train: the words of the program and its flags.
        out: its --out.
        code: a copy of the project.
    """

    def __init__(self, programs: Programs, train: Words, out: Path, code: Path) -> None:
        self.programs, self.train, self.out, self.code = programs, train, out, code
        self.agents: list[subprocess.Popen[str] | None] = [None, None]
        self.starts = 0
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])

    def tend(self) -> bool:
        """Start what has to be started; whether the training is done, and both have ended."""
        if (self.out / "result.json").exists():
            for agent in filter(None, self.agents):
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(20)
            self.programs.kill()  # a node that was killed just now has nothing to join any more
            assert self.programs.gone(), f"left over: {self.programs.left()}"
            return True
        for number, agent in enumerate(self.agents):
            if agent is None or agent.poll() is not None:
                conf = f"{RENDEZVOUS},is_host={int(number == 0)}"
                meeting = ("--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", conf)
                words, log = (*TORCHRUN, *meeting, *self.train), self.out / f"node-{number}.log"
                self.agents[number] = self.programs.start(*words, log=log, cwd=self.code, env=APART)
                self.starts += 1
        return False

    def kill(self, kind: str, number: int) -> bool:
        """Kill a node's worker, its agent, or both; whether there was anything to kill."""
        agent, found = self.agents[number], False
        assert agent is not None
        worker = self.worker(agent.pid)
        for pid in {"rank": [worker], "agent": [agent.pid], "node": [agent.pid, worker]}[kind]:
            with suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    found = True
        return found

    def worker(self, agent: int) -> int:
        """The process of an agent's worker, or 0 if there is none just now."""
        for pid in self.programs.left():
            with suppress(OSError, ValueError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(state[1]) == agent and int(state[3]) == pid:  # a child with its own session
                    return pid
        return 0


class Soak:
    """Trainings and kills, until the time is over.

    Args:
        args: the flags.
        programs: starts processes, and knows what is left of them.
        folder: for the output.
    """

    def __init__(self, args: Args, programs: Programs, folder: Path) -> None:
        self.args, self.programs, self.folder = args, programs, folder
        draw_folder(folder / "images", train=IMAGES, val=23, size=40)
        self.code = tiny_imagenet(folder / "code", RECORD)
        flags = ("--epochs", args.epochs, "--checkpoint-every", 3)
        self.train, out = (*TRAIN, *flags, folder / "images"), folder / "undisturbed"
        programs.run(*self.train, "--nproc", 2, "--out", out, cwd=self.code, limit=600)
        self.hash, self.losses = result(out)["parameter_hash"], losses(out)
        self.chance, self.kills = random.Random(args.seed), Counter[str]()  # noqa: S311 - no secret
        self.end = time.monotonic() + 60 * args.minutes

    def training(self, out: Path) -> int:
        """Train once, with kills; returns how many agents were started for it."""
        out.mkdir()
        train = (*self.train, "--resume", "auto", "--out", out)
        nodes, pause = Nodes(self.programs, train, out, self.code), 2 * self.args.pause
        shown = time.monotonic()
        due = shown + self.chance.uniform(0, pause)
        while not nodes.tend():
            time.sleep(0.05)
            now, step = time.monotonic(), newest_step(out)
            if due < now < self.end and step > 0:
                kind = self.chance.choice(("rank", "rank", "agent", "node"))
                number = self.chance.randrange(2)
                if nodes.kill(kind, number):
                    host = number == 0 and kind != "rank"
                    self.kills[f"{kind} (host)" if host else kind] += 1
                due = now + self.chance.uniform(0, pause)
            if now - shown > 20:
                shown, at = now, f"{out.name}: step {step} of {len(self.losses)}"
                print(f"{at}, {self.kills.total()} kills", flush=True)
            late = now > self.end + 300
            assert not late, f"{out.name} does not end: {(out / 'node-0.log').read_text()[-3000:]}"
        self.check(out)
        with socket.create_server(("127.0.0.1", nodes.port)):
            pass  # nobody listens there any more
        shutil.rmtree(out)
        return nodes.starts

    def check(self, out: Path) -> None:
        """A training has the parameters and losses of the undisturbed one, and lost no sample."""
        name = out.name
        assert result(out)["parameter_hash"] == self.hash, f"{name} ended with other parameters"
        assert losses(out) == self.losses, f"{name}: the steps that count have other losses"
        for epoch, samples in accounted(out).items():
            each_once = sorted(samples) == list(range(IMAGES))
            assert each_once, f"{name}: epoch {epoch} lost samples, or has some twice"
        assert not list(out.rglob(".*.tmp")), "a half-written file is left"

    def run(self) -> dict[str, object]:
        """Train and kill until the time is over, and the last training is done."""
        memory, trainings, starts = shared_memory(), 0, 0
        while time.monotonic() < self.end:
            starts += self.training(self.folder / f"run-{trainings}")
            trainings += 1
        assert self.programs.gone(), f"left over: {self.programs.left()}"
        left = shared_memory() - memory
        assert not left, f"left over: {left}"
        found: dict[str, object] = {"kills": self.kills.total(), "trainings": trainings}
        found |= {"by_kind": dict(sorted(self.kills.items())), "steps_each": len(self.losses)}
        found |= {"starts_of_agents": starts, "parameter_hash": self.hash}
        checked = ("other_parameters", "other_losses", "samples_lost", "samples_twice", "left_over")
        return found | dict.fromkeys(checked, 0)


def shared_memory() -> set[Path]:
    """The pieces of shared memory that have a name."""
    return set(Path("/dev/shm").iterdir())  # noqa: S108 - only looked at


def main(args: Args) -> None:
    """Soak, and write what was measured."""
    programs, folder, about = Programs(), Path(tempfile.mkdtemp()), harness.facts("torch")
    try:
        found = Soak(args, programs, folder).run()
    finally:
        programs.kill()
        shutil.rmtree(folder, ignore_errors=True)
    flags = {"seed": args.seed, "minutes": args.minutes, "pause": args.pause}
    harness.save("soak", about | flags | found, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
