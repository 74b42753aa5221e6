"""The smallest distributed program: fork processes, join them into a group, run, wait for them.

python -m examples.manual_allreduce_sgd.run                # 2 processes
python -m examples.manual_allreduce_sgd.run --nproc 4

Everything else of this project starts processes through common/distributed.py, which also passes signals on, names the
process that failed, and works across nodes.
"""

import multiprocessing
import os
from dataclasses import dataclass

from common.flags import at_least, leave, parse


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    nproc: int = 2
    """Processes to start."""
    timeout: float = 60.0
    """Longest wait for another process, in seconds."""

    def __post_init__(self) -> None:
        at_least(1, nproc=self.nproc)
        at_least(1, timeout=self.timeout)


if __name__ == "__main__":  # before the heavy imports
    args = parse(Args, description=__doc__)

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist


def run(rank: int, size: int) -> None:
    """What the processes do together: the sum of their ranks."""
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, dist.ReduceOp.SUM)
    assert value.item() == sum(range(size))
    os.write(1, f"rank {rank} of {size}: the sum of all ranks is {value.item():g}\n".encode())  # a whole line at once


def init_process(rank: int, args: Args, file: str) -> None:
    """One process: join the group, run, leave it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: nothing listens outside of it
    limit = timedelta(seconds=args.timeout)
    # A file as meeting point, since all are on one machine: no port that could be taken, or reached by others.
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=args.nproc, timeout=limit)
    run(rank, args.nproc)
    dist.destroy_process_group()


def main(args: Args) -> int:
    """Start the processes and wait for them; returns 1 if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        # fork is fast, and safe as long as torch has started neither threads nor CUDA; spawn is for all other cases.
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=init_process, args=(rank, args, f"{folder}/meet")) for rank in range(args.nproc)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return max(int(process.exitcode != 0) for process in processes)


if __name__ == "__main__":
    leave(main(args))
