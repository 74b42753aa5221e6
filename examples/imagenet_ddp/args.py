"""The flags of imagenet_ddp."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, arg

from common.images.args import ImageArgs
from common.launch.errors import UserError
from common.launch.flags import MAY_CHANGE, Launch, Watch, at_least, equal_parts, share
from common.train.precision import Precision

# defaults, by the kind of images
EPOCHS = {"folder": 90, "drawn": 6, "dummy": 1}
BATCH_SIZES = {"folder": 256, "drawn": 48, "dummy": 48}


@dataclass(frozen=True)
class Recipe:
    """Recipe: the model, and how it learns."""

    arch: Annotated[str, arg(aliases=["-a"])] = "resnet18"
    """Any classification model of torchvision."""
    pretrained: bool = False
    """Start from torchvision's weights for ImageNet."""
    lr: Annotated[float | None, arg(aliases=["--learning-rate"])] = None
    """Highest learning rate (default: 0.1 per 256 images of the batch)."""
    warmup_epochs: float = 1.0
    """Epochs in which the learning rate rises; then it falls along a cosine."""
    start_epoch: Annotated[int, arg(metavar="N")] = 0
    """Begin at this epoch's order and learning rate, where nothing is resumed."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 1e-4
    """L2 penalty."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""
    ema: Annotated[float, arg(metavar="DECAY")] = 0.0
    """Evaluate an exponential moving average of the weights, with this decay per step; 0 is off."""
    sync_bn: bool = False
    """BatchNorm over the batches of all ranks (CUDA only)."""

    def __post_init__(self) -> None:
        at_least(0, start_epoch=self.start_epoch, lr=self.lr)
        at_least(0, weight_decay=self.weight_decay, warmup_epochs=self.warmup_epochs)
        share(momentum=self.momentum, label_smoothing=self.label_smoothing, ema=self.ema)


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training set (default: 90; 6 for drawn images, 1 for --dummy)."""
    batch_size: Annotated[int | None, arg(aliases=["-b"], metavar="N")] = None
    """GLOBAL batch size in images (default: 256; 48 without DIR)."""
    # May change, as the number of processes may: both fit the same batch into other memory.
    accumulate: Annotated[int, arg(metavar="N"), MAY_CHANGE] = 1
    """Backward passes per step, for batches that do not fit into memory at once."""
    evaluate: Annotated[bool, arg(aliases=["-e"]), MAY_CHANGE] = False
    """Only evaluate the weights that --resume or --pretrained gives."""
    resume: Annotated[str, arg(metavar="auto|PATH|no"), MAY_CHANGE] = "no"
    """auto (newest valid checkpoint in --out), the path of one (-e: or of *.safetensors), or no."""
    init: Annotated[Path | None, arg(metavar="FILE"), MAY_CHANGE] = None
    """Weights to start from: .safetensors, a checkpoint, or what torch.save has written."""
    seed: int = 0
    """Seed of parameters, order and crops."""
    survive: Annotated[bool, MAY_CHANGE] = False
    """A lost process does not end the training: the others go on. On CPUs, without checkpoints."""
    replace: Annotated[bool, MAY_CHANGE] = False
    """With --survive: start a new process for each that is lost."""
    find_unused_parameters: Annotated[bool, MAY_CHANGE] = False
    """Let DDP search for parameters that a forward did not use."""
    static_graph: Annotated[bool, MAY_CHANGE] = False
    """Promise DDP that every step uses the same parameters in the same order."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS"), MAY_CHANGE] = 500
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/imagenet_ddp")
    """Folder for the output of the run."""
    images: OmitArgPrefixes[ImageArgs] = ImageArgs()
    recipe: OmitArgPrefixes[Recipe] = Recipe()
    launch: OmitArgPrefixes[Launch] = Launch()
    amp: OmitArgPrefixes[Precision] = Precision(channels_last="yes")
    watch: OmitArgPrefixes[Watch] = Watch(print_freq=10)

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, accumulate=self.accumulate)
        at_least(1, checkpoint_every=self.checkpoint_every)
        at_least(0, seed=self.seed)
        if self.evaluate and self.resume == "no" and not self.recipe.pretrained:
            raise UserError(
                "--evaluate needs weights: give --resume auto, --resume PATH or --pretrained"
            )
        if self.evaluate and self.init is not None:
            raise UserError(
                f"--evaluate does not train, so there is nothing to start from {self.init}: give "
                f"the weights to evaluate as --resume {self.init}"
            )
        if self.replace and not self.survive:
            raise UserError("--replace is a flag of --survive: give both")
        if self.survive and (unknown := [flag for flag, given in self._not_survived() if given]):
            raise UserError(
                f"--survive cannot honour {', '.join(unknown)}: leave one or the other out"
            )

    def _not_survived(self) -> list[tuple[str, bool]]:
        """The flags that --survive does not honour, and whether they are given."""
        launch, recipe, watch = self.launch, self.recipe, self.watch
        return [
            ("--evaluate", self.evaluate),
            ("--resume", self.resume != "no"),
            ("--checkpoint-every", self.checkpoint_every != 500),
            ("--keep", watch.keep != 2),
            ("--accumulate", self.accumulate != 1),
            ("--start-epoch", recipe.start_epoch != 0),
            ("--pretrained", recipe.pretrained),
            ("--skip-broken", self.images.skip_broken),
            ("--precision fp16", self.amp.precision == "fp16"),
            ("--compile", self.amp.compile),
            ("--profile", watch.profile != 0),
            ("--track", watch.track != "no"),
            ("--limit-steps", watch.limit_steps != 0),
            ("--device cuda", launch.device == "cuda"),
            ("--gpu", launch.gpu is not None),
            ("--dist-backend nccl", launch.dist_backend == "nccl"),
        ]

    def check_world_size(self, world_size: int) -> None:
        """See that so many ranks can divide the batch; asked before any of them is started."""
        if not self.evaluate and not self.survive:  # whose ranks become fewer
            passes = f"{world_size} rank(s) x {self.accumulate} backward pass(es)"
            equal_parts(self.global_batch, world_size * self.accumulate, passes)

    @property
    def num_epochs(self) -> int:
        """--epochs, or the default."""
        return self.epochs or EPOCHS[self.images.kind]

    @property
    def global_batch(self) -> int:
        """--batch-size, or the default."""
        return self.batch_size or BATCH_SIZES[self.images.kind]

    @property
    def learning_rate(self) -> float:
        """The highest one: --lr, or one for the GLOBAL batch (Goyal et al., 2017)."""
        default = 0.1 * self.global_batch / 256  # arXiv:1706.02677
        return default if self.recipe.lr is None else self.recipe.lr

    @property
    def options(self) -> dict[str, Any]:
        """What `Run` is told beside the flags."""
        return {
            "batch_size": self.global_batch,
            "settings": {
                "epochs": self.num_epochs,
                "batch_size": self.global_batch,
                "lr": self.learning_rate,
            },
            "save_before_evaluation": True,
        }
