"""What a machine with GPUs has to show: small trainings of every example, compared with each other.

A check runs programs and returns what it saw in a few words; it raises `Failed` if that is wrong.
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import Any

import torch
from torchvision.io import write_jpeg

from common.images.decode import DECODER

Check = Callable[[], str]
LONGEST = 240.0  # seconds for one program
FIRST = 10  # losses that are compared: later ones multiply what rounding has made of the first
# BatchNorm at 32 px multiplies rounding faster, on a CPU, too: between one thread and two, to 1e-5
# in step 4 and to 1e-2 in step 7. In step 4, half the learning rate changes the loss by 4e-3.
FEWER = {"imagenet_ddp": 4}

# One rank and many are the same training with these flags: no layer looks at a rank's own batch.
TRAININGS: dict[str, tuple[str, ...]] = {
    "mnist_ddp_spawn": ("--epochs", "2"),
    "mnist_dataparallel": ("--epochs", "2"),
    "gan_ddp": ("--epochs", "2"),
    "your_model": ("--epochs", "2"),
    "manual_allreduce_sgd": ("--epochs", "2"),
    "bert_dp": ("--epochs", "1", "--hidden", "64", "--dropout", "0", "-b", "24"),
    "resnet_pipeline": (
        *("-a", "resnet18", "--image-size", "32", "--images", "30", "-b", "12"),
        *("--micro-batches", "3", "--epochs", "2", "--norm", "group", "--balance", "even"),
    ),
    "imagenet_ddp": ("-a", "resnet18", "--image-size", "32", "--epochs", "1", "--lr", "0.0005"),
}


class Failed(Exception):  # noqa: N818 - of a check, not of this program
    """What was seen is not what should be."""


@dataclass(frozen=True)
class Machine:
    """Where the checks run.

    Args:
        device: cuda or cpu.
        out: folder for what the programs write.
        deadline: when the last program must have ended, as `time.monotonic` counts.
    """

    device: str
    out: Path
    deadline: float = math.inf

    @property
    def dry(self) -> bool:
        """Whether this only shows that the checks work: one of each kind is enough."""
        return self.device == "cpu"

    def start(self, label: str, *words: str, **variables: str) -> Popen[str]:
        """Start `python -m WORDS` in a session of its own; its output goes to LABEL.txt.

        Args:
            label: of its output.
            words: a module and its arguments.
            variables: of the environment, besides those of this process.
        """
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | variables
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / f"{label}.txt").open("w") as said:
            return Popen(
                [sys.executable, "-m", *words],
                env=environment,
                stdout=said,
                stderr=STDOUT,
                start_new_session=True,
                text=True,
            )

    def finish(self, label: str, process: Popen[str], code: int = 0) -> str:
        """Wait for a program.

        Returns:
            What it printed.

        Raises:
            Failed: it took too long, or ended with another exit code.
        """
        patience = LONGEST * (4 if self.dry else 1)  # a busy machine is not a failure
        patience = max(0.0, min(patience, self.deadline - time.monotonic()))
        try:
            ended = process.wait(patience)
        except TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Failed(f"{label}: not done within {patience:.0f} s") from None
        said = (self.out / f"{label}.txt").read_text()
        if ended != code:
            last = (said.strip().splitlines() or ["nothing was printed"])[-1]
            raise Failed(f"{label}: exit code {ended}, not {code}: {last}")
        return said

    def run(self, label: str, *words: str, **variables: str) -> str:
        """Run a program to its end; returns what it printed."""
        return self.finish(label, self.start(label, *words, **variables))

    def training(self, name: str, *flags: str, again: str = "") -> Path:
        """The folder of a small training in float32; the same one is not run twice.

        Args:
            name: the example.
            flags: besides those of TRAININGS.
            again: tells a repetition apart.
        """
        said = [Path(flag).name.strip("-") for flag in flags]
        label = "-".join([name, *said, *([again] * bool(again))])
        if not (self.out / label / "result.json").exists():
            self.run(label, *self.words(name, label, *flags))
        return self.out / label

    def words(self, name: str, label: str, *flags: str) -> list[str]:
        """A training's command."""
        fixed = ["--precision", "fp32", "--out", str(self.out / label), "--checkpoint-every", "3"]
        own = [] if "--device" in flags else ["--device", self.device]
        own += ["--threads", "1"] if self.dry else []  # several programs run at once
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


def apart(one: Path, other: Path, first: int = FIRST) -> float:
    """The largest relative difference of the first losses; infinite where one is not finite."""
    pairs = zip(losses(one)[:first], losses(other)[:first], strict=True)
    found = [abs(a - b) / max(abs(a), 1e-12) for a, b in pairs]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def same_losses(one: Path, other: Path, first: int = FIRST, most: float = 1e-3) -> str:
    """Check that the first losses of two trainings agree up to rounding."""
    found = apart(one, other, first)
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
    while process.poll() is None and not any(saved.glob("step-*.pt")):
        if time.monotonic() > machine.deadline:
            break
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
    on_the_cpu, first = machine.training(name, "--device", "cpu"), FEWER.get(name, FIRST)
    return same_losses(on_the_cpu, machine.training(name), first)


def several(machine: Machine, name: str, ranks: int, *flags: str) -> str:
    """A training by several ranks: the losses of one?"""
    # The pipeline's own batch normalisation is off; imagenet_ddp's is per rank without this.
    sync = ("--sync-bn",) if name == "imagenet_ddp" else ()
    many = machine.training(name, "--nproc", str(ranks), *flags, *sync)
    # A CPU has trained with --deterministic already: it makes no difference there.
    one = machine.training(name, *(["--deterministic"] if machine.dry else []))
    seen = same_losses(one, many, FEWER.get(name, FIRST))
    return seen if machine.dry else f"{seen}, {ranks} ranks on {torch.cuda.device_count()} GPU(s)"


def decoded(machine: Machine) -> str:
    """JPEGs of a folder, decoded in loader workers: the same training as without workers?"""
    folder = machine.out / "jpegs"
    generator = torch.Generator().manual_seed(0)
    for number in range(36):
        pixels = torch.randint(256, (3, 60, 80), dtype=torch.uint8, generator=generator)
        file = folder / ("val" if number % 3 == 0 else "train") / str(number % 2) / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_jpeg(pixels, str(file))
    same = ("-b", "12", "--deterministic")
    alone, workers = (
        machine.training("imagenet_ddp", str(folder), *same, "--workers", count) for count in "02"
    )
    return f"{DECODER}: {same_bits(alone, workers)}"
