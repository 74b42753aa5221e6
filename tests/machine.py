"""How slow this machine is at the moment: bounds in seconds are given for a quiet one with two cores."""

import functools
import os
import subprocess
import sys
import time

IMPORT = 4.0  # seconds that a new process takes to import torch on a quiet machine, with another one that does, too
MOST = 20.0  # a program that hangs must end a test some day


@functools.cache
def _measured() -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return (time.monotonic() - started) / IMPORT


def here(seconds: float) -> float:
    """What `seconds` on a quiet machine can become: by a measurement once per session, and by the load right now."""
    load_per_core = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return seconds * min(MOST, max(1.0, _measured(), load_per_core))
