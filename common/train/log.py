"""What a run shows and records while it goes on. Rank 0 does; nothing here communicates."""

import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.launch.console import say
from common.launch.errors import UserError
from common.train.curves import Point, read_points
from common.train.files import set_aside, write_atomically, writing
from common.train.track import Tracker


class Log:
    """Console, progress bar, metrics.jsonl, TensorBoard events, and a tracker.

    Args:
        out: the run's folder.
        active: whether this is rank 0; other ranks show and write nothing.
    """

    def __init__(self, out: Path, active: bool) -> None:
        tqdm.set_lock(threading.RLock())  # its own is a semaphore that outlives a killed process
        self.out = out
        self.active = active
        self.points: list[Point] = []  # all of the run, for the curves
        self._unwritten: list[Point] = []  # not yet in metrics.jsonl
        self._for_tensorboard: list[Point] = []  # not yet in TensorBoard's events, nor sent
        self.tracker = Tracker(self.warn)
        self._bar: tqdm | None = None
        self._loss_shown = 0.0  # when
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._events: Path | None = out / "tensorboard" / name  # None: the disk took no more

    def print0(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.active:
            with tqdm.external_write_mode(sys.stdout):
                say(line)

    def warn(self, line: str) -> None:
        """Print a warning on standard error, yellow on a terminal (not with NO_COLOR)."""
        if self.active:
            colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
            line = f"warning: {line}"
            with tqdm.external_write_mode(sys.stderr):
                say(f"\033[1;33m{line}\033[0m" if colour else line, sys.stderr)

    def bar(self, label: str, total: int, done: int) -> None:
        """Show a progress bar of the whole run on rank 0's terminal; none where there is none.

        Args:
            label: what it says: the epoch.
            total: steps of the run.
            done: those that are done.
        """
        if self._bar is None:
            hidden = None if self.active else True  # None: tqdm asks whether there is a terminal
            self._bar = tqdm(
                None, label, total, initial=done, disable=hidden, leave=False, unit="step"
            )
        self._bar.set_description_str(label, refresh=False)

    def advance(self, loss: Callable[[], float | None]) -> None:
        """Move the bar by a step. The loss is read once a second: the device must be waited for."""
        if self._bar is None or self._bar.disable:
            return
        if time.monotonic() - self._loss_shown > 1 and (latest := loss()) is not None:
            self._bar.set_postfix_str(f"loss {latest:.3g}", refresh=False)
            self._loss_shown = time.monotonic()
        self._bar.update()

    def start(self, step: int, resumed: bool, evaluated: bool = True) -> None:
        """Start the curves, or go on with those of the run that is resumed, up to its step.

        Args:
            step: where the checkpoint was made.
            resumed: whether there is one.
            evaluated: whether it was made after the step's evaluation, which comes again otherwise.
        """
        if not self.active:
            return
        file = self.out / "metrics.jsonl"
        if not resumed and (aside := set_aside(self.out)):
            self.print0(f"results of an earlier run were moved to {aside}")
        until = [point for point in read_points(file) if point[0] <= step] if resumed else []
        self.points = [
            (at, values) for at, values in until if evaluated or at < step or "loss/train" in values
        ]
        write_atomically(file, "".join(_line(*point) for point in self.points).encode())
        (self.out / "result.json").unlink(missing_ok=True)  # an earlier run's: this one may fail
        if not resumed:
            (self.out / "predictions.csv").unlink(missing_ok=True)
        for events in self.out.glob("tensorboard/events.*"):
            events.unlink()  # written anew from metrics.jsonl: nothing is missing or twice
        self._for_tensorboard = list(self.points)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of a step, by the names that TensorBoard and curves.png show."""
        if self.active:
            self.points.append((step, dict(values)))
            self._unwritten.append((step, dict(values)))

    def write_lines(self) -> None:
        """Write what has been recorded to metrics.jsonl.

        Raises:
            UserError: the disk is full, for example.
        """
        if self._unwritten:
            path = self.out / "metrics.jsonl"
            text = "".join(_line(*point) for point in self._unwritten)
            with writing(path, len(text)), path.open("a") as lines:
                lines.write(text)
            self._for_tensorboard += self._unwritten
            self._unwritten = []

    def write_events(self) -> None:
        """Write what is in metrics.jsonl to TensorBoard's events, and send it to the tracker.

        A full disk ends the events, not the run.

        Not by SummaryWriter: its thread would print a traceback on a full disk.
        """
        points, self._for_tensorboard = self._for_tensorboard, []
        self.tracker.log(points)
        if not points or self._events is None:
            return
        try:
            self._events.parent.mkdir(exist_ok=True)
            with self._events.open("ab") as file:
                file.write(_records(points, first=file.tell() == 0))
        except OSError as error:
            self.warn(
                f"{self._events.parent} cannot be written ({error.strerror}): "
                f"TensorBoard's events end here; metrics.jsonl has them all"
            )
            self._events = None

    def close(self, error: BaseException | None) -> None:
        """Write what is left. After an error, the error is what counts, not a full disk."""
        if self._bar is not None:
            self._bar.close()
        with suppress(*(UserError,) * (error is not None)):
            self.write_lines()
            self.write_events()
        self.tracker.end(failed=error is not None)


def _records(points: Sequence[Point], first: bool) -> bytes:
    """Scalars as TensorBoard's events; a file begins with one that tells the version."""
    from tensorboard.compat.proto import event_pb2  # 0.5 s, after the first epoch
    from tensorboard.summary.writer.record_writer import RecordWriter  # as above

    protocol: Any = event_pb2  # its classes are made when it is imported
    content, now = io.BytesIO(), time.time()
    records = RecordWriter(content)
    if first:
        version = protocol.Event(wall_time=now, file_version="brain.Event:2")
        records.write(version.SerializeToString())
    for step, values in points:
        scalars = [{"tag": name, "simple_value": value} for name, value in values.items()]
        event = protocol.Event(wall_time=now, step=step, summary={"value": scalars})
        records.write(event.SerializeToString())
    return content.getvalue()


def _line(step: int, values: Mapping[str, float]) -> str:
    return json.dumps({"step": step, **values}) + "\n"
