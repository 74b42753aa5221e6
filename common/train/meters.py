"""Losses, samples and seconds of a run."""

import time
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.launch.place import current
from common.launch.who.calls import progress
from common.train.log import Log

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
        self._losses: list[Tensor] = []
        self._at_last_line = (0.0, 0, 0.0)  # time, samples, seconds of input
        self._epoch_began = self._trained = time.perf_counter()  # times

    @property
    def samples_per_second(self) -> float | None:
        """Of the whole training, without evaluation."""
        return round(self.samples / self.seconds["train"], 1) if self.samples else None

    def training(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Count the seconds of training, and those of waiting for input."""
        started = time.perf_counter()
        if not self.seconds["startup"]:
            self.seconds["startup"] = time.time() - current().started
            self._at_last_line, self._epoch_began = (started, 0, 0.0), started
        while True:
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
            self.seconds["eval"] += now - self._trained
        before, self._epoch_began, self._trained = self._epoch_began, now, 0.0
        return now - before

    def loss(self, loss: Tensor) -> None:
        """Keep a step's loss without reading it: the host would wait for the device."""
        self._losses.append(loss.detach())

    def gather_losses(self, step: int) -> list[float]:
        """Average the losses since the last call over the ranks, and record them.

        Every rank calls this.

        Args:
            step: of the last of them.
        """
        if not self._losses:
            return []
        losses = torch.stack(self._losses).double().cpu()
        self._losses.clear()
        dist.all_reduce(losses)
        means = (losses / dist.get_world_size()).tolist()
        for number, value in enumerate(means, step - len(means) + 1):
            self.log.scalars(number, {"loss/train": value})
        progress["loss"] = means[-1]
        self.log.write_lines()
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
                f"{self.unit}/s, waited for input {waited / seconds:.0%} of the time"
            )
