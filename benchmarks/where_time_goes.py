"""Runs a program in this process, and writes where its main thread was every few milliseconds.

    python benchmarks/where_time_goes.py OUT.json MODULE [FLAG ...]

OUT.json has the seconds until this file began (the interpreter's own start), and for each place the
seconds in it: `import PACKAGE` for what a package's import takes with all that it imports in turn;
`FILE: LINE` for the innermost line of an example's train.py; or else the innermost module of
`common`. A sample counts for the time since the one before: what holds the interpreter's lock is
not seen meanwhile, but counted.
"""

import json
import linecache
import os
import runpy
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

OURS = ("examples", "common")
EVERY = 0.002  # seconds


def frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of a stack, the outermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def place(stack: list[FrameType]) -> str:
    """Where a stack is, as above."""
    for frame in stack:
        if frame.f_code.co_name == "_find_and_load":
            package = str(frame.f_locals.get("name", "")).partition(".")[0]
            if package not in OURS:
                return f"import {package}"
    for frame in reversed(stack):
        file = frame.f_code.co_filename
        if file.endswith("/train.py") and "/examples/" in file:
            return f"train.py: {linecache.getline(file, frame.f_lineno).strip()}"
    for frame in reversed(stack):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("common."):
            return module
    return "else"


def main() -> None:
    """Run the program; the samples are written when it ends."""
    out, module, *flags = sys.argv[1:]
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    found = defaultdict[str, float](float)
    found["interpreter"] = up - ticks / os.sysconf("SC_CLK_TCK")
    main_thread, leave = threading.get_ident(), os._exit

    def watch() -> None:
        before = time.monotonic()
        while True:
            time.sleep(EVERY)
            where, now = place(frames(sys._current_frames()[main_thread])), time.monotonic()
            found[where] += now - before
            before = now

    def write_and_leave(code: int) -> NoReturn:
        Path(out).write_text(json.dumps(dict(found)))
        leave(code)

    os._exit = write_and_leave  # ty: ignore[invalid-assignment]
    threading.Thread(target=watch, daemon=True).start()
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
