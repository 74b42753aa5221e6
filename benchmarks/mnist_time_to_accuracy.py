"""Time from the start of the command to 99 % test accuracy on MNIST, against pytorch/examples.

    python -m benchmarks.mnist_time_to_accuracy --data-dir DIR --peer ../pytorch-examples
    python -m benchmarks.mnist_time_to_accuracy --data-dir DIR        # only our program

In every round each program runs once, the peer with its default recipe, ours with that of `RECIPE`.
A run ends with the output line that reports the accuracy; the peer is then ended. The seconds are
split into

* start-up: until training begins (ours: by its result.json; peer: until its first batch's line);
* training;
* evaluation (peer: from the last `Train Epoch` line to `Test set`, with up to 9 batches);
* other, ours only: what result.json counts in none of these, mainly Python's start, predictions
  and the best model.

Before the first round each program is started once, to compile bytecode and fill the file cache.
"""

import json
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.commands import check_peer, observe, peer_facts
from benchmarks.harness import ROOT, Measurement, against_peer, compare, facts
from common.launch.errors import UserError
from common.launch.flags import at_least

PEER, MAIN = "pytorch/examples mnist", "mnist/main.py"
RECIPE = "--lr 0.3"
OURS = f"python -m examples.mnist_ddp_spawn --dataset mnist --data-dir DATA_DIR {RECIPE} --out OUT"
FILES = [
    f"{part}-{kind}-ubyte.gz"
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]
Sample = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Args(Measurement):
    """The flags of this program."""

    rounds: int = 3
    data_dir: Path
    """Folder with the four idx files of MNIST (.gz), in itself or in MNIST/raw."""
    peer: Path | None = None
    """Checkout of https://github.com/pytorch/examples; without it only our program is measured."""
    target: float = 0.99
    """Test accuracy to reach."""
    peer_epochs: int = 14
    """Epochs after which the peer is given up (its default)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, peer_epochs=self.peer_epochs)
        if not 0 < self.target <= 1:
            raise UserError(f"--target {self.target:g}: give a share of the test set, at most 1")
        check_peer(self.peer, MAIN)


def sample(evaluations: list[tuple[float, float]], target: float, **more: Any) -> Sample:
    """One run, from its evaluations up to the first that reaches the target, or all.

    Args:
        evaluations: seconds since the start of the process, and accuracy.
        target: accuracy to reach.
        more: figures of the run.
    """
    if not evaluations:
        raise SystemExit("error: a program printed no accuracy")
    best = max(accuracy for _, accuracy in evaluations)
    seconds, epochs = evaluations[-1][0], len(evaluations)
    return {
        "seconds": seconds,
        "reached": best >= target,
        "accuracy": best,
        "epochs": epochs,
        **more,
    }


def run_ours(command: str, data: Path, target: float) -> Sample:
    """Run `mnist_ddp_spawn` to its end: result.json, with its own times, is written last."""
    evaluations: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as out:
        for now, line in observe(command, ROOT, {"DATA_DIR": str(data), "OUT": out}):
            match = re.match(r"epoch \d+/\d+ .*\bacc +([\d.]+)%", line)
            if match and all(accuracy < target for _, accuracy in evaluations):
                evaluations.append((now, float(match[1]) / 100))
        result = json.loads(Path(out, "result.json").read_text())
    names = {"startup": "startup", "training": "train", "evaluation": "eval"}
    spent = {name: result["seconds"][key] for name, key in names.items()}
    found = sample(evaluations, target, **spent, device=result["device"])
    return {**found, "other": found["seconds"] - sum(spent.values())}


def run_peer(command: str, folder: Path, target: float) -> Sample:
    """Run `mnist/main.py` until it reaches the target."""
    startup = trained = evaluation = 0.0
    evaluations: list[tuple[float, float]] = []
    with closing(observe(command, folder, {})) as lines:
        for now, line in lines:
            if line.startswith("Train Epoch:"):
                startup, trained = startup or now, now
            elif match := re.match(r"Test set: .*Accuracy: (\d+)/(\d+)", line):
                evaluations.append((now, int(match[1]) / int(match[2])))
                evaluation += now - trained
                if evaluations[-1][1] >= target:
                    break
    spent = {"startup": startup, "evaluation": evaluation, "other": 0.0, "device": ""}
    found = sample(evaluations, target, **spent)
    return {**found, "training": found["seconds"] - startup - evaluation}


def find_data(directory: Path) -> Path:
    """The folder that holds the four files.

    Raises:
        UserError: a file is missing.
    """
    for folder in (directory, directory / "MNIST/raw"):
        if all((folder / name).is_file() for name in FILES):
            return folder.resolve()
    needed = f"it must hold {', '.join(FILES)}, in itself or in MNIST/raw"
    raise UserError(f"--data-dir {directory}: {needed}")


def copy_peer(checkout: Path, data: Path, folder: Path) -> Path:
    """The peer's program in a folder beside its data, which it reads from ../data."""
    shutil.copytree(data, folder / "data/MNIST/raw")
    (folder / "mnist").mkdir()
    shutil.copy(checkout / MAIN, folder / "mnist")
    return folder / "mnist"


def show(name: str, one: Sample) -> str:
    """A line for one run."""
    missed = "" if one["reached"] else f": TARGET NOT REACHED in {one['epochs']} epoch(s)"
    return f"{name}, {one['seconds']:.1f} s, accuracy {one['accuracy']:.4f}{missed}"


def speed(one: Sample) -> float | None:
    """Of a run, for ratios; None if it did not reach the target."""
    return 1 / one["seconds"] if one["reached"] else None


def main(args: Args) -> None:
    """Measure, write the results, show them."""
    data, about = find_data(args.data_dir), facts("torch", "torchvision")
    commands = {"ours, 1 process": OURS, "ours, 2 processes": f"{OURS} --nproc 2"}
    runs: dict[str, Callable[[], Sample]] = {
        name: partial(run_ours, command, data, args.target) for name, command in commands.items()
    }
    with tempfile.TemporaryDirectory() as temporary:
        for command in commands.values():
            digits = command.replace("--dataset mnist", "--dataset digits --epochs 1")
            deque(observe(digits, ROOT, {"DATA_DIR": ".", "OUT": temporary}), maxlen=0)
        if args.peer:
            folder = copy_peer(args.peer, data, Path(temporary, "peer"))
            command = f"python -u main.py --epochs {args.peer_epochs}"
            commands[PEER] = f"cd PEER/mnist && {command}"
            runs[PEER] = partial(run_peer, command, folder, args.target)
            with closing(observe(command, folder, {})) as lines:
                next(line for _, line in lines if line.startswith("Train Epoch:"))
        samples = compare(runs, args.rounds, show=show)
    medians = against_peer(samples, PEER, speed)
    for name, each in samples.items():
        if not all(one["reached"] for one in each):
            medians[name]["seconds"] = None
    result: dict[str, Any] = {"target": args.target, "rounds": args.rounds, "commands": commands}
    result |= {"samples": samples, "medians": medians, **peer_facts(args.peer, MAIN, PEER)}
    harness.save("mnist_time_to_accuracy", about | result, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
