"""Programs that are measured from outside: their output with its times, and their memory."""

import hashlib
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from benchmarks.harness import query_gpu
from common.launch.errors import UserError

# Slow start-up; and one thread for the peer, but not for us.
UNWANTED = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")


def observe(
    command: str, folder: Path, places: Mapping[str, str]
) -> Generator[tuple[float, str], None, None]:
    """Run a program; closing the iterator ends it, with all processes that it started.

    Args:
        command: words and placeholders, separated by spaces; `python` is this Python.
        folder: its working directory.
        places: what the placeholders stand for.

    Yields:
        Seconds since its start, and a line of its output.

    Raises:
        SystemExit: it failed; the message has its last lines.
    """
    environment = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    environment["PYTHONUNBUFFERED"] = "1"  # else lines arrive in blocks, seconds late
    known = {"python": sys.executable, **places}
    words = [known.get(word, word) for word in command.split()]
    last: deque[str] = deque(maxlen=20)
    stop_cleanly()
    started = time.perf_counter()
    streams: dict[str, Any] = {"stdout": PIPE, "stderr": STDOUT, "encoding": "utf-8"}
    where: dict[str, Any] = {"cwd": folder, "env": environment, "start_new_session": True}
    with Popen(words, **streams, **where) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last.append(line)
                yield time.perf_counter() - started, line.rstrip()
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    if code:
        text = "".join(last)
        raise SystemExit(f"error: `{command}` ended with exit code {code}; its last lines:\n{text}")


def stop_cleanly() -> None:
    """Let SIGTERM end the programs that were started; by default it would leave them behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def check_peer(checkout: Path | None, program: str) -> None:
    """Check that a checkout of pytorch/examples has a program.

    Raises:
        UserError: it does not.
    """
    if checkout and not (checkout / program).is_file():
        raise UserError(f"--peer {checkout}: {program} of pytorch/examples is missing")


def peer_facts(checkout: Path | None, program: str, name: str) -> dict[str, Any]:
    """What a result says about its peer."""
    if checkout is None:
        return {"peer_sha256": None, "skipped": [f"{name}: --peer was not given"]}
    digest = hashlib.sha256((checkout / program).read_bytes()).hexdigest()
    return {"peer_sha256": digest, "skipped": []}


def peak_memory() -> tuple[float | None, float | None]:
    """High-water marks of the program that runs: of its largest process, and of all, in MiB.

    None where there is no /proc. Pages that the processes share at the end count once; those that
    they share with other programs make the sum too small.
    """
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], sessions[int(folder.name)] = int(fields[1]), int(fields[3])
    peaks, unshared = [], []
    for process in parents:
        ancestor = process
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        # `observe` gives its program a session of its own.
        if ancestor == os.getpid() and sessions[process] != os.getsid(0):
            with suppress(OSError, KeyError):
                files = (Path(f"/proc/{process}/{name}") for name in ("status", "smaps_rollup"))
                text = "".join(file.read_text() for file in files)
                found = re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)
                mib = {name: int(value) / 1024 for name, value in found}
                peaks.append(mib["VmHWM"])
                unshared.append(mib["VmHWM"] - mib["Rss"] + mib["Pss"])
    return (max(peaks), max(*peaks, sum(unshared))) if peaks else (None, None)


def device_memory() -> float | None:
    """Memory in use on the GPU that the programs see, in MiB; None without a GPU."""
    answer = query_gpu("memory.used", "-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    return float(answer[0]) if len(answer) == 1 and answer[0].strip().isdigit() else None


def device_memory_at_rest(patience: float = 20.0) -> float | None:
    """Memory in use when it has stopped changing, or `patience` seconds later.

    The driver gives a program's memory back some time after its end.
    """
    read, deadline = [device_memory()], time.monotonic() + patience
    while read[0] is not None and time.monotonic() < deadline and read[-5:] != 5 * read[-1:]:
        time.sleep(patience / 40)
        read.append(device_memory())
    return read[-1]
