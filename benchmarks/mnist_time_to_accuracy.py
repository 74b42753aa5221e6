"""Time from the start of the command to 99 % test accuracy on MNIST, beside pytorch/examples `mnist/main.py`.

    python -m benchmarks.mnist_time_to_accuracy --data-dir data --peer ../pytorch-examples
    python -m benchmarks.mnist_time_to_accuracy --data-dir data                            # ours only

In every round each program runs once, one after the other, with its default recipe. A run ends with the output line
that reports the accuracy; the peer is then ended. The seconds are split into

* start-up: until training begins (ours: by its result.json; peer: until the line of its first batch);
* training;
* evaluation (peer: from the last `Train Epoch` line to `Test set`, so with up to 9 batches of training);
* other, ours only: what result.json counts in none of these, mainly Python's start, predictions and best model.

Before the first round each program is started once without being counted, to compile bytecode and fill the file cache.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from benchmarks.machine import describe_machine, describe_software
from common.errors import UserError
from common.flags import at_least, fail, parse

ROOT = Path(__file__).parents[1]
PEER = "pytorch/examples mnist"
FILES = [f"{part}-{kind}.gz" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
PARTS = {"startup": "#999999", "training": "#0072b2", "evaluation": "#e69f00", "other": "#dddddd"}
UNWANTED = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")  # slow start-up; one thread for the peer, but not for us


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    data_dir: Path
    """Folder with the four idx files of MNIST (.gz), in itself or in MNIST/raw."""
    peer: Path | None = None
    """Checkout of https://github.com/pytorch/examples; without it only our program is measured."""
    rounds: int = 3
    """Runs of each program."""
    target: float = 0.99
    """Test accuracy to reach."""
    peer_epochs: int = 14
    """Epochs after which the peer is given up (its default)."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json) and the chart (.png)."""

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, peer_epochs=self.peer_epochs)
        if not 0 < self.target <= 1:
            raise UserError(f"--target {self.target:g}: give a share of the test set, at most 1")
        if self.peer and not (self.peer / "mnist/main.py").is_file():
            raise UserError(f"--peer {self.peer}: no checkout of pytorch/examples, mnist/main.py is missing")


@dataclass(frozen=True)
class Sample:
    """One run: its seconds, and where they went."""

    seconds: float
    """From the start of the process to the line with the accuracy, or to its last evaluation if it never got there."""
    reached: bool
    accuracy: float
    """The best that the run printed."""
    epochs: int
    startup: float
    training: float
    evaluation: float
    other: float
    device: str | None
    """As the program reports it; the peer does not."""


@dataclass(frozen=True)
class Program:
    """One bar of the chart."""

    name: str
    command: str
    """What is timed, with placeholders for paths."""
    warm_up: Callable[[], None]
    measure: Callable[[], Sample]


def observe(command: str, folder: Path, places: Mapping[str, str]) -> Generator[tuple[float, str], None, None]:
    """Run a program; closing the iterator ends it, with all processes that it started.

    Args:
        command: words and placeholders, separated by spaces.
        folder: its working directory.
        places: what the placeholders stand for.

    Yields:
        Each line of its output, with the seconds since its start.

    Raises:
        SystemExit: it failed; the message has its last lines.
    """
    environment = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    environment["PYTHONUNBUFFERED"] = "1"  # else lines arrive in blocks, seconds late
    words = [places.get(word, word) for word in command.split()]
    last: deque[str] = deque(maxlen=20)
    started = time.perf_counter()
    with Popen(
        words, cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT, encoding="utf-8", start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                seconds = time.perf_counter() - started
                last.append(line)
                yield seconds, line.rstrip()
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise SystemExit(f"error: `{command}` ended with exit code {code}; its last lines:\n{''.join(last)}")


def our_program(processes: int, data: Path, target: float) -> Program:
    """`mnist_ddp_spawn` as one process on all cores, or as several that share them."""
    several = f" --nproc {processes}" if processes > 1 else ""
    command = f"python -m examples.mnist_ddp_spawn.train --dataset mnist --data-dir DATA_DIR --out OUT{several}"
    places = {"python": sys.executable, "DATA_DIR": str(data)}

    def warm_up() -> None:
        with tempfile.TemporaryDirectory() as out:
            digits = command.replace("--dataset mnist", "--dataset digits --epochs 1")
            with closing(observe(digits, ROOT, places | {"OUT": out})) as lines:
                deque(lines, maxlen=0)  # to the end

    def measure() -> Sample:
        seconds = accuracy = 0.0
        epochs = 0
        with tempfile.TemporaryDirectory() as out:
            with closing(observe(command, ROOT, places | {"OUT": out})) as lines:
                for now, line in lines:  # to the end: result.json is written last
                    match = re.match(r"epoch (\d+)/\d+: .*\baccuracy ([\d.]+)", line)
                    if match and accuracy < target:
                        seconds, epochs, accuracy = now, int(match[1]), max(accuracy, float(match[2]))
            if not epochs:
                raise SystemExit(f"error: `{command}` printed no line with an accuracy")
            result = json.loads((Path(out) / "result.json").read_text())
        startup, training, evaluation = (result["seconds"][name] for name in ("startup", "train", "eval"))
        other = seconds - startup - training - evaluation
        reached = accuracy >= target
        return Sample(seconds, reached, accuracy, epochs, startup, training, evaluation, other, result["device"])

    return Program(f"ours, {processes} process{'es' if processes > 1 else ''}", command, warm_up, measure)


def peer_program(folder: Path, epochs: int, target: float) -> Program:
    """`mnist/main.py`, in a folder beside its data."""
    command = f"python -u main.py --epochs {epochs}"
    places = {"python": sys.executable}

    def warm_up() -> None:
        with closing(observe(command, folder, places)) as lines:
            if not any(line.startswith("Train Epoch:") for _, line in lines):
                raise SystemExit(f"error: `{command}` printed no line `Train Epoch:`")

    def measure() -> Sample:
        seconds = accuracy = startup = trained = evaluation = 0.0
        done = 0
        with closing(observe(command, folder, places)) as lines:
            for now, line in lines:
                if line.startswith("Train Epoch:"):
                    startup, trained = startup or now, now
                elif match := re.match(r"Test set: .*Accuracy: (\d+)/(\d+)", line):
                    seconds, done, accuracy = now, done + 1, max(accuracy, int(match[1]) / int(match[2]))
                    evaluation += now - trained
                    if accuracy >= target:
                        break
        if not done:
            raise SystemExit(f"error: `{command}` printed no line `Test set:`")
        training = seconds - startup - evaluation
        return Sample(seconds, accuracy >= target, accuracy, done, startup, training, evaluation, 0.0, None)

    return Program(PEER, f"cd PEER/mnist && {command}", warm_up, measure)


def find_data(directory: Path) -> Path:
    """The folder that holds the four files.

    Raises:
        UserError: a file is missing.
    """
    for folder in (directory, directory / "MNIST/raw"):
        if all((folder / name).is_file() for name in FILES):
            return folder.resolve()
    raise UserError(f"--data-dir {directory}: it must hold {', '.join(FILES)}, in itself or in MNIST/raw")


def measure_all(programs: list[Program], rounds: int) -> dict[str, list[Sample]]:
    """Run all programs in turn, so that a change of the machine's load meets all of them."""
    samples: dict[str, list[Sample]] = {program.name: [] for program in programs}
    for program in programs:
        print(f"warm-up: {program.name}", flush=True)
        program.warm_up()
    for number in range(1, rounds + 1):
        for program in programs:
            sample = program.measure()
            samples[program.name].append(sample)
            end = "" if sample.reached else f": TARGET NOT REACHED in {sample.epochs} epoch(s)"
            print(
                f"round {number}/{rounds}: {program.name}, {sample.seconds:.1f} s, accuracy {sample.accuracy:.4f}{end}",
                flush=True,
            )
    return samples


def summarise(name: str, samples: Mapping[str, list[Sample]]) -> dict[str, Any]:
    """Medians of a program and its ratios to the peer; None where a run that they need did not reach the target."""
    mine, theirs = samples[name], samples.get(PEER, [])
    ratios: list[float | None] = []
    if name != PEER:
        for one, other in zip(mine, theirs, strict=False):  # no peer, no ratio
            ratios.append(round(other.seconds / one.seconds, 3) if one.reached and other.reached else None)
    complete = [ratio for ratio in ratios if ratio is not None]
    return {
        "seconds": median(run.seconds for run in mine) if all(run.reached for run in mine) else None,
        "accuracy": median(run.accuracy for run in mine),
        **{part: median(getattr(run, part) for run in mine) for part in PARTS},
        "peer_ratio_per_round": ratios,
        "peer_ratio": median(complete) if complete and len(complete) == len(ratios) else None,
    }


def draw(path: Path, medians: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """One bar per program: where its seconds go."""
    import matplotlib  # a second

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.6 * len(medians)))
    ends = [0.0] * len(medians)
    for part, colour in PARTS.items():
        widths = [values[part] for values in medians.values()]
        axis.barh(list(medians), widths, left=ends, height=0.6, color=colour, label=part.replace("startup", "start-up"))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for position, (end, values) in enumerate(zip(ends, medians.values(), strict=True)):
        ratio = f" (peer: {values['peer_ratio']:.1f} times as long)" if values["peer_ratio"] else ""
        note = f"{values['seconds']:.1f} s{ratio}" if values["seconds"] else "target not reached"
        axis.annotate(note, (end, position), (5, 0), textcoords="offset points", va="center")
    axis.invert_yaxis()  # the first program on top
    axis.set(xlabel="seconds from the start of the command", xlim=(0, max(ends) * 1.3))
    axis.set_title(title, loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="lower center", ncols=len(PARTS), frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def print_table(medians: Mapping[str, Mapping[str, Any]]) -> None:
    """The medians, in seconds."""
    heads = ("total", "start-up", "training", "evaluation", "other", "peer/ours")
    print(f"\n{'median seconds':24}" + "".join(f"{head:>12}" for head in heads))
    for name, values in medians.items():
        total = f"{values['seconds']:.1f}" if values["seconds"] else "never"
        ratio = f"{values['peer_ratio']:.2f}" if values["peer_ratio"] else "-"
        print(f"{name:24}{total:>12}" + "".join(f"{values[part]:12.1f}" for part in PARTS) + f"{ratio:>12}")


def main(args: Args) -> None:
    """Measure, write the results, show them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by default `observe` could not end its program
    data = find_data(args.data_dir)
    args.out.mkdir(parents=True, exist_ok=True)
    machine, versions = describe_machine(), describe_software("torch", "torchvision")
    programs = [our_program(processes, data, args.target) for processes in (1, 2)]
    skipped = [] if args.peer else [f"{PEER}: --peer was not given"]
    with tempfile.TemporaryDirectory() as temporary:
        if args.peer:
            folder, raw = Path(temporary, "mnist"), Path(temporary, "data/MNIST/raw")  # it reads ../data
            folder.mkdir()
            raw.mkdir(parents=True)
            shutil.copy(args.peer / "mnist/main.py", folder)
            for name in FILES:
                shutil.copy(data / name, raw)
            programs.append(peer_program(folder, args.peer_epochs, args.target))
        samples = measure_all(programs, args.rounds)

    medians = {name: summarise(name, samples) for name in samples}
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": versions,
        "peer_sha256": hashlib.sha256((args.peer / "mnist/main.py").read_bytes()).hexdigest() if args.peer else None,
        "target": args.target,
        "rounds": args.rounds,
        "skipped": skipped,
        "commands": {program.name: program.command for program in programs},
        "samples": {name: [asdict(run) for run in runs] for name, runs in samples.items()},
        "medians": medians,
    }
    file = args.out / "mnist_time_to_accuracy.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    title = f"MNIST: time to {args.target:.1%} test accuracy, median of {args.rounds} round(s), "
    draw(file.with_suffix(".png"), medians, f"{title}{machine['cpu']}, {machine['cores']} cores")
    print_table(medians)
    for line in skipped:
        print(f"skipped: {line}")
    print(f"result: {file}, chart: {file.with_suffix('.png')}")


if __name__ == "__main__":
    try:
        main(parse(Args, description=__doc__))
    except UserError as mistake:
        fail(mistake)
