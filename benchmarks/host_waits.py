"""Runs a program with one rank, and prints where its host waited for a GPU.

    python -m benchmarks.host_waits examples.gan_ddp --epochs 2

A wait empties the queue of the GPU, which then has nothing to do until the host has prepared more.
torch knows most of the calls that wait (`torch.cuda.set_sync_debug_mode`); this counts them, and at
how many different steps each place waits: start, evaluation and checkpoints may.
"""

import os
import runpy
import socket
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

WORDS = "synchronizing CUDA operation"
found: Counter[str] = Counter()
at: dict[str, set[int]] = {}
"""What `steps` was when a place waited."""
steps = 0  # of all optimizers, so far: two optimizers count two per step of the training


def count(message: Warning | str, category: type[Warning], file: str, line: int, *_: Any) -> None:
    """Count a warning of a wait by its place; show any other one."""
    if WORDS in str(message):
        place = f"{os.path.relpath(file)}:{line}"
        found[place] += 1
        at.setdefault(place, set()).add(steps)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, file, line))


def count_step(*_: Any) -> None:
    """Count a step of an optimizer."""
    global steps
    steps += 1


def main(module: str, *flags: str) -> None:
    """Run the module in this process, as torchrun would start its only rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    warnings.simplefilter("always")
    warnings.showwarning = count  # ty: ignore[invalid-assignment]
    register_optimizer_step_post_hook(count_step)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    sys.argv = [module, *flags]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        for place, times in found.most_common():
            print(f"host wait: {times} x {place}, at {len(at[place])} different steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
