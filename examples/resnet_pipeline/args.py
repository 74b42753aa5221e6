"""The flags of resnet_pipeline."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from common.launch import RunArgs


@dataclass(frozen=True)
class Args(RunArgs):
    """Train a ResNet that is cut into stages, one per process, with a pipeline of micro-batches."""

    arch: Annotated[
        Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"], arg(aliases=["-a"])
    ] = "resnet50"
    """Name of a torchvision model."""
    norm: Literal["group", "batch"] = "group"
    """group normalizes each sample; batch normalizes each micro-batch, which torchvision's weights
    require."""
    stages: Annotated[int, arg(metavar="P")] = 0
    """Stages per replica. N ranks form N / P replicas; 0 means one replica of N stages."""
    cuts: Annotated[tuple[str, ...], arg(metavar="BLOCK ...")] = ()
    """First block of each stage but the first, such as layer2.0; default: equal block counts."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the forward and backward passes on a stage."""
    micro_batches: Annotated[int, arg(aliases=["-m"], metavar="M")] = 4
    """Number of micro-batches into which a replica's batch is split."""
    data: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder with train/CLASS/* and val/CLASS/*; default: enlarged digits."""
    image_size: int = 32
    """Height and width of the images, in pixels."""
    epochs: int = 5
    batch_size: Annotated[int, arg(aliases=["-b"])] = 96
    """GLOBAL batch size in samples, split evenly among the replicas."""
    lr: float = 1e-3
    """Learning rate of AdamW."""
    out: Path = Path("runs/resnet_pipeline")
