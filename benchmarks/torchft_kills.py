"""Replicas of a training with torchft that are killed and started again, for lost_ranks.py."""

import itertools
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT

SETTINGS = {  # how it averages gradients, and flags of its lighthouse
    "torchft, DistributedDataParallel": ("ddp",),
    "torchft, Manager.allreduce": ("allreduce",),
    "torchft, Manager.allreduce, lost after 1 s": (
        *("allreduce", "--heartbeat_timeout_ms", "1000"),
    ),
}
VERSION = "import importlib.metadata as m; print(m.version('torchft'))"
PATIENCE = 90.0  # seconds without the state that is waited for
Step = tuple[float, int, int]  # time, number, replicas that have taken part


def version(python: Path) -> str:
    """The version of torchft that a Python has."""
    words = [str(python), "-c", VERSION]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@dataclass
class Replica:
    """A process, and the file of what it prints."""

    process: subprocess.Popen[str]
    log: Path

    def steps(self) -> list[Step]:
        """What it has done so far."""
        words = [line.split() for line in self.log.read_text().split("\n")[:-1]]
        return [(float(at), int(number), int(size)) for at, number, size in words]


@dataclass
class Job:
    """Replicas and their lighthouse.

    Args:
        python: one that has torchft.
        ranks: replicas.
        batch: GLOBAL batch size.
        settings: one of SETTINGS.
        folder: for logs.
    """

    python: Path
    ranks: int
    batch: int
    settings: Sequence[str]
    folder: Path
    replicas: dict[int, Replica] = field(default_factory=dict)
    ended: list[Replica] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    address: str = ""

    def killed(self, kills: int, pause: float) -> tuple[list[float], list[float], list[str]]:
        """Kill replicas at random moments.

        Returns:
            Seconds that the others lost with each kill, and with each that joined; and the last
            lines of replicas that ended by themselves.

        Raises:
            RuntimeError: it does not train with all replicas.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        flags = ("--bind", self.address, "--min_replicas", "1", *self.settings[1:])
        program = str(self.python.parent / "torchft_lighthouse")
        processes = [self._popen((program, *flags), self.folder / "lighthouse")]
        chance, times = random.Random(0), list[float]()  # noqa: S311 - no secret
        try:
            for number in range(self.ranks):
                self._begin(number)
            self._wait_for_all()
            due = time.monotonic() + chance.uniform(0, 2 * pause)
            while len(times) < kills:
                self._tend()
                living = [number for number, one in self.replicas.items() if one.steps()]
                if time.monotonic() > due and len(living) > 1:
                    number = chance.choice(living)
                    self.replicas[number].process.kill()
                    times.append(time.time())
                    self.ended.append(self.replicas[number])
                    self._begin(number)
                    due = time.monotonic() + chance.uniform(0, 2 * pause)
                time.sleep(0.05)
            self._wait_for_all()
        finally:
            processes += [one.process for one in (*self.replicas.values(), *self.ended)]
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lost, joined = pauses([*self.replicas.values(), *self.ended], times)
        return lost, joined, self.errors

    def _popen(self, words: Sequence[str], log: Path) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"text": True, "start_new_session": True, "cwd": ROOT}
        environment = os.environ | {"RUST_LOG": "error"}
        with log.open("w") as out, log.with_suffix(".errors").open("w") as errors:
            streams |= {"stdout": out, "stderr": errors, "env": environment}
            return subprocess.Popen([str(self.python), *words], **streams)

    def _begin(self, number: int) -> None:
        log = self.folder / f"replica-{number}-{time.monotonic_ns()}"
        share = str(self.batch // self.ranks)
        words = ("-m", "benchmarks.torchft_replica", f"http://{self.address}", str(number), share)
        words += (self.settings[0],)
        self.replicas[number] = Replica(self._popen(words, log), log)

    def _tend(self) -> None:
        """Start replicas again that have ended by themselves."""
        for number, one in list(self.replicas.items()):
            if one.process.poll() is not None:
                lines = one.log.with_suffix(".errors").read_text().strip().splitlines()
                self.errors.append(lines[-1][:300] if lines else f"code {one.process.returncode}")
                self.ended.append(one)
                self._begin(number)

    def _wait_for_all(self) -> None:
        """Wait for a step in which all replicas take part."""
        late, began = time.monotonic() + PATIENCE, time.time()
        while time.monotonic() < late:
            self._tend()
            last = [one.steps()[-1:] for one in self.replicas.values()]
            if all(last) and all(each[0][0] > began and each[0][2] == self.ranks for each in last):
                return
            time.sleep(0.1)
        shown = "; ".join(self.errors) or "no error is shown"
        raise RuntimeError(f"no step with all replicas within {PATIENCE:g} s: {shown}")


def pauses(replicas: Sequence[Replica], kills: Sequence[float]) -> tuple[list[float], list[float]]:
    """Seconds from the last step before to the first step after each kill, and each joining.

    Args:
        replicas: all that have ever been.
        kills: their times.
    """
    first: dict[int, Step] = {}
    for one in sorted(step for replica in replicas for step in replica.steps()):
        first.setdefault(one[1], one)
    steps = sorted(first.values())
    gaps = list(itertools.pairwise(steps))
    lost = []
    for at, until in zip(kills, [*kills[1:], float("inf")], strict=True):
        after = [pair for pair in gaps if at < pair[1][0] and pair[0][0] < until]
        fewer = [pair for pair in after if pair[1][2] < pair[0][2]]
        # A replica that is back before the others notice: the number stays what it was.
        spent = [end[0] - start[0] for start, end in fewer[:1] or after]
        lost += [max(spent)] if spent else []
    joined = [end[0] - start[0] for start, end in gaps if end[2] > start[2]]
    return lost, joined
