"""Run an example on a GPU, and count how often its steps make the host wait for the device.

    python -m benchmarks.host_waits gan_ddp --epochs 2

During a wait, the device's queue runs empty; the device is then idle until the host submits work.
torch detects most waits, but not waits in collectives. The first steps of an epoch are
not counted.
"""

import os
import runpy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from common.run import Run

FIRST = 2  # number of steps at the start of an epoch that are not counted
places, steps = Counter[str](), 0
original_steps, original_finish = Run.steps, Run.finish


def count(message: Warning | str, _: type[Warning], file: str, line: int, *__: Any) -> None:
    """Count the warnings about waits per source line."""
    if "synchronizing CUDA operation" in str(message):
        places[f"{os.path.relpath(file)}:{line}"] += 1


def watched_steps(run: Run, loader: Any) -> Iterator[Any]:
    """Yield the batches of an epoch, and make torch warn when the host waits for the device."""
    global steps
    for number, batch in enumerate(original_steps(run, loader)):
        if number >= FIRST:
            steps += 1
            torch.cuda.set_sync_debug_mode("warn")
        yield batch
    torch.cuda.set_sync_debug_mode("default")


def finish(run: Run, model: Any, **facts: Any) -> None:
    """Finish a run, and print the number of host waits."""
    original_finish(run, model, **facts)
    print(f"host waits: {places.total()} in {steps} steps")
    for place, waits in places.most_common():
        print(f"  {waits} at {place}")


def main(example: str, *flags: str) -> None:
    """Run an example in this process."""
    warnings.simplefilter("always")
    warnings.showwarning = count  # ty: ignore
    Run.steps, Run.finish = watched_steps, finish  # ty: ignore
    sys.argv = [example, *flags]
    runpy.run_module(f"examples.{example}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("error: torch finds no CUDA device")
    main(*sys.argv[1:])
