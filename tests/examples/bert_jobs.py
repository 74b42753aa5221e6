"""What the tests of bert_dp share: its commands, a small training, and runs that several tests look at."""

from pathlib import Path

import pytest
import torch
from transformers.models.bert.modeling_bert import BertForSequenceClassification
from transformers.models.bert.tokenization_bert import BertTokenizer

from examples.bert_dp.args import TextArgs
from examples.bert_dp.model import prepare
from examples.bert_dp.reviews import read_reviews, split
from tests import warm
from tests.conftest import Once, Programs

warm.ALSO += [
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "transformers.trainer",
]

TRAIN, ROBUST, BRIEF, PREDICT = (
    ("-m", f"examples.bert_dp{name}") for name in ("", ".trainer_robust", ".trainer", ".predict")
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
FP32 = ("--precision", "fp32")
# 284 reviews to train on: 11 batches of 24 and one of 20, which 3 ranks share as 7, 7 and 6
SMALL = ("--epochs", 2, "-b", 24, "--hidden", 64, "--layers", 2, *FP32)
STEPS = 12
GOOD, BAD = "房间干净，服务热情，早餐丰富，下次还来。", "房间又脏又吵，服务态度差，再也不来了。"


def shipped() -> tuple[BertForSequenceClassification, BertTokenizer, list[list[str]], list[list[int]]]:
    """Model, tokenizer, texts and labels (training, validation) as the programs have them with SMALL."""
    reviews = read_reviews(None)
    parts = split(reviews, 0)
    texts = [[reviews.texts[position] for position in part] for part in parts]
    labels = [[reviews.labels[position] for position in part] for part in parts]
    torch.manual_seed(0)
    model, tokenizer, _ = prepare(TextArgs(hidden=64, layers=2), texts[0])
    return model, tokenizer, texts, labels


@pytest.fixture(scope="session")
def default_run(session_programs: Programs, once: Once) -> Path:
    """The program without flags, but for the precision. It takes a minute: three files of tests look at one run."""

    def train(out: Path) -> None:
        done = session_programs.run(*TRAIN, *FP32, "--out", out, limit=230)  # float32 beside another test
        (out / "stdout").write_text(done.stdout)

    return once.made("bert_dp", train)


def state_of(out: Path) -> dict[str, torch.Tensor]:
    """The parameters in the newest checkpoint."""
    return torch.load(max((out / "checkpoints").glob("step-*.pt")), weights_only=True)["model"]


def largest_difference(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
