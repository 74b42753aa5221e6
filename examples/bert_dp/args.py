"""The flags of bert_dp."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from common.launch import RunArgs

REVIEWS = Path(__file__).with_name("reviews.csv")


@dataclass(frozen=True)
class TextArgs:
    """The flags that train.py and trainer.py share."""

    csv: Path = REVIEWS
    """csv file with the columns label (0 or 1) and review."""
    model: str = "small"
    """Folder of a pretrained BERT, such as bert-base-chinese, or small (2 untrained layers)."""
    max_length: Annotated[int, arg(metavar="TOKENS")] = 128
    """Maximum input length in tokens; longer reviews are truncated."""
    lr: float = 0.0
    """Peak learning rate; 0 means 2e-5 for a pretrained BERT and 5e-4 for the small one."""

    @property
    def peak_lr(self) -> float:
        """Peak learning rate; the model's default if --lr is 0."""
        return self.lr or (5e-4 if self.model == "small" else 2e-5)


@dataclass(frozen=True)
class Args(TextArgs, RunArgs):
    """Classify hotel reviews as bad or good with BERT and nn.DataParallel."""

    epochs: int = 8
    """Passes over the training reviews; a pretrained BERT needs 3."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 32
    """GLOBAL batch size in reviews, divided among the ranks and then among their devices."""
    log_every: Annotated[int, arg(metavar="STEPS", aliases=["-p", "--print-freq"])] = 100
    out: Path = Path("runs/bert_dp")
    """Folder for checkpoints, metrics, the result, and the best model for predict.py."""
