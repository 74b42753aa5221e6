"""State that differs from rank to rank, in a checkpoint that rank 0 writes."""

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(own: Tensor) -> Tensor:
    """What every rank has, one row each. Every rank calls this.

    Args:
        own: [n], the same n on all ranks.

    Returns:
        [W, n], on the CPU.
    """
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows).cpu()


def own_row(rows: Tensor) -> Tensor:
    """What this rank had when the rows [W, n] were gathered: [n].

    If there were more or fewer ranks, each gets the mean of all rows: so the mean over the ranks
    stays what it was.
    """
    if len(rows) == dist.get_world_size():
        return rows[dist.get_rank()]
    return rows.mean(dim=0)
