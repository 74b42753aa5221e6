"""Losses, samples and seconds of a run."""

import sys
import time
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.launch.place import current
from common.launch.who.calls import progress
from common.train.log import Log
from common.train.state import TrainState

Item = TypeVar("Item")


class Meters:
    """Counts samples and seconds, and keeps the losses that nobody has read yet.

    Args:
        log: of the run.
        unit: what samples are, for lines about speed.
    """

    def __init__(self, log: Log, unit: str) -> None:
        self.log, self.unit = log, unit
        self.samples = 0
        self.seconds = {"startup": 0.0, "train": 0.0, "eval": 0.0, "input": 0.0}
        self.steps = 0  # of this process
        self.steps_in_epoch = self.total_steps = 0
        self.last_step = sys.maxsize  # of the run, by --limit-steps
        self._evaluations: list[float] = []  # seconds
        self._losses: list[Tensor] = []
        self._names: tuple[str, ...] = ()  # of a program's other losses
        self.of_epoch = (0.0, 0)  # sum and count of the losses that have been gathered
        self._before_epoch = (0, 0.0)  # samples, seconds of training
        self._at_last_line = (0.0, 0, 0.0)  # time, samples, seconds of input
        self._step = 0  # of the run
        self._epoch_began = self._trained = time.perf_counter()  # times

    @property
    def samples_per_second(self) -> float | None:
        """Of the whole training, without evaluation."""
        return round(self.samples / self.seconds["train"], 1) if self.samples else None

    @property
    def seconds_left(self) -> float:
        """To the end of the run, at the pace so far."""
        steps = max(0, self.total_steps - self._step)
        epochs = -(-steps // max(1, self.steps_in_epoch))
        evaluation = min(self._evaluations, default=0.0)
        return steps * self.seconds["train"] / max(1, self.steps) + epochs * evaluation

    def begin(self, label: str, steps_in_epoch: int, epochs: int, state: TrainState) -> None:
        """Begin an epoch, or go on with it.

        Args:
            label: of the epoch.
            steps_in_epoch: all of them.
            epochs: of the whole run, with those that it leaves out before its first.
            state: where the run is.
        """
        self.steps_in_epoch, self._step = steps_in_epoch, state.step
        left = (epochs - state.epoch) * steps_in_epoch - state.batch
        self.total_steps = min(state.step + left, self.last_step)
        self.log.bar(label, self.total_steps, state.step)

    def step(self, samples: int) -> None:
        """Count a step, and the samples of its global batch."""
        self.samples, self.steps, self._step = (
            self.samples + samples,
            self.steps + 1,
            self._step + 1,
        )
        self.log.advance(lambda: self._losses[-1].reshape(-1)[0].item() if self._losses else None)

    def epoch(self) -> dict[str, float]:
        """Mean loss of the epoch, of steps before a resume, too, and samples per second."""
        samples, seconds = self._before_epoch
        self._before_epoch = self.samples, self.seconds["train"]
        found = {}
        if self.of_epoch[1]:
            found["loss"] = self.of_epoch[0] / self.of_epoch[1]
        if self.samples > samples:
            found["speed"] = (self.samples - samples) / (self.seconds["train"] - seconds)
        self.of_epoch = (0.0, 0)
        return found

    def training(self, batches: Iterator[Item]) -> Iterator[Item]:
        """The batches up to --limit-steps; count the seconds of training, and of the input."""
        started = time.perf_counter()
        if not self.seconds["startup"]:
            self.seconds["startup"] = time.time() - current().started
            self._at_last_line, self._epoch_began = (started, 0, 0.0), started
        for _ in range(self.last_step - self._step):
            asked = time.perf_counter()
            batch = next(batches, None)
            self.seconds["input"] += time.perf_counter() - asked
            progress["waited"] = self.seconds["input"]
            if batch is None:
                break
            yield batch
        self._trained = time.perf_counter()
        self.seconds["train"] += self._trained - started

    def evaluated(self) -> float:
        """Count what has passed since the end of training as evaluation; seconds of the epoch."""
        now = time.perf_counter()
        if self._trained:
            if self.seconds["eval"]:  # the first one imports libraries, and tells nothing
                self._evaluations.append(now - self._trained)
            self.seconds["eval"] += now - self._trained
        before, self._epoch_began, self._trained = self._epoch_began, now, 0.0
        return now - before

    def loss(self, loss: Tensor, **others: Tensor) -> None:
        """Keep a step's losses without reading them: the host would wait for the device."""
        self._names = tuple(others)
        losses = [loss.detach(), *(other.detach() for other in others.values())]
        self._losses.append(torch.stack(losses) if others else losses[0])

    def gather_losses(self, step: int) -> list[float]:
        """Average the losses since the last call over the ranks, and record them.

        Every rank calls this.

        Args:
            step: of the last of them.
        """
        if not self._losses:
            return []
        losses = torch.stack(self._losses).double().cpu().reshape(len(self._losses), -1)
        self._losses.clear()
        dist.all_reduce(losses)
        rows = (losses / dist.get_world_size()).tolist()
        names = [f"loss/{name}" for name in ("train", *self._names)]
        for number, row in enumerate(rows, step - len(rows) + 1):
            self.log.scalars(number, dict(zip(names, row, strict=True)))
        progress["loss"] = rows[-1][0]
        self.log.write_lines()
        means = [row[0] for row in rows]
        total, count = self.of_epoch
        self.of_epoch = sum(means, total), count + len(means)
        return means

    def progress(self, label: str, step: int) -> None:
        """Print the mean loss and the speed since the last line. Every rank calls this."""
        now = time.perf_counter(), self.samples, self.seconds["input"]
        seconds, samples, waited = (
            value - before for value, before in zip(now, self._at_last_line, strict=True)
        )
        self._at_last_line = now
        losses = self.gather_losses(step)
        if losses:
            self.log.print0(
                f"{label}: loss {sum(losses) / len(losses):.4f}, {samples / seconds:.1f} "
                f"{self.unit}/s, waited {waited / seconds:.0%} for input"
            )
