"""The flags of mnist_dataparallel."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from common.launch.errors import UserError
from common.launch.flags import IDX, MAY_CHANGE, SPLIT, Launch, Watch, at_least, share
from common.train.precision import PrecisionWithoutFp16


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    devices: Annotated[str, MAY_CHANGE] = "auto"
    """Devices of each process, the first holds the model: 0,1 (of CUDA), or cpu,cpu for two
    replicas in threads. auto: all visible CUDA devices, else cpu,cpu."""
    engine: Annotated[Literal["auto", "torch", "eight-steps"], MAY_CHANGE] = "auto"
    """torch is nn.DataParallel, which needs CUDA; auto is torch on CUDA, else eight-steps."""
    loss: Annotated[Literal["gathered", "inside"], MAY_CHANGE] = "gathered"
    """Compute the loss on the gathered outputs, or inside the replicas, which sends less."""
    explain: Annotated[bool, MAY_CHANGE] = False
    """Show shapes and milliseconds of each step of the third iteration."""
    dataset: Annotated[str, IDX] = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Annotated[Path, MAY_CHANGE] = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training set (default: 20 for digits, else 1)."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N"), SPLIT] = 120
    """GLOBAL batch size in samples, divided by the processes, then by their devices."""
    lr: float = 0.2
    """Highest learning rate of the one-cycle schedule."""
    momentum: float = 0.9
    """Momentum of SGD (Nesterov's)."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 5e-4
    """L2 penalty."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""
    seed: int = 0
    """Seed of parameters and sample order."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/mnist_dataparallel")
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
        at_least(1, epochs=self.epochs, batch_size=self.batch_size)
        at_least(1, checkpoint_every=self.checkpoint_every)
        at_least(0, lr=self.lr, seed=self.seed, weight_decay=self.weight_decay)
        share(momentum=self.momentum, label_smoothing=self.label_smoothing)
        device_names(self.devices, self.launch)
        if self.amp.compile:
            raise UserError(
                "--compile: torch.compile does not work in the threads of DataParallel; "
                "leave it out"
            )


def device_names(text: str, flags: Launch) -> tuple[str, ...]:
    """The devices that `--devices` names, in its order: `0,2` means cuda:0 and cuda:2.

    Returns:
        Their names; none for `auto`.

    Raises:
        UserError: not a device, CPU and CUDA mixed, or a contradiction to another flag.
    """
    if text == "auto":
        return ()
    words = [word.strip() for word in text.split(",")]
    names = tuple(f"cuda:{word}" if word.isdigit() else word for word in words)
    wrong = [name for name in names if not re.fullmatch(r"cpu|cuda:\d+", name)]
    if wrong:
        raise UserError(
            f"--devices {text}: {wrong[0]!r} is not a device; give auto, 0,1 (of CUDA) or cpu,cpu"
        )
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1:
        raise UserError(
            f"--devices {text}: replicas on the CPU and on CUDA devices cannot be mixed; "
            f"give one kind"
        )
    against = {
        "--no-accel": flags.no_accel and kinds != {"cpu"},
        f"--device {flags.device}": flags.device not in ("auto", *kinds),
        f"--gpu {flags.gpu}": flags.gpu is not None,
        "--dist-backend nccl": flags.dist_backend == "nccl" and kinds == {"cpu"},
    }
    for flag in (name for name, contradicts in against.items() if contradicts):
        raise UserError(f"--devices {text} contradicts {flag}: leave one out")
    return names
