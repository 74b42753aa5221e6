"""The flags of manual_allreduce_sgd."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from common.launch.errors import UserError
from common.launch.flags import IDX, MAY_CHANGE, Launch, Watch, at_least, equal_parts, share
from common.train.precision import Precision

Synchronous = Literal[
    "per-parameter",
    "flat",
    "bucketed",
    "ring",
    "fast-ring",
    "recursive-doubling",
    "shared-memory",
    "ddp",
]
Algorithm = Literal[Synchronous, "local-sgd", "diloco"]
HALVES = ("flat", "bucketed", "ring", "fast-ring", "recursive-doubling", "shared-memory")
CAN_COMPRESS = {"bf16": HALVES, "fp16": HALVES, "top-k": ("ring",), "powersgd": ("ring",)}

ONLY_OF = {
    "share": {"top-k"},
    "matrix_rank": {"powersgd"},
    "every": {"local-sgd", "diloco"},
    "outer_lr": {"diloco"},
    "outer_momentum": {"diloco"},
    "bucket_mb": {"bucketed"},
}
"""Flags that would be ignored without these."""


@dataclass(frozen=True)
class Args:
    """What to train, and how the ranks average their gradients."""

    algorithm: Annotated[Algorithm, arg(aliases=["-a"])] = "ring"
    """How the gradients are averaged over the ranks (gradients.py)."""
    compress: Literal["no", "bf16", "fp16", "top-k", "powersgd"] = "no"
    """Send fewer bytes: bf16 and fp16 half of them, the others a few percent (compress.py)."""
    share: float = 0.01
    """Of the gradient's elements, those that `top-k` sends."""
    matrix_rank: Annotated[int, arg(metavar="N")] = 2
    """Columns of the thin matrices that `powersgd` sends."""
    every: Annotated[int, arg(metavar="STEPS")] = 8
    """Steps between two meetings of `local-sgd` and `diloco`."""
    outer_lr: float = 0.7
    """Learning rate of `diloco`'s outer optimizer."""
    outer_momentum: float = 0.9
    """Momentum of `diloco`'s outer optimizer."""
    bucket_mb: float = 4.0
    """Size of a bucket of `bucketed`, in MB."""
    shares: Annotated[str, arg(metavar="equal|auto|N,N,...")] = "equal"
    """What each rank gets of a batch: as much as the others, as measured (auto), or so many parts
    each: 3,1 (shares.py)."""
    dataset: Annotated[str, IDX] = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Annotated[Path, MAY_CHANGE] = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int, arg(metavar="N")] = 10
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 120
    """GLOBAL batch size in samples, divided among the ranks."""
    lr: float = 0.01
    """Learning rate."""
    momentum: float = 0.5
    """Momentum of SGD."""
    seed: int = 1234
    """Seed of parameters and sample order."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/manual_allreduce_sgd")
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
        at_least(0, lr=self.lr, seed=self.seed, bucket_mb=self.bucket_mb)
        at_least(1, every=self.every, matrix_rank=self.matrix_rank)
        at_least(0, outer_lr=self.outer_lr, share=self.share)
        share(momentum=self.momentum, outer_momentum=self.outer_momentum)
        if self.share > 1:
            raise UserError(f"--share {self.share:g}: give a number from 0 to 1")
        for name, users in ONLY_OF.items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default and not {self.algorithm, self.compress} & users:
                flag, whose = name.replace("_", "-"), " and ".join(sorted(users))
                raise UserError(f"--{flag} is for {whose}: leave it out")
        if 0 in self.share_numbers:
            raise UserError(
                f"--shares {self.shares}: give equal, auto, or a whole number from 1 for each "
                f"rank: 3,1"
            )
        if self.shares != "equal" and self.algorithm in ("local-sgd", "diloco"):
            raise UserError(
                f"--shares {self.shares} does not go with {self.algorithm}, whose ranks step by "
                f"their own gradients: leave it out"
            )
        if self.algorithm not in CAN_COMPRESS.get(self.compress, (self.algorithm,)):
            raise UserError(
                f"--compress {self.compress} does not go with {self.algorithm}: "
                f"use {', '.join(CAN_COMPRESS[self.compress])}"
            )

    def check_world_size(self, world_size: int) -> None:
        """See that so many ranks can divide the batch; asked before any of them is started."""
        if self.shares == "equal":
            equal_parts(self.batch_size, world_size)

    @property
    def share_numbers(self) -> list[int]:
        """The numbers of `--shares 3,1`; none of equal and auto. A word stands as 0."""
        words = [] if self.shares in ("equal", "auto") else self.shares.split(",")
        return [int(word) if word.strip().isdecimal() else 0 for word in words]
