"""The flags of mnist_dataparallel."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from common.launch import RunArgs


@dataclass(frozen=True)
class Args(RunArgs):
    """Classify digits with nn.DataParallel: one process trains on several devices."""

    device_ids: Annotated[tuple[int, ...], arg(metavar="N ...")] = ()
    """CUDA devices; the model is on the first one. Default: all. On a CPU, each number is a replica
    with its own thread; default: 0 1."""
    explain: bool = False
    """Run the eight steps by hand, and print what they do in the third iteration."""
    dataset: str = "digits"
    """digits (included), mnist or fashion-mnist (downloaded to data/), or a folder of idx files."""
    epochs: int = 20
    batch_size: Annotated[int, arg(aliases=["-b"])] = 120
    """GLOBAL batch size in samples, divided among the processes and then their devices."""
    out: Path = Path("runs/mnist_dataparallel")
