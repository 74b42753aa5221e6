"""Everything that both training programs need before they train: reviews, split, model, tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers.models.bert.modeling_bert import BertForSequenceClassification
from transformers.models.bert.tokenization_bert import BertTokenizer

from common.distributed import World, agree
from common.report import Report
from examples.bert_dp.classifier import prepare
from examples.bert_dp.options import TextOptions
from examples.bert_dp.reviews import ID2LABEL, Reviews, read_reviews, shorten, split
from examples.bert_dp.tokens import Encoded, encode


@dataclass(frozen=True)
class TextData:
    """Reviews as the model takes them, and the model.

    Attributes:
        reviews: all that can be used.
        train: nine tenths of them.
        validation: the rest.
        bert: the model, on the CPU.
        tokenizer: what made the tokens.
        model_name: the model in words.
        identity: what must be the same for a run to be resumed.
    """

    reviews: Reviews
    train: Encoded
    validation: Encoded
    bert: BertForSequenceClassification
    tokenizer: BertTokenizer
    model_name: str
    identity: dict[str, Any]

    def __str__(self) -> str:
        """The data in words."""
        return f"{self.reviews.name} ({len(self.train)} train, {len(self.validation)} validation)"

    @property
    def facts(self) -> dict[str, Any]:
        """What result.json says about data and model."""
        sizes = {"train_samples": len(self.train), "eval_samples": len(self.validation)}
        cut = {"cut_texts": self.train.cut + self.validation.cut}
        parameters = sum(parameter.numel() for parameter in self.bert.parameters())
        return {"dataset": self.reviews.name, **sizes, "rows": self.reviews.counts, **cut, "parameters": parameters}


def load_data(options: TextOptions, seed: int, world: World, report: Report) -> TextData:
    """Read, split, build, tokenise; every rank for itself, and all must come to the same.

    Raises:
        UserError: what `read_reviews` and `prepare` raise; ranks that see other files.
    """
    reviews = read_reviews(options.csv)
    agree(world, reviews.digest, "the reviews")
    report.log(str(reviews))
    parts = split(reviews, seed)
    texts = [[reviews.texts[position] for position in part] for part in parts]
    labels = [[reviews.labels[position] for position in part] for part in parts]
    bert, tokenizer, name = prepare(options, texts[0])
    train, validation = (encode(tokenizer, texts[part], labels[part], options.max_length) for part in (0, 1))
    if cut := train.cut + validation.cut:
        report.warn(
            f"{cut:,} of {len(reviews.texts):,} reviews have more than {options.max_length} tokens and lose their ends"
        )
    for text, label in list(zip(texts[0], labels[0], strict=True))[:5]:
        report.log(f"  {ID2LABEL[label]}  {shorten(text)}")
    chosen = {key: str(value) for key, value in asdict(options).items() if key != "csv"}
    return TextData(reviews, train, validation, bert, tokenizer, name, chosen | {"reviews": reviews.digest})
