"""The flags of manual_allreduce_sgd."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.launch import RunArgs


@dataclass(frozen=True)
class Args(RunArgs):
    """Train a small network on images of digits; the ranks average their gradients by hand."""

    all_reduce: Literal["ring", "torch"] = "ring"
    """Algorithm of the sum: `ring_all_reduce` in train.py, or torch's `dist.all_reduce`."""
    dataset: str = "digits"
    """digits (included), mnist or fashion-mnist (downloaded to data/), or a folder like MNIST's."""
    lr: float = 0.01
    """Learning rate."""
    seed: int = 1234
    """Seed of parameters and sample order."""
    out: Path = Path("runs/manual_allreduce_sgd")
    """Folder for checkpoints, metrics and the result."""
