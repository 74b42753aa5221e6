"""Show what each rank of a live run is doing, and which rank the other ranks wait for.

    python -m tools.hang runs/NAME    # the run's --out

The program sends SIGUSR1 to the ranks on this machine, which then write OUT/hang/rank-R.json. If
ranks on other machines share OUT, also run the command there within a minute.
"""

import platform
import time
from pathlib import Path

import tyro

from common.hang import compare


def main(out: tyro.conf.Positional[Path]) -> None:
    """Print one line per rank and an explanation.

    Args:
        out: the run's output folder.
    """
    if not (out / "lock").exists():
        raise SystemExit(f"error: {out} has no file named lock; pass the --out folder of a run")
    processes = dict(enumerate((out / "lock").read_text().splitlines()))
    for rank, process in processes.items():
        if process.split()[0] == platform.node():  # the rank writes a new report
            (out / f"hang/rank-{rank}.json").unlink(missing_ok=True)
    print("\n".join(compare(out / "hang", processes, since=time.time() - 60)))


if __name__ == "__main__":
    tyro.cli(main)
