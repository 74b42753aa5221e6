"""The flags of mnist_ddp_spawn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, arg

from common.launch.errors import UserError
from common.launch.flags import IDX, MAY_CHANGE, SPLIT, Launch, Watch, at_least, share
from common.train.precision import Precision


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    dataset: Annotated[str, IDX] = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Annotated[Path, MAY_CHANGE] = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training set (default: 20 for digits, else 1)."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N"), SPLIT] = 120
    """GLOBAL batch size in samples, divided by the world size."""
    lr: float = 0.2
    """Highest learning rate of the one-cycle schedule; with fewer than 50 steps, 0.1 learns
    more."""
    momentum: float = 0.9
    """Momentum of SGD (Nesterov's)."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 5e-4
    """L2 penalty."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""
    dry_run: bool = False
    """Train on one batch as a smoke test."""
    seed: int = 0
    """Seed of parameters and sample order."""
    test_batch_size: Annotated[int, arg(metavar="N"), MAY_CHANGE] = 1000
    """Test images at once per rank: it changes the speed, not the result."""
    workers: Annotated[int, arg(aliases=["-j"], metavar="N"), MAY_CHANGE] = 0
    """Loader processes per rank; 0 is fastest here, since the data lie in memory as tensors."""
    find_unused_parameters: Annotated[bool, MAY_CHANGE] = False
    """Let DDP search for parameters that a forward did not use."""
    gamma: Annotated[float | None, MAY_CHANGE] = None
    """Of pytorch/examples: refused, since the schedule is another one."""
    save_model: Annotated[bool, MAY_CHANGE] = False
    """Of pytorch/examples: refused, since the best weights are kept anyway."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/mnist_ddp_spawn")
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
        at_least(1, checkpoint_every=self.checkpoint_every, test_batch_size=self.test_batch_size)
        at_least(0, workers=self.workers, lr=self.lr, seed=self.seed)
        at_least(0, weight_decay=self.weight_decay)
        share(momentum=self.momentum, label_smoothing=self.label_smoothing)
        if self.gamma is not None:
            raise UserError(
                "--gamma: the learning rate rises to --lr and falls to 0 once per run here, "
                "it is not multiplied after each epoch: leave --gamma out"
            )
        if self.save_model:
            raise UserError(
                f"--save-model: the best weights are always kept, in {self.out}/best.safetensors: "
                f"leave it out"
            )

    @property
    def num_epochs(self) -> int:
        """--epochs, or the default."""
        return 1 if self.dry_run else self.epochs or (20 if self.dataset == "digits" else 1)

    @property
    def most_samples(self) -> int | None:
        """How many samples to train on, if not on all."""
        return self.batch_size if self.dry_run else None

    @property
    def options(self) -> dict[str, Any]:
        """What `Run` is told beside the flags."""
        return {"settings": {"epochs": self.num_epochs}}
