"""The flags of resnet_pipeline. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg

from common.launch.errors import UserError
from common.launch.flags import MAY_CHANGE, Launch, MustExist, Watch, at_least, equal_parts
from common.train.precision import PrecisionWithoutFp16

TORCH_ALONE = ("zero-bubble", "dualpipev")
SPLIT = ("zb-h1", "zbv", *TORCH_ALONE)  # schedules that split the backward pass


@dataclass(frozen=True)
class PipelineArgs:
    """Pipeline: the model, where it is cut, and in which order its stages work."""

    arch: Annotated[
        Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"], arg(aliases=["-a"])
    ] = "resnet50"
    """Model."""
    norm: Literal["batch", "group", "frozen"] = "batch"
    """batch: over a micro-batch; group: per sample; frozen: BatchNorm whose statistics stay."""
    init: Annotated[
        Path | None, arg(metavar="FILE", aliases=["--weights"]), MustExist(), MAY_CHANGE
    ] = None
    """Weights of the un-split model to start from, as .safetensors or by torch.save."""
    stages: Annotated[int | None, arg(metavar="P"), MAY_CHANGE] = None
    """Processes of one pipeline (default: all); the others are replicas with other samples."""
    micro_batches: Annotated[int, arg(aliases=["-m"], metavar="M")] = 4
    """Number of micro-batches per replica's share of a batch; sizes may differ by one."""
    schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "zero-bubble", "dualpipev"],
        MAY_CHANGE,
    ] = "1f1b"
    """Order: zb-h1 only by --engine hand, the last two only by --engine torch."""
    engine: Annotated[Literal["hand", "torch"], MAY_CHANGE] = "hand"
    """hand: pipeline.py of this example; torch: torch.distributed.pipelining."""
    balance: Annotated[Literal["auto", "even"], MAY_CHANGE] = "auto"
    """Where to cut: auto by measured times, even by the number of blocks."""
    cuts: Annotated[tuple[str, ...], MAY_CHANGE] = ()
    """First block of the second and later stages: layer2.0 layer4.1; overrides --balance."""
    recompute: Annotated[bool, MAY_CHANGE] = False
    """Activation checkpointing: keep only each stage's input and recompute the rest backward."""

    def __post_init__(self) -> None:
        at_least(1, stages=self.stages, micro_batches=self.micro_batches)
        if self.schedule in TORCH_ALONE and self.engine == "hand":
            raise UserError(f"--schedule {self.schedule} needs --engine torch; by hand: zb-h1, zbv")
        if self.schedule == "zb-h1" and self.engine == "torch":
            raise UserError("--schedule zb-h1 needs --engine hand; torch has zero-bubble and zbv")
        if self.schedule in SPLIT and self.recompute:
            raise UserError(
                f"--recompute with --schedule {self.schedule}: its split backward would recompute "
                f"twice; choose another schedule"
            )

    @property
    def title(self) -> str:
        """What runs, in words."""
        return f"{self.arch}, {self.engine} {self.schedule}"

    @property
    def facts(self) -> dict[str, Any]:
        """What result.json says about these flags."""
        names = ("arch", "norm", "engine", "schedule", "micro_batches")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    dataset: Annotated[Path | None, arg(metavar="DIR"), MustExist(), MAY_CHANGE] = None
    """Folder with train/CLASS/* and val/CLASS/*; without it, shapes are drawn."""
    image_size: Annotated[int, arg(metavar="PIXELS")] = 32
    """Height and width to which images are cropped."""
    skip_broken: Annotated[bool, MAY_CHANGE] = False
    """Replace a broken image by the next one of its class, and count it, instead of ending."""
    images: Annotated[int, arg(metavar="N")] = 480
    """Shapes to draw for training, and half as many for the evaluation."""
    epochs: Annotated[int, arg(metavar="N")] = 6
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 32
    """GLOBAL batch size in samples, divided by the number of replicas."""
    lr: float = 1e-3
    """Highest learning rate of the one-cycle schedule."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 0.01
    """Weight decay of AdamW."""
    seed: int = 0
    """Seed of parameters, sample order and crops."""
    workers: Annotated[int, arg(aliases=["-j"], metavar="N"), MAY_CHANGE] = 0
    """Loader processes of each first stage."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/resnet_pipeline")
    """Folder for the output of the run."""
    resume: Annotated[str, arg(metavar="auto|PATH|no"), MAY_CHANGE] = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS"), MAY_CHANGE] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    pipeline: OmitArgPrefixes[PipelineArgs] = PipelineArgs()
    launch: OmitArgPrefixes[Launch] = Launch()
    amp: OmitArgPrefixes[PrecisionWithoutFp16] = PrecisionWithoutFp16()
    watch: OmitArgPrefixes[Watch] = Watch()

    def __post_init__(self) -> None:
        at_least(1, images=self.images, image_size=self.image_size, epochs=self.epochs)
        at_least(1, batch_size=self.batch_size, checkpoint_every=self.checkpoint_every)
        at_least(0, workers=self.workers, lr=self.lr, seed=self.seed)
        at_least(0, weight_decay=self.weight_decay)
        if self.amp.compile and self.pipeline.schedule in SPLIT:
            raise UserError(
                f"--compile with --schedule {self.pipeline.schedule}: a compiled backward pass "
                f"cannot be split; choose another schedule"
            )

    def check_world_size(self, world_size: int) -> None:
        """See that so many ranks can divide the batch; asked before any of them is started."""
        replicas, rest = divmod(world_size, self.pipeline.stages or world_size)
        if not rest:  # else make_grid refuses the number of stages
            equal_parts(self.batch_size, replicas, f"{replicas} replicas")
