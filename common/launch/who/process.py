"""What this process is doing: where its main thread is, whether it computes, its memory."""

import gc
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "stdlib"))
OURS = str(Path(__file__).parents[2]) + os.sep  # common/
Frame = tuple[str, int, str]  # file, line, function


def of_example(frames: Iterable[Frame]) -> list[Frame]:
    """The frames that are the user's own; if there are none, those of this package.

    Args:
        frames: the innermost first.
    """
    own = [frame for frame in frames if not frame[0].startswith((*LIBRARIES, "<frozen"))]
    return [frame for frame in own if not frame[0].startswith(OURS)] or own


def main_thread(innermost: FrameType | None = None) -> list[Frame]:
    """Where the main thread is, the innermost frame first."""
    collects = gc.isenabled()
    gc.disable()  # in Python 3.11 a collection inside this call can deadlock with a thread
    frame = innermost or sys._current_frames().get(threading.main_thread().ident or 0)
    if collects:
        gc.enable()
    frames: list[Frame] = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def busy(seconds: float = 0.05) -> bool:
    """Whether the main thread uses a core, or waits for one only. Takes `seconds`."""
    before = _wanted()
    time.sleep(seconds)
    return _wanted() - before > seconds / 2


def _wanted() -> float:
    """Seconds in which the main thread ran, or could have."""
    try:
        times = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return (int(times[0]) + int(times[1])) / 1e9


def memory() -> int:
    """Bytes of memory that this process occupies."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def source(file: str, line: int) -> str:
    """A line of a program."""
    return linecache.getline(file, line).strip()
