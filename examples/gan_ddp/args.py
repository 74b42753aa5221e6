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
    """digits (included), mnist or fashion-mnist (downloaded to data/), or a folder of idx files."""
    epochs: int = 60
    batch_size: Annotated[int, arg(aliases=["-b"])] = 120
    """GLOBAL batch size: real images per step over all ranks; the same number is generated."""
    out: Path = Path("runs/gan_ddp")
