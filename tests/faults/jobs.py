"""The programs to which the faults are done, each with a training of a few seconds: many steps, with few samples."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests import warm
from tests.conftest import Once, Programs
from tests.make_data import draw_folder
from tests.runs import SMALL_RESNET, tiny_imagenet

warm.ALSO += [
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "transformers.trainer",
]
NPROC = 3  # with two ranks, a sum does not depend on the order of its parts
EVERY = ("--checkpoint-every", 3)
# A program, a training that is worth being disturbed, and how often it saves.
TRAININGS: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "mnist_ddp_spawn": (("mnist_ddp_spawn", "--epochs", 2, "-b", 30), EVERY),
    "imagenet_ddp": (
        ("imagenet_ddp", "FOLDER", "--epochs", 10, "-b", 12, "--image-size", 32, "--lr", 0.05), EVERY),
    "manual_allreduce_sgd": (("manual_allreduce_sgd", "--epochs", 2, "-b", 30), EVERY),
    "resnet_pipeline": (
        ("resnet_pipeline", "-a", "resnet18", "--image-size", 32, "--images", 90, "-b", 8, "--micro-batches", 3,
         "--epochs", 7, "--norm", "group", "--balance", "even"), EVERY),
    "bert_dp.train": (("bert_dp", "--epochs", 3, "-b", 12, "--hidden", 64, "--dropout", 0.1), EVERY),
    # the Trainer saves after every epoch, which has 8 steps here
    "bert_dp.trainer": (
        ("bert_dp.trainer_robust", "--epochs", 8, "-b", 36, "--hidden", 64, "--dropout", 0.1, "--logging-steps", 1),
        ()),
}  # fmt: skip
PROGRAMS = list(TRAININGS)
# Two more, whose loops differ from the others' in what a checkpoint holds and in who averages: the hardest faults only.
TRAININGS |= {
    "gan_ddp": (("gan_ddp", "--epochs", 2, "-b", 30), EVERY),
    "mnist_dataparallel": (("mnist_dataparallel", "--epochs", 2, "-b", 30), EVERY),
}
# With two ranks and with three, in turn; and the other way round, so that a program meets both.
IN_TURN = [(program, 2 + number % 2) for number, program in enumerate(TRAININGS)]
TURNED = [(program, 3 - number % 2) for number, program in enumerate(PROGRAMS)]


@dataclass(frozen=True)
class Job:
    """A program with its flags, to be started from a folder with the code."""

    words: tuple[object, ...]
    every: tuple[object, ...]
    code: Path

    @property
    def endless(self) -> tuple[object, ...]:
        """The same, without end."""
        return *self.words, "--epochs", 5000, *self.every


@dataclass(frozen=True)
class Jobs:
    """The programs' trainings, and their results when nobody disturbs them."""

    programs: Programs
    folder: Path
    once: Once

    def __post_init__(self) -> None:
        tiny_imagenet(self.folder / "code", SMALL_RESNET)

    @property
    def drawn(self) -> Path:
        """A folder of small images."""
        return self.once.made("jobs-drawn", lambda folder: draw_folder(folder, train=101, val=23, size=40))

    def __getitem__(self, name: str) -> Job:
        (module, *flags), every = TRAININGS[name]
        flags = [self.drawn if flag == "FOLDER" else flag for flag in flags]
        words = ("-m", f"examples.{module}", *flags, "--precision", "fp32", "--threads", 1)
        return Job(words, every, self.folder / "code")

    def whole(self, name: str, nproc: int = NPROC) -> Path:
        """What a training that nobody disturbed has left."""
        job = self[name]
        run = (*job.words, "--nproc", nproc, "--out")
        return self.once.made(f"{name}-{nproc}", lambda out: self.programs.run(*run, out, cwd=job.code))

    def broken(self, name: str, *changes: tuple[str, str, str]) -> Path:
        """The code with something else changed."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return tiny_imagenet(self.folder / name, SMALL_RESNET, *changes)
