"""Cores and memory that this process may use: its control group's limits, and its affinity mask."""

import contextlib
import os
import socket
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def _read(name: str) -> str:
    return (GROUPS / name).read_text()


def cores() -> int:
    """The CPU cores that this process may use: its affinity mask, cut to its container's quota.

    Cut to its pod's request, too, if that is lower: what lies between request and limit is there
    only while no other pod wants it. (k8s/base/job.yaml sets the variable.)
    """
    every = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    requested = os.environ.get("CPU_REQUEST", "")
    request = int(requested) if requested.isdigit() else 0  # 0: the pod has none
    return max(1, min(usable, int(cpu_quota() or usable), request or usable))


def cpu_quota() -> float | None:
    """The CPU limit of this container, in cores; None without one ("max", in version 1 -1)."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join(map(_read, files)).split()
            return int(quota) / int(period) if int(quota) > 0 else None
    return None


def memory_left() -> int | None:
    """Bytes below the memory limit of this container that nobody uses; None without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            return int(_read(limit)) - int(_read(used))
    return None


def machine() -> str:
    """A name for the set of cores that this process shares with others of the job."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if cpu_quota():  # a container with cores of its own
            name += str(Path("/proc/self/ns/mnt").readlink())
    except OSError:
        name = socket.gethostname()
    mask = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ""
    return f"{name} {mask}"
