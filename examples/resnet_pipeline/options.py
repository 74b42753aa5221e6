"""Flags about the model and its cut, without importing torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from common.errors import UserError
from common.flags import at_least


@dataclass(frozen=True)
class Cut:
    """The model, where it is cut, and in which order the parts work."""

    arch: Annotated[Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"], arg(aliases=["-a"])] = (
        "resnet50"
    )
    """Model."""
    norm: Literal["batch", "group", "frozen"] = "batch"
    """batch normalises over a micro-batch; group per sample; frozen keeps BatchNorm's statistics (with --weights)."""
    weights: Path | None = None
    """Weights of the un-split model to start from (safetensors, names as in torchvision)."""
    stages: Annotated[int | None, arg(metavar="P")] = None
    """Processes of one pipeline (default: all); the others are replicas that train on other samples."""
    micro_batches: Annotated[int, arg(aliases=["-m"], metavar="M")] = 4
    """Micro-batches into which each replica's share of the batch is cut; they need not be equal."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"] = "1f1b"
    """In which order; the last three put two stages on each process, and the last two of them need --engine torch."""
    engine: Literal["hand", "torch"] = "hand"
    """hand: schedule.py of this example; torch: torch.distributed.pipelining."""
    balance: Literal["auto", "even"] = "auto"
    """Where to cut: auto by measured times, even by the number of blocks."""
    cuts: tuple[str, ...] = ()
    """First block of the second and later stages, as layer2.0 layer4.1; overrides --balance."""
    recompute: bool = False
    """Activation checkpointing: keep each stage's input only and compute the rest again for the backward pass."""

    def __post_init__(self) -> None:
        at_least(1, stages=self.stages, micro_batches=self.micro_batches)
        if self.engine == "hand" and self.schedule in ("zero-bubble", "zbv"):
            raise UserError(
                f"--schedule {self.schedule} needs --engine torch; schedule.py has none with halved backwards"
            )
        if self.recompute and self.schedule in ("zero-bubble", "zbv"):
            raise UserError(f"--recompute with --schedule {self.schedule}: its split backward would compute it twice")
