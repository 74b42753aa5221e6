"""Compare the flags and results of runs; `tensorboard --logdir runs` shows their curves.

python -m tools.compare runs/a runs/b
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import tyro
from tyro.conf import Positional

MACHINE = ["host", "commit", "torch", "device", "threads"]
RESULTS = ["steps", "epochs", "seconds", "parameter_hash"]


def read(folder: Path) -> dict[str, Any]:
    """Return a run's flags and results, from its newest checkpoint if it is unfinished."""
    if (folder / "result.json").exists():
        run = json.loads((folder / "result.json").read_text())
    else:
        from common import checkpoint  # importing torch takes seconds

        found = checkpoint.newest(folder / "checkpoints", print)
        run: Any = found[1] if found else {"args": {}}
        run |= {"steps": run.get("step"), "epochs": run.get("epoch"), "seconds": "unfinished"}
    row = {f"--{name.replace('_', '-')}": value for name, value in run["args"].items()}
    return row | {name: run.get(name) for name in MACHINE + RESULTS} | run.get("metrics", {})


def main(runs: Positional[list[Path]]) -> None:
    """Print a table of all results, and of the flags that differ between the runs."""
    table = pd.DataFrame({str(run): read(run) for run in runs})
    hidden = table.index.str.startswith("--") | table.index.isin(MACHINE)  # if equal in all runs
    print(table[~hidden | (table.nunique(axis=1) > 1)].fillna("-").to_string(max_colwidth=32))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m tools.compare")
