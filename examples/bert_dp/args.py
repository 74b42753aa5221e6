"""The flags of the programs of this example. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, arg

from common.launch.errors import UserError
from common.launch.flags import (
    MAY_CHANGE,
    SPLIT,
    Launch,
    MustExist,
    Repeat,
    Watch,
    at_least,
    share,
)
from common.train.precision import Precision

TRAINED = MustExist(remedy="train with python -m examples.bert_dp, or give the model/ of a run")


@dataclass(frozen=True)
class TextArgs:
    """Reviews and model: what `train.py`, `trainer.py` and `trainer_robust.py` share."""

    csv: Annotated[Path | None, arg(metavar="FILE"), MustExist(), MAY_CHANGE] = None
    """Reviews to train on, columns label and review (default: those shipped with the example)."""
    columns: Annotated[tuple[str, str], arg(metavar="TEXT LABEL"), MAY_CHANGE] = ("review", "label")
    """Names of the columns of --csv with the reviews and with the labels."""
    model: Annotated[Path | None, arg(metavar="DIR", aliases=["--init"]), MustExist()] = None
    """Folder with a BERT to train on: one that a run has left, or a pretrained one (default: a
    small BERT, from scratch)."""
    vocab: Annotated[Path | None, arg(metavar="FILE"), MustExist()] = None
    """vocab.txt of a BERT, for the small one (default: the characters of the reviews)."""
    pairs: Annotated[int, arg(metavar="N")] = 0
    """Pairs of Chinese characters that the small BERT has as tokens: the most frequent ones."""
    max_length: Annotated[int, arg(metavar="TOKENS")] = 128
    """Longest input in tokens; a longer one loses its end."""
    layers: Annotated[int | None, arg(metavar="N")] = None
    """Layers of the small BERT (default: 2)."""
    hidden: Annotated[int | None, arg(metavar="N")] = None
    """Width of the small BERT, a multiple of 64 (default: 128)."""
    dropout: float | None = None
    """Dropout (default: 0 for the small BERT, which it would slow down by a fifth; else the model's
    own)."""
    lr: float | None = None
    """Highest learning rate (default: 2e-5 for a pretrained BERT, 5e-4 for the small one)."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 0.01
    """Decoupled weight decay (AdamW)."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises; then it falls to 0 linearly."""

    def __post_init__(self) -> None:
        at_least(4, max_length=self.max_length)
        at_least(1, layers=self.layers)
        at_least(0, lr=self.lr, weight_decay=self.weight_decay, pairs=self.pairs)
        share(warmup=self.warmup)
        if self.dropout is not None:
            share(dropout=self.dropout)
        if self.hidden is not None and (self.hidden < 64 or self.hidden % 64):
            raise UserError(
                f"--hidden {self.hidden}: give a multiple of 64, the width of an attention head"
            )
        small = {"--vocab": self.vocab, "--layers": self.layers, "--hidden": self.hidden}
        small["--pairs"] = self.pairs or None
        given = [flag for flag, value in small.items() if value is not None]
        if self.columns != ("review", "label") and not self.csv:
            raise UserError("--columns is for --csv: give both, or none")
        if self.model and given:
            raise UserError(
                f"{', '.join(given)} with --model: the folder decides that; leave it out"
            )

    def check_run(self, seed: int, out: Path) -> None:
        """See that a run does not set aside the model it starts from; and its seed.

        Raises:
            UserError: a flag has to change.
        """
        at_least(0, seed=seed)
        if seed >= 2**32:
            raise UserError(f"--seed {seed}: scikit-learn, which splits the reviews, takes 32 bits")
        if self.model is not None and self.model.resolve() == (out / "model").resolve():
            raise UserError(f"--model {self.model} is a result in --out: choose another --out")

    @property
    def learning_rate(self) -> float:
        """The highest learning rate."""
        return self.lr if self.lr is not None else (2e-5 if self.model else 5e-4)

    @property
    def chosen(self) -> dict[str, Any]:
        """What flags came to that were not given."""
        small = {"layers": self.layers or 2, "hidden": self.hidden or 128}
        small["dropout"] = self.dropout or 0.0
        return {"lr": self.learning_rate} | ({} if self.model else small)

    @property
    def default_epochs(self) -> int:
        """Passes over the training reviews if --epochs is not given."""
        return 3 if self.csv else 20

    def factor(self, step: int, steps: int) -> float:
        """The learning rate of a step as a share of the highest: linearly up, linearly down to 0.

        Args:
            step: counted from 0.
            steps: in the whole run.
        """
        warm_up = max(1, round(self.warmup * steps))
        if step < warm_up:
            return (step + 1) / warm_up
        return (steps - step) / max(1, steps - warm_up)


def refuse_image_flags(amp: Precision) -> None:
    """Refuse the flags of `Precision` that do not fit text of varying length.

    Raises:
        UserError: --channels-last or --compile was given.
    """
    if amp.channels_last != "no" or amp.compile:
        raise UserError(
            "--channels-last is for images, and --compile for inputs of one shape: "
            "leave them out here"
        )


@dataclass(frozen=True)
class Args:
    """The flags of `train.py`."""

    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training reviews (default: 20 for the shipped ones, else 3)."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N"), SPLIT] = 32
    """GLOBAL batch size in reviews, divided by the ranks, in each by DataParallel's devices."""
    fast: bool = False
    """The scores of the stock BERT, up to rounding, with less arithmetic (fast_bert.py)."""
    mask: Annotated[float, arg(metavar="SHARE")] = 0.0
    """Word dropout: share of the tokens that training replaces by [MASK], anew each time."""
    replicas: Annotated[int, arg(metavar="N")] = 1
    """On a CPU: replicas of the model in threads, as DataParallel has them on CUDA devices. With
    --dropout or --mask, two such runs differ: threads draw in no fixed order."""
    seed: int = 0
    """Seed of the split, the parameters and the order."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/bert_dp")
    """Folder for the output of the run."""
    resume: Annotated[str, arg(metavar="auto|PATH|no"), MAY_CHANGE] = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS"), MAY_CHANGE] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    text: OmitArgPrefixes[TextArgs] = TextArgs()
    launch: OmitArgPrefixes[Launch] = Launch()
    amp: OmitArgPrefixes[Precision] = Precision(channels_last="no")
    watch: OmitArgPrefixes[Watch] = Watch(print_freq=100)

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size)
        at_least(1, checkpoint_every=self.checkpoint_every, replicas=self.replicas)
        self.text.check_run(self.seed, self.out)
        share(mask=self.mask)
        refuse_image_flags(self.amp)


@dataclass(frozen=True)
class TrainerArgs:
    """The flags of `trainer.py`."""

    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training reviews (default: 20 for the shipped ones, else 3)."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N"), SPLIT] = 64
    """GLOBAL batch size in reviews, divided by all devices (the Trainer's own is per device)."""
    eval_batch_size: Annotated[int, arg(metavar="N"), MAY_CHANGE] = 128
    """Reviews at once on a device in evaluation."""
    logging_steps: Annotated[int, arg(aliases=["--log-interval"], metavar="STEPS"), MAY_CHANGE] = 10
    """Steps between lines of the log."""
    save_total_limit: Annotated[int, arg(metavar="N"), MAY_CHANGE] = 3
    """Checkpoints that stay."""
    seed: int = 0
    """Seed of the split, the parameters and the order."""
    out: Annotated[Path, MAY_CHANGE] = Path("runs/bert_dp_trainer")
    """Folder for the output of the run."""
    text: OmitArgPrefixes[TextArgs] = TextArgs()
    launch: OmitArgPrefixes[Launch] = Launch()
    amp: OmitArgPrefixes[Precision] = Precision(channels_last="no")
    watch: OmitArgPrefixes[Repeat] = Repeat()

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size)
        at_least(1, eval_batch_size=self.eval_batch_size, logging_steps=self.logging_steps)
        at_least(1, save_total_limit=self.save_total_limit)
        self.text.check_run(self.seed, self.out)
        refuse_image_flags(self.amp)
        if self.launch.gpu is not None:
            raise UserError(
                f"--gpu {self.launch.gpu}: the Trainer takes the devices of CUDA_VISIBLE_DEVICES"
            )


@dataclass(frozen=True)
class RobustTrainerArgs(TrainerArgs):
    """The flags of `trainer_robust.py`."""

    out: Annotated[Path, MAY_CHANGE] = Path("runs/bert_dp_trainer_robust")
    """Folder for the output of the run."""
    resume: Annotated[str, arg(metavar="auto|PATH|no"), MAY_CHANGE] = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The best one, the last one, and the one that is being written.
        at_least(3, save_total_limit=self.save_total_limit)


@dataclass(frozen=True)
class PredictArgs:
    """The flags of `predict.py`."""

    model: Annotated[Path, arg(metavar="DIR"), TRAINED] = Path("runs/bert_dp/model")
    """Folder that a training program has written, or any local BERT for classification."""
    text: str | None = None
    """One review."""
    csv: Annotated[Path | None, arg(metavar="FILE")] = None
    """Reviews to predict, in a column `review`; other columns are passed on."""
    column: Annotated[str, arg(metavar="TEXT")] = "review"
    """Name of the column of --csv with the reviews."""
    out: Path = Path("predictions.csv")
    """File for the rows of --csv with two columns more: prediction, probability."""
    pipeline: bool = False
    """Let transformers.pipeline predict --text."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 64
    """Reviews at once per process: it changes the speed, not the result."""
    launch: OmitArgPrefixes[Launch] = Launch()
    amp: OmitArgPrefixes[Precision] = Precision(precision="fp32", channels_last="no")

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size)
        if (self.text is None) == (self.csv is None):
            raise UserError("give --text or --csv, one of them")
        if self.text is not None and not self.text.strip():
            raise UserError("--text is empty: give a review")
        if self.pipeline and self.text is None:
            raise UserError("--pipeline is for --text")
        refuse_image_flags(self.amp)
