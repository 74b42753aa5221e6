"""How slow this machine is at the moment: bounds in seconds are given for a quiet one with two cores."""

import os
import time
from contextlib import suppress
from pathlib import Path

from common.launch.cgroup import cores

LOOP = 0.07  # seconds that the loop below takes on a quiet core
AGAIN = 30.0  # seconds after which a measurement is old: others begin to use the cores
MOST = 20.0  # a program that hangs must end a test some day


_found: list[tuple[float, float]] = []  # when, and how many times the seconds of a quiet core


def _measured() -> float:
    """By the last two measurements, the slower one."""
    if not _found or time.monotonic() - _found[-1][0] > AGAIN:
        started, total = time.monotonic(), 0
        for number in range(1_000_000):
            total += number & 7
        assert total == 3_500_000
        ended = time.monotonic()
        _found[:] = [*_found[-1:], (ended, (ended - started) / LOOP)]
    return max(times for _, times in _found)


def one_core_each() -> None:
    """Where each test at a time has less than two cores, programs get a thread each, as two processes on two cores do.

    oneDNN's threads spin while they wait for each other: with more threads than cores, a training of 10 CPU seconds
    takes up to 90. Call this before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # what programs choose, and say, on a busy machine
    at_a_time = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if cores() < 2 * at_a_time:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def large_pages() -> None:
    """Have the C library take memory in pages of 2 MB, as programs read it when they start.

    Each new page of 4 KB stops a program for microseconds in a virtual machine: a sixth of the time of a training that
    takes seconds.
    """
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def in_turns() -> None:
    """Have Linux let a thread that computes finish its turn, here and in all programs that are started.

    gloo's thread, which every message wakes, would take the core from the rank that holds the lock which it needs, and
    spin until it gets that: where tests use all cores, a tenth of their time.
    """
    with suppress(PermissionError):  # where a sandbox forbids it, tests take longer
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def has_cuda() -> bool:
    """Whether torch finds a CUDA device. Without a driver it is not asked: to import it takes seconds."""
    if not any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg")):
        return False
    import torch

    return torch.cuda.is_available()


def here(seconds: float) -> float:
    """What `seconds` on a quiet machine can become: by a measurement, and by the load right now."""
    average, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    load = max(float(average), int(running.partition("/")[0]))  # the average, of a minute, follows slowly
    return seconds * min(MOST, max(1.0, _measured(), load / cores()))
