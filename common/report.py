"""What a run leaves behind and what it shows, written by the main rank only.

In `--out DIR`: `result.json`, `curves.png`, `predictions.csv`, `metrics.jsonl`, TensorBoard events, the best model.
Modules that are slow to import (TensorBoard, matplotlib) are imported when they are first needed, after the training
that they would delay.
"""

import csv
import importlib.metadata
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

from common.checkpoint import Checkpoint, unwritable, write_atomically
from common.data import unwrapped
from common.distributed import World, agree
from common.errors import UserError
from common.metrics import Evaluation
from common.precision import Numerics

tqdm.set_lock(threading.RLock())  # its own is a semaphore of the machine, which outlives a killed process
Item = TypeVar("Item")
Point = tuple[int, dict[str, float]]


@dataclass
class Report:
    """The run's voice: log lines, a progress bar, curves, result files.

    Args:
        example: the example's name.
        out: the folder for everything that the run writes.
        world: this process's world; on other ranks than the main one nothing is shown or written.
        unit: what the samples are, for lines about speed.

    Raises:
        UserError: the folder cannot be written.
    """

    example: str
    out: Path
    world: World
    unit: str = "images"

    def __post_init__(self) -> None:
        self._scalars: list[Point] = []  # all of the run, for the curves
        self._unwritten: list[Point] = []  # not yet in metrics.jsonl
        self._for_tensorboard: list[Point] = []  # not yet in the events
        self._writer: Any = None
        self._skipped: set[str] = set()
        self._end_step: Callable[[], None] = lambda: None  # of the profiler, if there is one
        self._losses: list[Tensor] = []
        self._last_step = self._samples = 0
        self.seconds = {"startup": 0.0, "train": 0.0, "eval": 0.0, "input": 0.0}
        self._evaluated = time.perf_counter()  # at the last line of `epoch`
        self._logged = (time.perf_counter(), 0, 0.0)  # time, samples, seconds of input at the last line of `progress`
        if not self.world.is_main:
            return
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            probe = self.out / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"--out {self.out} cannot be written ({error.strerror}): choose another folder") from None

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._last_step:
            error.add_note(f"in step {self._last_step + 1}, or while evaluating or saving after the one before")
        with suppress(UserError) if error is not None else nullcontext():  # what has gone wrong first is what counts
            self._write_lines()
            if not isinstance(error, UserError):  # of a full disk, TensorBoard's thread would print a traceback
                self._write_events()
            if self._writer is not None:
                with _writing(self.out / "tensorboard"):
                    self._writer.close()

    def log(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.world.is_main:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def warn(self, line: str) -> None:
        """Print a warning on standard error, yellow on a terminal (not with NO_COLOR)."""
        if self.world.is_main:
            colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
            tqdm.write(f"\033[1;33mwarning: {line}\033[0m" if colour else f"warning: {line}", file=sys.stderr)

    def introduce(self, data: str, numerics: Numerics, batch_size: int, shares: str | None = None) -> None:
        """Say in one line what the run uses.

        Args:
            data: what is trained on.
            numerics: device and precision.
            batch_size: samples in the global batch.
            shares: how the batch is divided; by default equally among the ranks.

        Raises:
            UserError: nodes would compute with different precisions.
        """
        world = self.world
        agree(
            world, numerics.name, "--precision", "auto is what a node's processor computes natively: give one for all"
        )
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        if world.device.type == "cpu" and world.place.flags.device == "auto":
            self.warn("no CUDA device was found: training on the CPU, which is slower")
        for warning in world.place.warnings:
            self.warn(warning)
        if numerics.deterministic and world.device.type == "cuda":
            self.warn("--deterministic makes CUDA kernels repeatable, and the run considerably slower")
        plural = "s" if world.size > 1 else ""
        self.log(
            f"{self.example}: {data}, {world.size} x {device} with {torch.get_num_threads()} thread(s), "
            f"{world.nodes} node(s), launcher {world.place.launcher}, backend {world.backend}, "
            f"{numerics.name}{', channels last' if numerics.channels_last else ''}, "
            f"batch {batch_size} = {shares or f'{world.size} rank{plural} x {batch_size // world.size}'}"
        )

    def begin(self, step: int, start: Checkpoint | None) -> None:
        """Start the curves, or go on with those of the run that is resumed, up to its step."""
        if not self.world.is_main:
            return
        if start:
            self.log(f"resumed from {start.path} at step {step}")
        file = self.out / "metrics.jsonl"
        self._scalars = [point for point in _points(file) if point[0] <= step] if start else []
        write_atomically(file, "".join(_line(*point) for point in self._scalars).encode())
        (self.out / "result.json").unlink(missing_ok=True)  # an earlier run's: this one may fail
        for events in self.out.glob("tensorboard/events.*"):
            events.unlink()  # written anew from metrics.jsonl, so that nothing is missing or twice
        self._for_tensorboard = list(self._scalars)

    def steps(self, batches: Iterable[Item], label: str, total: int, done: int) -> Iterator[Item]:
        """Iterate over batches with a progress bar on the main rank's terminal (none where that is no terminal).

        Args:
            batches: those still to be trained on.
            label: what the bar says.
            total: batches in the epoch.
            done: batches of the epoch that the resumed run has trained on.
        """
        if not self.seconds["startup"]:
            self.seconds["startup"] = time.time() - self.world.place.started
            self._evaluated = time.perf_counter()  # the first epoch begins now
        hidden = None if self.world.is_main else True  # None: hidden where the output is no terminal
        iterator, started = unwrapped(batches), time.perf_counter()
        with tqdm(None, label, total, initial=done, disable=hidden, leave=False, unit="step") as bar:
            while True:
                asked = time.perf_counter()
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                finally:
                    self.seconds["input"] += time.perf_counter() - asked
                yield batch
                bar.update()
        self.seconds["train"] += time.perf_counter() - started

    def progress(self, label: str) -> None:
        """Log the mean loss and the speed since the last line; every rank calls this."""
        before, self._logged = self._logged, (time.perf_counter(), self._samples, self.seconds["input"])
        seconds, samples, waited = (now - then for now, then in zip(self._logged, before, strict=True))
        losses = self.gather_losses()
        if losses:
            self.log(
                f"{label}: loss {sum(losses) / len(losses):.4f}, {samples / seconds:.1f} {self.unit}/s, "
                f"waited for input {waited / seconds:.0%} of the time"
            )

    @contextmanager
    def profiling(self, steps: int) -> Generator[None]:
        """Record a trace of some steps with torch's profiler, on the main rank.

        Args:
            steps: how many, after one that is passed over and one to warm up; 0 records nothing.
                A step ends with `loss`.
        """
        if not steps or not self.world.is_main:
            yield
            return
        file = self.out / "trace.json"
        ready = schedule(skip_first=1, wait=0, warmup=1, active=steps, repeat=1)
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.world.device.type == "cuda")
        with profile(
            activities=kinds, schedule=ready, on_trace_ready=lambda done: done.export_chrome_trace(str(file))
        ) as profiler:
            self._end_step = profiler.step
            yield
        self._end_step = lambda: None
        if file.exists():
            self.log(f"trace of {steps} step(s) for https://ui.perfetto.dev: {file}")
        else:
            self.warn(f"--profile {steps}: the run ended before that many steps, no trace was written")

    def loss(self, step: int, loss: Tensor, samples: int) -> None:
        """Remember this rank's loss of a step without reading it, which would make the host wait for the device.

        Args:
            step: the optimizer step, from 1.
            loss: a scalar whose mean over the ranks is the loss of the global batch.
            samples: samples in the global batch.
        """
        self._losses.append(loss.detach())
        self._last_step = step
        self._samples += samples
        self._end_step()

    def passed(self, step: int) -> None:
        """Remember that a step is done, for error messages; `loss` does that, too."""
        self._last_step = step

    def gather_losses(self) -> list[float]:
        """Average the losses since the last call over the ranks and record them; every rank calls this."""
        if not self._losses:
            return []
        losses = torch.stack(self._losses).double().cpu()
        self._losses.clear()
        dist.all_reduce(losses)
        means = (losses / self.world.size).tolist()
        for step, value in enumerate(means, self._last_step - len(losses) + 1):
            self.scalars(step, {"loss/train": value})
        self._write_lines()
        return means

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of a step, by the names under which TensorBoard and curves.png show them."""
        if self.world.is_main:
            self._scalars.append((step, dict(values)))
            self._unwritten.append((step, dict(values)))

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Count the seconds of the body as evaluation."""
        started = time.perf_counter()
        yield
        self.seconds["eval"] += time.perf_counter() - started

    def epoch(
        self, label: str, step: int, evaluation: Evaluation, names: Sequence[str] = (), record: bool = True
    ) -> None:
        """Log and record an evaluation, and write predictions.csv in dataset order.

        Args:
            label: what was evaluated: the epoch.
            step: optimizer steps so far.
            evaluation: as `metrics.evaluate` returns it.
            names: of the samples, for predictions.csv, if they have names.
            record: add it to the curves.

        Raises:
            UserError: the model diverged; nothing of it is saved.
        """
        if not math.isfinite(evaluation.loss):
            raise UserError(f"training diverged: in {label} the test loss is {evaluation.loss}; lower --lr")
        if not self.world.is_main:
            return
        known = {name: value for name, value in evaluation.metrics.items() if value is not None}
        shown = {"test loss": evaluation.loss, **known}
        now = time.perf_counter()
        before, self._evaluated = self._evaluated, now
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        self.log(f"{label}: {numbers} ({now - before:.1f} s)")
        if record:
            self.scalars(
                step, {"loss/test": evaluation.loss} | {f"test/{name}": value for name, value in known.items()}
            )
            self._write_lines()
            self._write_events()
        columns = [range(len(evaluation.targets)), evaluation.targets.tolist(), evaluation.predictions.tolist()]
        path = self.out / "predictions.csv"
        with _writing(path), path.open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["index", "label", "prediction"] + ["file"] * bool(names))
            rows.writerows(zip(*columns, *([names] if names else []), strict=True))

    def write(self) -> None:
        """Write what has been recorded so far: before a checkpoint, so that a resumed run has all up to its step.

        Raises:
            UserError: the disk is full, for example.
        """
        self._write_lines()
        self._write_events()

    def _write_lines(self) -> None:
        if self._unwritten:
            path, text = self.out / "metrics.jsonl", "".join(_line(*point) for point in self._unwritten)
            with _writing(path, len(text)), path.open("a") as lines:
                lines.write(text)
            self._for_tensorboard += self._unwritten
            self._unwritten = []

    def _write_events(self) -> None:
        if not self._for_tensorboard:
            return
        disk, room = os.statvfs(self.out), 1 << 16
        if disk.f_bavail * disk.f_frsize < room:  # the thread of TensorBoard that writes would print a traceback
            raise unwritable(self.out / "tensorboard", "No space left on device", room)
        with _writing(self.out / "tensorboard"):
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter  # half a second

                self._writer = SummaryWriter(str(self.out / "tensorboard"))
            for step, values in self._for_tensorboard:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        self._for_tensorboard = []

    def best(self, model: nn.Module, score: float, best: float) -> float:
        """Keep the weights if they are the best so far, as safetensors, without DDP's `module.` prefix.

        Args:
            model: the bare model.
            score: larger is better; of an error, give the negative.
            best: the best score before, minus infinity at first.

        Returns:
            The best score so far.
        """
        if score > best and self.world.is_main:
            from safetensors.torch import save

            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            write_atomically(self.out / "best.safetensors", save(weights))
        return max(score, best)

    def skipped(self, files: set[str]) -> None:
        """Name the broken images that were replaced so far, each once; every rank calls this.

        Args:
            files: those of this rank.
        """
        everybody: list[set[str]] = [set()] * self.world.size
        dist.all_gather_object(everybody, files)
        for file in sorted(set().union(*everybody) - self._skipped):
            self._skipped.add(file)
            self.warn(f"skipped image {len(self._skipped)}: {file}")

    def finish(self, **values: Any) -> None:
        """Write result.json and curves.png, and print the summary, the last line of the run."""
        world = self.world
        if not world.is_main:
            return
        total = time.time() - world.place.started
        result = {
            "example": self.example,
            "argv": sys.argv,
            "launcher": world.place.launcher,
            "world_size": world.size,
            "nodes": world.nodes,
            "device": world.device.type,
            "backend": world.backend,
            "samples_per_second": round(self._samples / self.seconds["train"], 1) if self._samples else None,
            **values,
            **({"skipped_images": len(self._skipped)} if self._skipped else {}),
            "final_loss": next((v["loss/train"] for _, v in reversed(self._scalars) if "loss/train" in v), None),
            "seconds": {name: round(value, 3) for name, value in {"total": total, **self.seconds}.items()},
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("torch", "torchvision", "numpy", "scikit-learn", "transformers")
                if name != "transformers" or name in sys.modules
            }
            | {"python": sys.version.split()[0]},
        }
        write_atomically(self.out / "result.json", (json.dumps(result, indent=2) + "\n").encode())
        self._draw()
        metrics = values.get("metrics", {})
        score = f"accuracy {metrics['accuracy']:.4f}, " if "accuracy" in metrics else ""
        for name, value in metrics.items():
            if value is not None:
                self.log(f"{name + ':':20}{value:.4f}")
        self.log(f"{'seconds:':20}" + ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items()))
        for name, file in (
            ("curves", "curves.png"), ("TensorBoard events", "tensorboard"), ("predictions", "predictions.csv"),
            ("best model", "best.safetensors"),
        ):  # fmt: skip
            if (self.out / file).exists():
                self.log(f"{name + ':':20}{self.out / file}")
        self.log(
            f"{self.example}: {score}world size {world.size}, {values['steps']} steps, {total:.1f} s, "
            f"parameters {values['parameter_hash'][:12]}, result {self.out / 'result.json'}"
        )

    def _draw(self) -> None:
        """One panel per group of curves: `loss/train` and `loss/test` share one."""
        import matplotlib  # a second

        matplotlib.use("agg")
        from matplotlib import pyplot

        curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for step, values in self._scalars:
            for name, value in values.items():
                group, _, label = name.partition("/")
                curves.setdefault(group, {}).setdefault(label, []).append((step, value))
        if not curves:  # resumed at its end, in another folder
            return
        figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 3.6), squeeze=False)
        for axis, (group, lines) in zip(axes[0], curves.items(), strict=True):
            for label, points in lines.items():
                axis.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 30 else "")
            axis.set(title=group, xlabel="step")
            axis.grid(alpha=0.3)
            axis.legend()
        figure.suptitle(f"{self.example}, {self.world.size} rank(s)")
        figure.tight_layout()
        with _writing(self.out / "curves.png"):
            figure.savefig(self.out / "curves.png", dpi=110)
        pyplot.close(figure)


@contextmanager
def _writing(path: Path, needed: int = 0) -> Generator[None]:
    """Say in one line what the disk does not take."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error.strerror, needed) from None


def _points(file: Path) -> list[Point]:
    """The records of metrics.jsonl; the last line may have been cut when the run was killed."""
    points: list[Point] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            points.append((record.pop("step"), record))
    return points


def _line(step: int, values: Mapping[str, float]) -> str:
    return json.dumps({"step": step, **values}) + "\n"
