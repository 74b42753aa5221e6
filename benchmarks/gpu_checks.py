"""What a machine with GPUs has to show: small trainings of every example, compared with each other.

A check runs programs and returns what it saw in a few words; it raises `Failed` if that is wrong.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Check = Callable[[], str]
LONGEST = 240.0  # seconds for one program
PATIENCE = 20.0  # the --timeout of the faults
FIRST = 10  # losses that are compared: later ones multiply what rounding has made of the first

# One rank and many are the same training with these flags: no layer looks at a rank's own batch.
TRAININGS: dict[str, tuple[str, ...]] = {
    "mnist_ddp_spawn": ("--epochs", "2"),
    "mnist_dataparallel": ("--epochs", "2"),
    "gan_ddp": ("--epochs", "2"),
    "your_model": ("--epochs", "2"),
    "manual_allreduce_sgd": ("--epochs", "2"),
    "bert_dp": ("--epochs", "1", "--hidden", "64", "--dropout", "0"),
    "resnet_pipeline": (
        *("-a", "resnet18", "--image-size", "32", "--images", "30", "-b", "12"),
        *("--micro-batches", "3", "--epochs", "2", "--norm", "group", "--balance", "even"),
    ),
    "imagenet_ddp": ("-a", "resnet18", "--image-size", "32", "--epochs", "1"),
}


class Failed(Exception):  # noqa: N818 - of a check, not of this program
    """What was seen is not what should be."""


@dataclass(frozen=True)
class Machine:
    """Where the checks run.

    Args:
        device: cuda or cpu.
        out: folder for what the programs write.
    """

    device: str
    out: Path

    def start(self, label: str, *words: str) -> subprocess.Popen[str]:
        """Start `python -m WORDS` in a session of its own; its output goes to LABEL.txt."""
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / f"{label}.txt").open("w") as said:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )

    def finish(self, label: str, process: subprocess.Popen[str], code: int = 0) -> str:
        """Wait for a program.

        Returns:
            What it printed.

        Raises:
            Failed: it took too long, or ended with another exit code.
        """
        try:
            ended = process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Failed(f"{label}: not done within {LONGEST:.0f} s") from None
        said = (self.out / f"{label}.txt").read_text()
        if ended != code:
            last = (said.strip().splitlines() or ["nothing was printed"])[-1]
            raise Failed(f"{label}: exit code {ended}, not {code}: {last}")
        return said

    def run(self, label: str, *words: str) -> str:
        """Run a program to its end; returns what it printed."""
        return self.finish(label, self.start(label, *words))

    def training(self, name: str, *flags: str, again: str = "") -> Path:
        """The folder of a small training in float32; the same one is not run twice.

        Args:
            name: the example.
            flags: besides those of TRAININGS.
            again: tells a repetition apart.
        """
        label = "-".join([name, *(flag.strip("-") for flag in flags), *([again] * bool(again))])
        if not (self.out / label / "result.json").exists():
            self.run(label, *self.words(name, label, *flags))
        return self.out / label

    def words(self, name: str, label: str, *flags: str) -> list[str]:
        """A training's command."""
        fixed = ["--precision", "fp32", "--out", str(self.out / label), "--checkpoint-every", "3"]
        own = [] if "--device" in flags else ["--device", self.device]
        return [f"examples.{name}", *TRAININGS[name], *fixed, *own, *flags]


def result(out: Path) -> dict[str, Any]:
    """What a training wrote at its end."""
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def losses(out: Path) -> list[float]:
    """The loss of each step."""
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [record["loss/train"] for record in records if "loss/train" in record]


def same_bits(one: Path, other: Path) -> str:
    """Check that two trainings ended with the same parameters."""
    hashes = [result(out)["parameter_hash"][:12] for out in (one, other)]
    if hashes[0] != hashes[1]:
        raise Failed(f"parameters {hashes}; the first losses differ by {apart(one, other):.1e}")
    return f"parameters {hashes[0]}"


def apart(one: Path, other: Path) -> float:
    """The largest relative difference of the first losses; infinite where one is not finite."""
    pairs = zip(losses(one)[:FIRST], losses(other)[:FIRST], strict=True)
    found = [abs(a - b) / max(abs(a), 1e-12) for a, b in pairs]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def same_losses(one: Path, other: Path, most: float = 1e-3) -> str:
    """Check that the first losses of two trainings agree up to rounding."""
    found = apart(one, other)
    if found > most:
        raise Failed(f"the first losses differ by {found:.1e}, more than {most:.0e}")
    return f"losses within {found:.1e}, backend {result(other)['backend']}"


def repeated(machine: Machine, name: str) -> str:
    """The same command twice, with --deterministic: the same bits?"""
    first = machine.training(name, "--deterministic")
    return same_bits(first, machine.training(name, "--deterministic", again="again"))


def resumed(machine: Machine, name: str) -> str:
    """Killed in the middle and resumed: the bits of an undisturbed run?"""
    whole, label = machine.training(name, "--deterministic"), f"{name}-killed"
    words = machine.words(name, label, "--deterministic", "--resume", "auto")
    process, saved = machine.start(label, *words), machine.out / label / "checkpoints"
    deadline = time.monotonic() + LONGEST
    while process.poll() is None and not any(saved.glob("step-*.pt")):
        if time.monotonic() > deadline:
            raise Failed(f"{label}: no checkpoint within {LONGEST:.0f} s")
        time.sleep(0.01)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise Failed(f"{label}: it ended before it was killed")
    said = machine.run(label, *words)
    if "resumed from" not in said:
        raise Failed(f"{label}: it did not resume")
    return same_bits(whole, machine.out / label)


def as_on_the_cpu(machine: Machine, name: str) -> str:
    """The same training on the CPU: the same losses in float32?"""
    return same_losses(machine.training(name, "--device", "cpu"), machine.training(name))


def several(machine: Machine, name: str, ranks: int, *flags: str) -> str:
    """A training by several ranks: the losses of one?"""
    # The pipeline's own batch normalisation is off; imagenet_ddp's is per rank without this.
    sync = ("--sync-bn",) if name == "imagenet_ddp" else ()
    many = machine.training(name, "--nproc", str(ranks), *flags, *sync)
    return same_losses(machine.training(name), many)


def lost(machine: Machine, stopped: bool) -> str:
    """One of two ranks is killed, or stops: the other ends in time, and says why."""
    label = "lost-" + ("stopped" if stopped else "killed")
    flags = ("--nproc", "2", "--epochs", "100000", "--timeout", f"{PATIENCE:g}")
    process = machine.start(label, *machine.words("mnist_ddp_spawn", label, *flags))
    saved = machine.out / label / "checkpoints"
    deadline = time.monotonic() + LONGEST
    while process.poll() is None and not any(saved.glob("step-*.pt")):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    workers = ranks_of(process.pid)
    try:
        if len(workers) < 2:
            raise Failed(f"{label}: {len(workers)} rank(s) are there, not 2")
        os.kill(workers[1], signal.SIGSTOP if stopped else signal.SIGKILL)
        started, allowed = time.monotonic(), PATIENCE * stopped + 10
        try:
            code = process.wait(allowed)
        except subprocess.TimeoutExpired:
            raise Failed(f"{label}: still there after {allowed:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said = (machine.out / f"{label}.txt").read_text().splitlines()
    error = next((line for line in said if line.startswith("error: ")), "")
    if code != 1 or not ("lost another process" in error or "was ended by SIGKILL" in error):
        raise Failed(f"{label}: exit code {code}: {said[-1] if said else 'nothing was printed'}")
    return f"ended after {time.monotonic() - started:.1f} s: {error}"


def ranks_of(parent: int) -> list[int]:
    """The processes that a program's ranks run in, in their order: children of its fork server."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    children = [pid for pid, of in parents.items() if of == parent]
    return sorted(pid for pid, of in parents.items() if of in children)
