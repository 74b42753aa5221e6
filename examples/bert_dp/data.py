"""What every training program needs before it trains: reviews, split, model, tokens."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from transformers.models.bert.modeling_bert import BertForSequenceClassification
from transformers.models.bert.tokenization_bert import BertTokenizer

from common.launch.collectives import assert_same_on_all_ranks, print0
from common.launch.console import warn
from examples.bert_dp.args import TextArgs
from examples.bert_dp.model import prepare
from examples.bert_dp.reviews import ID2LABEL, Reviews, read_reviews, shorten, split
from examples.bert_dp.tokens import Encoded, encode


@dataclass(frozen=True)
class TextData:
    """Reviews as the model takes them, and the model.

    Attributes:
        reviews: all that can be used.
        train: nine tenths of them.
        validation: the rest.
        test_columns: rows and texts of the rest, for predictions.csv.
        bert: the model, on the CPU.
        tokenizer: makes the tokens.
        model_name: a description of the model.
    """

    reviews: Reviews
    train: Encoded
    validation: Encoded
    test_columns: dict[str, list[Any]]
    bert: BertForSequenceClassification
    tokenizer: BertTokenizer
    model_name: str

    def __str__(self) -> str:
        """Model and data in words."""
        sizes = f"{len(self.train)} train, {len(self.validation)} validation"
        return f"{self.model_name} on {self.reviews.name} ({sizes})"

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed, besides the flags."""
        return {"reviews": self.reviews.digest}

    @property
    def class_names(self) -> list[str]:
        """By their numbers."""
        return [ID2LABEL[number] for number in sorted(ID2LABEL)]

    @property
    def facts(self) -> dict[str, Any]:
        """What result.json says about data and model."""
        return {
            "dataset": self.reviews.name,
            "train_samples": len(self.train),
            "eval_samples": len(self.validation),
            "rows": self.reviews.counts,
            "cut_texts": self.train.cut + self.validation.cut,
            "parameters": sum(parameter.numel() for parameter in self.bert.parameters()),
        }


def load_data(args: TextArgs, seed: int) -> TextData:
    """Read, split, build, tokenise; print what was read, and five reviews.

    Every rank calls this: each reads for itself, and all must come to the same.

    Raises:
        UserError: what `read_reviews` and `prepare` raise; ranks that see other files.
    """
    reviews = read_reviews(args.csv, args.columns)
    assert_same_on_all_ranks(reviews.digest, "the reviews")
    print0(str(reviews))
    parts = split(reviews, seed)
    texts = [[reviews.texts[position] for position in part] for part in parts]
    labels = [[reviews.labels[position] for position in part] for part in parts]
    for text, label in list(zip(texts[0], labels[0], strict=True))[:5]:
        print0(f"  {ID2LABEL[label]}  {shorten(text)}")
    bert, tokenizer, name = prepare(args, texts[0])
    train, validation = (
        encode(tokenizer, texts[part], labels[part], args.max_length) for part in (0, 1)
    )
    cut = train.cut + validation.cut
    if cut and dist.get_rank() == 0:
        warn(
            f"{cut:,} of {len(reviews.texts):,} reviews have more than {args.max_length} tokens "
            f"and lose their ends"
        )
    columns = {"row": [reviews.rows[position] for position in parts[1]], "text": texts[1]}
    return TextData(reviews, train, validation, columns, bert, tokenizer, name)
