"""The flags of your_model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from common.launch import RunArgs


@dataclass(frozen=True)
class Args(RunArgs):
    """Train your model. This template classifies tumors until you change the four marked places."""

    epochs: int = 20
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 48
    """GLOBAL batch size in samples, divided by the number of ranks."""
    lr: float = 0.01
    """Peak learning rate of the one-cycle schedule."""
    out: Path = Path("runs", Path(__file__).parent.name)
    """Folder for checkpoints, metrics and the result."""
