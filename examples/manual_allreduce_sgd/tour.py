"""Show each rank's tensors before and after each torch.distributed call.

python -m examples.manual_allreduce_sgd.tour              # with 4 processes
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from .run import launch


def text(value: object) -> str:
    """Format a tensor, or a list of tensors, as numbers."""
    if isinstance(value, Tensor):
        return f"[{', '.join(f'{number:g}' for number in value.tolist())}]"
    return f"[{', '.join(map(text, value))}]" if isinstance(value, list) else str(value)


def show(call: str, before: str, after: object) -> None:
    """Print all ranks' values before and after a call. Every rank calls this."""
    rows: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((before, text(after)), rows)
    if rows is not None:
        width = max(len(row[0]) for row in [("before",), *rows])
        table = [f"  {rank:>4}  {row[0]:{width}}  {row[1]}" for rank, row in enumerate(rows)]
        print("\n".join(["", call, f"  rank  {'before':{width}}  after", *table]), flush=True)


def send_and_receive(rank: int, world_size: int) -> None:
    """Send a tensor from one rank to another."""
    value = torch.tensor([100.0 if rank == 0 else -1.0])
    before = text(value)
    if rank > 0:  # if rank 0 also received first, all ranks would wait forever
        dist.recv(value, src=rank - 1)
        value += 1
    if rank < world_size - 1:
        dist.send(value, dst=rank + 1)
    show("recv from the left, add 1, send to the right; both calls block", before, value)

    value = torch.tensor([7.0 if rank == 0 else -1.0])
    before = text(value)
    if rank < 2:
        work: Any = dist.isend(value, dst=1) if rank == 0 else dist.irecv(value, src=0)
        print(f"rank {rank} started {'sending' if rank == 0 else 'receiving'}", flush=True)
        work.wait()  # do not touch the tensor until wait() returns
    show("isend from rank 0, irecv on rank 1, wait", before, value)


def one_to_all(rank: int, world_size: int) -> None:
    """Send from rank 0 to all ranks: the same tensor, or a different tensor to each rank."""
    value = torch.tensor([rank, 10.0 * rank])
    before = text(value)
    dist.broadcast(value, src=0)
    show("broadcast(src=0)", before, value)

    parts = [torch.tensor([10.0 * peer]) for peer in range(world_size)] if rank == 0 else None
    received = torch.tensor([-1.0])
    dist.scatter(received, parts, src=0)  # only the source passes a list
    show("scatter(src=0)", text(parts), received)


def collect(rank: int, world_size: int) -> None:
    """Collect the values from all ranks, ordered by rank, on rank 0 or on all ranks."""
    # all_gather fills existing tensors, one for each rank in the job, not only on this node.
    own, blanks = torch.tensor([10.0 * rank]), [torch.tensor([-1.0]) for _ in range(world_size)]
    dist.all_gather(blanks, own)
    show("all_gather", text(own), blanks)
    collected = [torch.tensor([-1.0]) for _ in range(world_size)] if rank == 0 else None
    dist.gather(own, collected, dst=0)  # only the destination passes a list
    show("gather(dst=0)", text(own), collected)

    # Objects are pickled, so use these calls only for small objects from trusted processes.
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    show("all_gather_object", str({"rank": rank}), objects)
    objects_of_all: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object({"rank": rank}, objects_of_all, dst=0)
    show("gather_object(dst=0)", str({"rank": rank}), objects_of_all)


def reductions(rank: int, world_size: int) -> None:
    """Reduce tensors over all ranks; the result is on rank 0 or on all ranks."""
    value = torch.tensor([rank + 2.0])
    before = text(value)
    dist.reduce(value, dst=0)
    show("reduce(dst=0, SUM): other ranks are left with partial sums", before, value)
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
        value = torch.tensor([rank + 2.0])
        dist.all_reduce(value, getattr(dist.ReduceOp, name))
        show(f"all_reduce({name})", before, value)

    parts = [torch.tensor([10.0 * peer + rank]) for peer in range(world_size)]
    received = torch.tensor([-1.0])
    dist.reduce_scatter(received, parts)  # half of a ring all-reduce; all_gather is the other half
    show("reduce_scatter(SUM)", text(parts), received)


def wait(rank: int, world_size: int) -> None:
    """Wait for all ranks, which arrive at different times."""
    began = time.perf_counter()
    time.sleep(0.1 * (world_size - rank))
    before = f"arrived after {time.perf_counter() - began:.2f} s"
    dist.barrier()
    show("barrier", before, f"left after {time.perf_counter() - began:.2f} s")


def refused(rank: int, world_size: int) -> None:
    """Try calls that raise on every rank. If only one rank raised, the others would wait."""
    sizes = [torch.empty(1 + peer) for peer in range(world_size)]
    column = torch.empty(2, 2)[:, 0]
    new_group: Any = dist.new_group
    calls: dict[str, Callable[[], object]] = {
        "all_gather of different sizes; pad to the longest": lambda: dist.all_gather(
            sizes, sizes[rank]
        ),
        "send of a tensor that is not contiguous; use tensor.contiguous()": lambda: dist.send(
            column, dst=(rank + 1) % world_size
        ),
        "all_reduce of a CPU tensor with nccl; use gloo": lambda: dist.all_reduce(
            torch.tensor(rank), group=new_group(backend="nccl")
        ),
    }
    for call, function in calls.items():
        try:
            function()
        except (RuntimeError, ValueError) as error:
            show(call, "", f"{type(error).__name__}: {str(error).splitlines()[0]}")


def tour() -> None:
    """Show all calls. Every rank calls this."""
    for topic in (send_and_receive, one_to_all, collect, reductions, wait, refused):
        topic(dist.get_rank(), dist.get_world_size())


def main(nproc: int = 4) -> None:
    """Show the tensors of `nproc` ranks, at least 2, before and after each call."""
    launch(tour, nproc)


if __name__ == "__main__":
    tyro.cli(main)
