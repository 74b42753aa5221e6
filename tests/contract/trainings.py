"""One short training of each example: long enough to be killed, small enough for a laptop."""

import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests import warm
from tests.conftest import Programs
from tests.make_data import draw_folder
from tests.runs import RECORD, SMALL_RESNET, slow, tiny_imagenet

FOLDER = "FOLDER"  # stands for a folder of small images
EXAMPLES: dict[str, tuple[object, ...]] = {
    # many small batches; at a higher rate, rounding grows within the losses that are compared
    "mnist_dataparallel": ("--epochs", 2, "-b", 36, "--lr", 0.05),
    "mnist_ddp_spawn": ("--epochs", 2, "-b", 36, "--lr", 0.05),
    "imagenet_ddp": (FOLDER, "--epochs", 8, "-b", 12, "--image-size", 32, "--lr", 0.05),
    "bert_dp": ("--epochs", 6, "-b", 24, "--hidden", 64, "--dropout", 0),
    "manual_allreduce_sgd": ("--epochs", 2, "-b", 36),
    "resnet_pipeline": (
        *("-a", "resnet18", "--image-size", 32, "--images", 60, "-b", 8, "--micro-batches", 3),
        *("--epochs", 3, "--norm", "group", "--balance", "even"),
    ),
    "gan_ddp": ("--epochs", 2, "-b", 36),
    "your_model": ("--epochs", 8),
}
CLASSIFIES_NOTHING = {"gan_ddp"}  # and so writes no predictions.csv
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Trainings:
    """Runs the trainings; each of them once, however many tests ask for it."""

    programs: Programs
    folder: Path

    def __post_init__(self) -> None:
        # imagenet_ddp without BatchNorm, which sees the samples of one rank only; a pipeline with small checkpoints;
        # and every rank notes its samples
        tiny_imagenet(self.folder / "code", SMALL_RESNET, RECORD)
        draw_folder(self.folder / FOLDER, train=101, val=23, size=40)
        self.programs.env[warm.DRAW] = "1"

    def words(self, example: str) -> tuple[object, ...]:
        """What follows `python`."""
        flags = (self.folder / FOLDER if flag == FOLDER else flag for flag in EXAMPLES[example])
        return ("-m", f"examples.{example}", *flags, "--precision", "fp32", "--threads", 1, "--checkpoint-every", 3)

    @property
    def code(self) -> Path:
        """The folder to start from."""
        return self.folder / "code"

    @functools.cached_property
    def slow_code(self) -> Path:
        """The same, with steps that take longer: for a training that must not end before it is killed."""
        return tiny_imagenet(self.folder / "slow", SMALL_RESNET, RECORD, slow(0.05))

    def out(self, example: str, nproc: int, torchrun: bool = False) -> Path:
        """What a training with so many ranks has left."""
        out = self.folder / f"{example}-{nproc}{'-torchrun' * torchrun}"
        if not out.exists():
            self.programs.finish(self._start(example, nproc, out, torchrun))
        return out

    def one_and_two(self, example: str) -> tuple[Path, Path]:
        """What a training with one rank and with two has left; both run at once."""
        outs = [self.folder / f"{example}-{nproc}" for nproc in (1, 2)]
        started = [self._start(example, nproc, out) for nproc, out in enumerate(outs, 1) if not out.exists()]
        for process in started:
            self.programs.finish(process)
        return outs[0], outs[1]

    def _start(self, example: str, nproc: int, out: Path, torchrun: bool = False) -> subprocess.Popen[str]:
        start = (*TORCHRUN, nproc) if torchrun else ()
        ranks = () if torchrun or nproc == 1 else ("--nproc", nproc)
        ranks += ("--profile", 2) * (not torchrun and nproc == 2)  # which changes nothing of what is compared
        words = (*start, *self.words(example), *ranks, "--out", out)
        return self.programs.start(*words, cwd=self.code)
