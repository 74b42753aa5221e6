"""The eight steps of one iteration as a table: what was made, where, in how many milliseconds."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor


class Explanation:
    """Watches one iteration; by default none, at no cost.

    Args:
        devices: of the replicas.
        iteration: which one to watch, from 1; the first ones also start threads and choose
            kernels. 0 for none.
    """

    def __init__(self, devices: Sequence[torch.device] = (), iteration: int = 0) -> None:
        self.devices, self.iteration = devices, iteration
        self.begun = 0
        self.rows: list[tuple[int, str, float, str]] = []
        """Step, what it did, milliseconds, what it made."""
        self.busy = [0.0] * len(devices)
        """Seconds that each device's thread computed, in the iteration."""

    @property
    def watching(self) -> bool:
        """Whether this is the iteration."""
        return self.begun == self.iteration > 0

    def begin(self) -> None:
        """An iteration begins."""
        self.begun += 1
        if self.watching:
            self._clock = self._now()
            self._busy = list(self.busy)

    def did(self, step: int, what: str, *made: Tensor) -> None:
        """A step is over; `made` are the tensors that it made or moved."""
        if not self.watching:
            return
        now = self._now()
        shown = ", ".join(f"{list(tensor.shape)} on {tensor.device}" for tensor in made)
        threads = [after - before for after, before in zip(self.busy, self._busy, strict=True)]
        if any(threads):
            milliseconds = ", ".join(f"{1e3 * seconds:.2f}" for seconds in threads)
            shown += f" (threads: {milliseconds} ms)"
        self.rows.append((step, what, 1e3 * (now - self._clock), shown))
        self._clock, self._busy = now, list(self.busy)

    def worked(self, replica: int, started: float) -> None:
        """The thread of a replica is done with work that it started at a time (`perf_counter`)."""
        if self.watching:
            if self.devices[replica].type == "cuda":
                torch.cuda.synchronize(self.devices[replica])
            self.busy[replica] += time.perf_counter() - started

    def lines(self) -> list[str]:
        """The table, when the iteration is over; nothing before and after."""
        if not self.watching:
            return []
        lines = [
            f"iteration {self.iteration}, step by step:",
            f"{'step':58}{'ms':>8}  what was made, and where",
        ]
        for step, what, milliseconds, made in self.rows:
            lines.append(f"{step} {what:56}{milliseconds:8.2f}  {made}")
        total = sum(milliseconds for _, _, milliseconds, _ in self.rows)
        threads = 1e3 * sum(self.busy)
        of_threads = f"of which the threads computed {threads:.2f} ms in all"
        return [*lines, f"{'sum':58}{total:8.2f}  {of_threads}"]

    def _now(self) -> float:
        """The time when all that was asked for is done: the host does not wait for devices."""
        for device in {device for device in self.devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return time.perf_counter()
