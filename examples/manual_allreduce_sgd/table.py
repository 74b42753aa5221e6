"""What each rank holds before and after a call, checked and shown."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.launch.collectives import print0


def text(value: object) -> str:
    """Tensors and lists of tensors as nested lists of numbers, anything else as `str` shows it."""
    if isinstance(value, Tensor):
        return str(value.tolist()).replace(".0,", ",").replace(".0]", "]")
    return f"[{', '.join(map(text, value))}]" if isinstance(value, list) else str(value)


class Tour:
    """What the topics have in common: ranks, numbers to send, and a table of before and after.

    Args:
        device: the device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.right = (self.rank + 1) % self.world_size
        self.left = (self.rank - 1) % self.world_size

    @property
    def backend(self) -> str:
        """The backend that moves this rank's tensors."""
        return (
            "nccl" if "nccl" in dist.get_backend_config() and self.device.type == "cuda" else "gloo"
        )

    def numbers(self, *values: float) -> Tensor:
        """A float tensor on the device of this rank."""
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def blanks(self, count: int = 1) -> list[Tensor]:
        """A tensor [count] for each rank, to receive into."""
        return [torch.full((count,), -1.0, device=self.device) for _ in range(self.world_size)]

    def show(self, title: str, before: str, after: object, expected: object) -> None:
        """Check what this rank holds now, and print what all ranks held before and hold after.

        Every rank calls this.

        Raises:
            AssertionError: it is not what was expected.
        """
        held, wanted = text(after), text(expected)
        assert held == wanted, f"{title}: rank {self.rank} holds {held}, not {wanted}"
        rows: list[Any] = [None] * self.world_size
        dist.all_gather_object(rows, (before, held))
        width = max(len("before"), *(len(row[0]) for row in rows))
        print0(f"\n{title}\n  rank  {'before':{width}}  after")
        for rank, row in enumerate(rows):
            print0(f"  {rank:>4}  {row[0]:{width}}  {row[1]}")
