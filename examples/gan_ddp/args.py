"""The flags of gan_ddp."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from common.launch import RunArgs


@dataclass(frozen=True)
class Args(RunArgs):
    """Train a GAN with DDP: two networks that depend on each other."""

    dataset: str = "digits"
    """digits (comes with scikit-learn), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Path = Path("data")
    """Folder of mnist and fashion-mnist; missing files are downloaded."""
    epochs: int = 60
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 120
    """GLOBAL number of real images per step, and of generated ones, divided by the ranks."""
    lr: float = 1e-3
    """Learning rate of both networks."""
    out: Path = Path("runs/gan_ddp")
    """Folder for checkpoints, samples, metrics and the result."""
