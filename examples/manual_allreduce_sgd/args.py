"""The flags of manual_allreduce_sgd."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.launch import RunArgs


@dataclass(frozen=True)
class Args(RunArgs):
    """Train a small network on digits; the ranks average gradients with explicit messages."""

    all_reduce: Literal["ring", "torch"] = "ring"
    """All-reduce implementation: `ring_all_reduce` in train.py, or torch's `dist.all_reduce`."""
    dataset: str = "digits"
    """digits (included), mnist or fashion-mnist (downloaded to data/), or a folder of idx files."""
    lr: float = 0.01
    """Learning rate."""
    seed: int = 1234
    out: Path = Path("runs/manual_allreduce_sgd")
