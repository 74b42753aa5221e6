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
    batch_size: Annotated[int, arg(aliases=["-b"])] = 48
    lr: float = 0.01
    """Peak learning rate of the one-cycle schedule."""
    out: Path = Path("runs", Path(__file__).parent.name)
