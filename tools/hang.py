"""Show what each rank of a live run is doing, and which rank the other ranks wait for.

    python -m tools.hang runs/NAME    # the run's --out

On SIGUSR1, the ranks on this machine write OUT/hang/rank-R.json. For ranks on other machines that
share OUT, run the same command there.
"""

import os
import platform
import signal
import time
from pathlib import Path

import tyro

from common.hang import explain, process_state, read_reports, table


def main(out: tyro.conf.Positional[Path]) -> None:
    """Signal the ranks on this machine, and print one line per rank and an explanation.

    Args:
        out: the run's output folder.
    """
    if not (out / "lock").exists():
        raise SystemExit(f"error: {out} has no file named lock; pass the --out folder of a run")
    processes = [line.split() for line in (out / "lock").read_text().splitlines()]
    asked = time.time()
    states = {}
    for rank, (host, pid) in enumerate(processes):
        if host == platform.node():
            try:
                os.kill(int(pid), signal.SIGUSR1)
            except ProcessLookupError:
                states[rank] = "has exited"
    time.sleep(2)  # a rank that is blocked in a collective reports after half a second
    reports = read_reports(out / "hang", since=asked)
    for rank in {*range(len(processes))} - {report["rank"] for report in reports}:
        host, pid = processes[rank]
        state = process_state(int(pid)) if host == platform.node() else f"runs on {host}"
        states.setdefault(rank, state)
    print("\n".join([*table(reports), explain(reports, states)]))


if __name__ == "__main__":
    tyro.cli(main)
