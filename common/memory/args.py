"""The flags of the memory estimate. No torch here."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from common.launch.errors import UserError
from common.launch.flags import at_least

BERT = "bert"


@dataclass(frozen=True)
class Args:
    """The model, and the devices."""

    arch: Annotated[str, arg(aliases=["-a"])] = "resnet50"
    """A model of torchvision, or bert."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 256
    """GLOBAL batch size in samples."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd has momentum."""
    ranks: Annotated[int, arg(metavar="N")] = 4
    """Devices over which DDP, FSDP2 and a pipeline divide the work."""
    memory: Annotated[float | None, arg(metavar="GIB")] = None
    """Of a device: says what fits, and from how many devices on (powers of two)."""
    image_size: int = 224
    """Height and width of the images in pixels."""
    layers: int = 12
    """Of bert."""
    hidden: int = 768
    """Of bert: numbers per token; a head has 64 of them."""
    length: int = 128
    """Of bert: tokens per sample."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Whose kernels are asked what they keep; none is run, and no GPU is needed."""

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size, ranks=self.ranks, image_size=self.image_size)
        at_least(1, layers=self.layers, length=self.length)
        at_least(64, hidden=self.hidden)
        at_least(0, memory=self.memory)
        if self.hidden % 64:
            raise UserError(f"--hidden {self.hidden}: give a multiple of 64, the width of a head")
