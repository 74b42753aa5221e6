"""The flags of your_model. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from common.launch.flags import MAY_CHANGE, SPLIT, Launch, Watch, at_least
from common.train.precision import Precision


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    epochs: Annotated[int, arg(metavar="N")] = 20
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N"), SPLIT] = 48
    """GLOBAL batch size in samples, divided by the world size."""
    lr: float = 0.01
    """Highest learning rate of the one-cycle schedule."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 0.01
    """Weight decay of AdamW."""
    seed: int = 0
    """Seed of parameters and sample order."""
    workers: Annotated[int, arg(aliases=["-j"], metavar="N"), MAY_CHANGE] = 0
    """Loader processes per rank."""
    find_unused_parameters: Annotated[bool, MAY_CHANGE] = False
    """Let DDP search for parameters that a forward did not use."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/your_model")
    """Folder for the output of the run."""
    resume: Annotated[str, arg(metavar="auto|PATH|no"), MAY_CHANGE] = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    init: Annotated[Path | None, arg(metavar="FILE"), MAY_CHANGE] = None
    """Weights to start from: .safetensors, a checkpoint, or what torch.save has written."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS"), MAY_CHANGE] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    launch: OmitArgPrefixes[Launch] = Launch()
    amp: OmitArgPrefixes[Precision] = Precision()
    watch: OmitArgPrefixes[Watch] = Watch()

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size)
        at_least(1, checkpoint_every=self.checkpoint_every)
        at_least(0, workers=self.workers, lr=self.lr, seed=self.seed)
        at_least(0, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class TextArgs(Args):
    """The flags of language_model.py: the same, with other defaults."""

    epochs: Annotated[int, arg(metavar="N")] = 5
    """Passes over the training text."""
    lr: float = 0.005
    """Highest learning rate of the one-cycle schedule."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/language_model")
    """Folder for the output of the run."""
