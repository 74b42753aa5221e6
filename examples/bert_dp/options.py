"""What is trained on what: the flags that `train.py` and `trainer.py` share."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from common.errors import UserError
from common.flags import at_least, share

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported, later: nothing asks the network
SLOW = ("transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert")  # to import


@dataclass(frozen=True)
class TextOptions:
    """Reviews and model."""

    csv: Annotated[Path | None, arg(metavar="FILE")] = None
    """Reviews to train on, columns label and review (default: those that come with the example)."""
    model: Annotated[Path | None, arg(metavar="DIR")] = None
    """Local folder with a pretrained BERT to fine-tune (default: a small BERT, trained from scratch)."""
    vocab: Annotated[Path | None, arg(metavar="FILE")] = None
    """vocab.txt of a BERT, for the small one (default: the characters of the training reviews)."""
    max_length: Annotated[int, arg(metavar="TOKENS")] = 128
    """Longest input in tokens; what is longer loses its end."""
    layers: Annotated[int | None, arg(metavar="N")] = None
    """Layers of the small BERT (default: 2)."""
    hidden: Annotated[int | None, arg(metavar="N")] = None
    """Width of the small BERT, a multiple of 64 (default: 128)."""
    dropout: float | None = None
    """Dropout (default: 0 for the small BERT, whose random numbers would cost a fifth; else as the model has it)."""
    lr: float | None = None
    """Highest learning rate (default: 2e-5 for a pretrained BERT, 5e-4 for the small one)."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 0.01
    """Decoupled weight decay (AdamW)."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises; then it falls to 0 linearly."""

    def __post_init__(self) -> None:
        at_least(4, max_length=self.max_length)
        at_least(1, layers=self.layers)
        at_least(0, lr=self.lr, weight_decay=self.weight_decay)
        share(warmup=self.warmup)
        if self.dropout is not None:
            share(dropout=self.dropout)
        if self.hidden is not None and (self.hidden < 64 or self.hidden % 64):
            raise UserError(f"--hidden {self.hidden}: give a multiple of 64, the width of an attention head")
        small = {"--vocab": self.vocab, "--layers": self.layers, "--hidden": self.hidden}
        given = [flag for flag, value in small.items() if value is not None]
        if self.model and given:
            raise UserError(f"{', '.join(given)} with --model: the folder decides that; leave it out")

    @property
    def learning_rate(self) -> float:
        """The highest learning rate."""
        return self.lr if self.lr is not None else (2e-5 if self.model else 5e-4)

    def factor(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, as a share of the highest: linearly up, linearly down to 0."""
        warm_up = max(1, round(self.warmup * steps))
        return (step + 1) / warm_up if step < warm_up else (steps - step) / max(1, steps - warm_up)
