"""What happens to a job on a GPU when one of its ranks is lost."""

import os
import signal
import subprocess
import time
from pathlib import Path

from benchmarks.gpu_checks import Failed, Machine

PATIENCE = 20.0  # the --timeout of the job


def lost(machine: Machine, stopped: bool) -> str:
    """One of two ranks is killed, or stops: the other ends in time, and says why."""
    label = "lost-" + ("stopped" if stopped else "killed")
    flags = ("--nproc", "2", "--epochs", "100000", "--timeout", f"{PATIENCE:g}")
    process = machine.start(label, *machine.words("mnist_ddp_spawn", label, *flags))
    saved = machine.out / label / "checkpoints"
    while process.poll() is None and not any(saved.glob("step-*.pt")):
        if time.monotonic() > machine.deadline:
            break
        time.sleep(0.05)
    workers = ranks_of(process.pid)
    try:
        if len(workers) < 2:
            raise Failed(f"{label}: {len(workers)} rank(s) are there, not 2")
        os.kill(workers[1], signal.SIGSTOP if stopped else signal.SIGKILL)
        started, allowed = time.monotonic(), PATIENCE * stopped + 10
        try:
            code = process.wait(allowed)
        except subprocess.TimeoutExpired:
            raise Failed(f"{label}: still there after {allowed:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said = (machine.out / f"{label}.txt").read_text().splitlines()
    error = next((line for line in said if line.startswith("error: ")), "")
    if code != 1 or not ("lost another process" in error or "was ended by SIGKILL" in error):
        raise Failed(f"{label}: exit code {code}: {said[-1] if said else 'nothing was printed'}")
    return f"ended after {time.monotonic() - started:.1f} s: {error}"


def ranks_of(parent: int) -> list[int]:
    """The processes that a program's ranks run in, in their order: children of its fork server."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    children = [pid for pid, of in parents.items() if of == parent]
    return sorted(pid for pid, of in parents.items() if of in children)
