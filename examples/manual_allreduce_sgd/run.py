"""Fork processes, join them into a group, run, wait for them: the smallest distributed program.

    python -m examples.manual_allreduce_sgd.run                # 2 processes
    python -m examples.manual_allreduce_sgd.run --nproc 4

All other programs of this project start processes through `common.launch`, which also passes
signals on, names the process that failed, and works across nodes.
"""

import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from common.launch.args import parse
from common.launch.flags import at_least


@dataclass(frozen=True)
class Args:
    """Processes, and how long they wait for each other."""

    nproc: int = 2
    """Processes to start."""
    timeout: float = 60.0
    """Longest wait for another process, in seconds."""

    def __post_init__(self) -> None:
        at_least(1, nproc=self.nproc)
        at_least(1, timeout=self.timeout)


def run(rank: int, world_size: int) -> None:
    """What the processes do together: they add their ranks."""
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, dist.ReduceOp.SUM)
    assert value.item() == sum(range(world_size))
    # One write per line: lines of several processes do not mix.
    line = f"rank {rank} of {world_size}: the sum of all ranks is {value.item():g}\n"
    os.write(1, line.encode())


def init_process(rank: int, args: Args, file: str) -> None:
    """One process: join the group, run, leave the group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: listen on loopback only
    # All are on one machine and can meet at a file: a port could be taken, or reached by others.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=args.nproc,
        timeout=timedelta(seconds=args.timeout),
    )
    run(rank, args.nproc)
    dist.destroy_process_group()


def main(args: Args) -> int:
    """Start the processes and wait for them; returns 1 if one failed, else 0."""
    # fork is fast, and safe as long as torch has started neither threads nor CUDA.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/rendezvous"
        processes = [
            context.Process(target=init_process, args=(rank, args, file))
            for rank in range(args.nproc)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return max(int(process.exitcode != 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main(parse(Args, description=__doc__)))
