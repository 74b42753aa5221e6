"""The flags of imagenet_ddp, including those of `imagenet/main.py` from pytorch/examples."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from common.launch import NodeArgs


@dataclass(frozen=True)
class Args(NodeArgs):
    """Train any torchvision classification model on a folder of images."""

    data: Annotated[Positional[Path | None], arg(metavar="DIR")] = None
    """Folder with train/CLASS/* and val/CLASS/*; default: enlarged digits."""
    dummy: bool = False
    """Train on random images, to measure the speed without a dataset."""
    arch: Annotated[str, arg(aliases=["-a"])] = "resnet18"
    """Name of a model in torchvision.models."""
    pretrained: bool = False
    """Start from torchvision's newest weights for ImageNet."""
    evaluate: Annotated[bool, arg(aliases=["-e"])] = False
    """Only evaluate the weights that --resume or --pretrained selects."""
    epochs: Annotated[int, arg(metavar="N")] = -1
    """Passes over the training set; -1 means 90, or 6 with the digits."""
    start_epoch: Annotated[int, arg(metavar="N")] = 0
    """Start a new run with the sample order and learning rate of this epoch."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = -1
    """GLOBAL batch size in images; -1 means 256, or 96 for the digits."""
    accumulate: int = 1
    """Number of micro-batches per step, for batches that do not fit into memory."""
    image_size: Annotated[int, arg(metavar="PIXELS")] = -1
    """Height and width of the crops; -1 means 224, or 32 with the digits."""
    workers: Annotated[int, arg(aliases=["-j"])] = -1
    """Data-loading processes per rank; -1 means the rank's cores minus one, at most 16."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = -1.0
    """Peak learning rate; -1 means 0.1 (usual for batch size 256), or 0.02 with the digits."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 1e-4
    """Weight decay (L2 penalty) of SGD."""
    ema: Annotated[float, arg(metavar="DECAY")] = 0.0
    """Decay of a moving average of the weights, evaluated instead of them; 0 disables it."""
    sync_bn: bool = False
    """Synchronize BatchNorm's batch statistics over all ranks; CUDA only."""
    compile: bool = False
    """Compile the model with torch.compile."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # ty: ignore
    """auto selects bf16 if the device supports it natively, else fp32."""
    out: Path = Path("runs/imagenet_ddp")

    def __post_init__(self) -> None:
        values = (90, 256, 224, 0.1) if self.data or self.dummy else (6, 96, 32, 0.02)
        auto = zip(("epochs", "batch_size", "image_size", "lr"), values, strict=True)
        vars(self).update({n: v for n, v in auto if vars(self)[n] < 0})  # the instance is frozen
