"""A minimal distributed program: fork processes, form a group, run a function, and wait.

    python -m examples.manual_allreduce_sgd.run

tour.py, allreduce.py and most programs in further/ start their ranks with `launch`.
`common.launch`, which train.py uses, also works with torchrun, several nodes and GPUs.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run() -> None:
    """Sum the rank numbers of all processes. Every rank calls this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(rank)
    dist.all_reduce(total, dist.ReduceOp.SUM)
    print(f"rank {rank} of {world_size}: the sum of all ranks is {total}", flush=True)


def init_process(rank: int, world_size: int, file: str, function: Any, *args: Any) -> None:
    """Join the process group as one of its ranks, call a function, and leave the group."""
    torch.set_num_threads(1)  # by default, each process would start a thread per core
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    method = f"file://{file}"  # a port could be in use, or accessible to other machines
    dist.init_process_group("gloo", method, world_size=world_size, rank=rank)
    function(*args)
    dist.destroy_process_group()


def launch(function: Callable[..., None], world_size: int, *args: Any) -> None:
    """Call `function(*args)` on each rank, and wait until all have returned."""
    context, processes = mp.get_context("fork"), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            arguments = (rank, world_size, f"{folder}/file", function, *args)
            processes.append(context.Process(target=init_process, args=arguments))
            processes[-1].start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


if __name__ == "__main__":
    launch(run, 2)
