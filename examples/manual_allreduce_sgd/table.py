"""What each rank holds before and after a call, checked and shown."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import World, say


def text(value: object) -> str:
    """Tensors and lists of tensors as nested lists of numbers, anything else as it is."""
    if isinstance(value, Tensor):
        return str(value.tolist()).replace(".0,", ",").replace(".0]", "]")
    return f"[{', '.join(map(text, value))}]" if isinstance(value, list) else str(value)


class Tour:
    """What the topics have in common: the world, numbers to send, and a table of before and after.

    Args:
        world: this process's world.
    """

    def __init__(self, world: World) -> None:
        self.world, self.rank, self.size = world, world.rank, world.size
        self.right, self.left = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def numbers(self, *values: float) -> Tensor:
        """A float tensor on this process's device."""
        return torch.tensor(values, dtype=torch.float32, device=self.world.device)

    def blanks(self, count: int = 1) -> list[Tensor]:
        """A tensor [count] for each rank, to receive into."""
        return [torch.full((count,), -1.0, device=self.world.device) for _ in range(self.size)]

    def show(self, title: str, before: str, after: object, expected: object) -> None:
        """Check what this rank holds now, and print what all ranks held before and hold after.

        Raises:
            AssertionError: it is not what was expected.
        """
        assert text(after) == text(expected), f"{title}: rank {self.rank} holds {text(after)}, not {text(expected)}"
        rows: list[Any] = [None] * self.size
        dist.all_gather_object(rows, (before, text(after)))
        width = max(len("before"), *(len(row[0]) for row in rows))
        say(self.world, f"\n{title}\n  rank  {'before':{width}}  after")
        for rank, row in enumerate(rows):
            say(self.world, f"  {rank:>4}  {row[0]:{width}}  {row[1]}")
