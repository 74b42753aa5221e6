"""The flags of mnist_ddp_spawn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from common.launch.flags import MAY_CHANGE, Launch, at_least, share
from common.train.precision import Precision


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    dataset: str = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Annotated[Path, MAY_CHANGE] = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training set (default: 20 for digits, else 1)."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 120
    """GLOBAL batch size in samples, divided by the world size."""
    lr: float = 0.3
    """Highest learning rate of the one-cycle schedule."""
    momentum: float = 0.9
    """Momentum of SGD (Nesterov's)."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 2e-3
    """L2 penalty."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""
    seed: int = 0
    """Seed of parameters and sample order."""
    workers: Annotated[int, arg(aliases=["-j"], metavar="N"), MAY_CHANGE] = 0
    """Loader processes per rank; 0 is fastest here, since the data lie in memory as tensors."""
    find_unused_parameters: Annotated[bool, MAY_CHANGE] = False
    """Let DDP search for parameters that a forward did not use."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/mnist_ddp_spawn")
    """Folder for everything that the run writes."""
    resume: Annotated[str, MAY_CHANGE] = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS"), MAY_CHANGE] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    launch: OmitArgPrefixes[Launch] = Launch()
    amp: OmitArgPrefixes[Precision] = Precision()

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size)
        at_least(1, checkpoint_every=self.checkpoint_every)
        at_least(0, workers=self.workers, lr=self.lr, seed=self.seed)
        at_least(0, weight_decay=self.weight_decay)
        share(momentum=self.momentum, label_smoothing=self.label_smoothing)
