"""The flags of mnist_ddp_spawn; the shared flags are in common/launch.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from common.launch import NodeArgs


@dataclass(frozen=True)
class Args(NodeArgs):
    """Train a network on digits with DistributedDataParallel."""

    dataset: str = "digits"
    """digits (included), mnist, fashion-mnist, or a folder with files in MNIST's format."""
    data_dir: Path = Path("data")
    """Folder to which mnist and fashion-mnist are downloaded."""
    epochs: int = 20
    """Passes over the training set; MNIST needs only one."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 120
    lr: float = 0.2
    """Peak learning rate of the one-cycle schedule."""
    out: Path = Path("runs/mnist_ddp_spawn")
