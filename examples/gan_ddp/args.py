"""The flags of gan_ddp."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from common.launch.flags import IDX, MAY_CHANGE, SPLIT, Launch, Watch, at_least
from common.train.precision import PrecisionWithoutFp16

Violation = Literal["no", "two-forwards", "two-passes", "two-backwards"]


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    break_the_rule: Violation = "no"
    """Train the discriminator on real and generated images separately (rule.py shows how)."""
    norm: Literal["group", "batch"] = "group"
    """Normalisation in the discriminator; DDP sends BatchNorm's buffers before each forward."""
    dataset: Annotated[str, IDX] = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Annotated[Path, MAY_CHANGE] = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int, arg(metavar="N")] = 60
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N"), SPLIT] = 120
    """GLOBAL batch size in real images (and as many generated), divided by the world size."""
    lr: float = 1e-3
    """Learning rate of both networks."""
    latent: Annotated[int, arg(metavar="N")] = 32
    """Length of the noise vector that an image is generated from."""
    seed: int = 0
    """Seed of parameters, noise and sample order."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/gan_ddp")
    """Folder for the output of the run."""
    resume: Annotated[str, arg(metavar="auto|PATH|no"), MAY_CHANGE] = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    init: Annotated[Path | None, arg(metavar="FILE"), MAY_CHANGE] = None
    """Weights to start from: .safetensors, a checkpoint, or what torch.save has written."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS"), MAY_CHANGE] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    launch: OmitArgPrefixes[Launch] = Launch()
    amp: OmitArgPrefixes[PrecisionWithoutFp16] = PrecisionWithoutFp16()
    watch: OmitArgPrefixes[Watch] = Watch()

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, latent=self.latent)
        at_least(1, checkpoint_every=self.checkpoint_every)
        at_least(0, lr=self.lr, seed=self.seed)
