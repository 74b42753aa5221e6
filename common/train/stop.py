"""A common last step: SIGTERM or Ctrl-C reaches one rank, and all stop after the same step."""

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from common.launch.args import STOPPING


class Stop:
    """Finds the step after which all ranks stop when a signal has reached any of them.

    Every few steps, `agreed` starts a small asynchronous all-reduce and reads the result of the one
    before, so no step waits for it, and all ranks read the same answer in the same step. The
    distance follows the pace of the steps, which the ranks agree on in the same message. Use as a
    context manager around the training loop; outside of it a signal ends the process at once.

    Args:
        seconds: about how long a signal may wait for the next message.
    """

    def __init__(self, seconds: float = 0.2) -> None:
        self._seconds = seconds
        self._signum = 0
        self._stopping = False  # all ranks stop after this step
        self._steps = 0  # since the last message
        self._distance = 1  # steps between messages
        self._sent = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None

    def __enter__(self) -> "Stop":
        self._previous = {signum: signal.signal(signum, self._remember) for signum in STOPPING}
        self._clock = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._work is not None and kind is None:
            self._work.wait()
        if self._stopping:
            return  # another signal, as an impatient user's, changes nothing any more
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _remember(self, signum: int, _: FrameType | None) -> None:
        self._signum = signum

    def agreed(self) -> int:
        """The signal on which all ranks stop after this step, or 0.

        Every rank calls this once per step.
        """
        self._steps += 1
        if self._steps < self._distance:
            return 0
        signum = 0
        if self._work is not None:
            self._work.wait()
            signum, slowness = self._sent.tolist()
            pace = round(self._seconds * 1e6 / max(1, slowness))
            self._distance = max(1, min(2 * self._distance, pace))  # first steps mislead
        now = time.monotonic()
        per_step = round(1e6 * (now - self._clock) / self._steps)  # microseconds
        self._clock, self._steps = now, 0
        self._sent = torch.tensor([self._signum, min(per_step, 2**31 - 1)], dtype=torch.int32)
        self._work = dist.all_reduce(self._sent, dist.ReduceOp.MAX, async_op=True)
        self._stopping = signum > 0
        return signum
