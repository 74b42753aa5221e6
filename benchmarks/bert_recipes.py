"""The recipes that bert_throughput.py compares: from the naive one to that of `bert_dp --fast`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam, AdamW

from common.train.amp import MixedPrecision
from common.train.precision import Precision
from common.train.replicas import Replicas
from examples.bert_dp.args import TextArgs
from examples.bert_dp.fast_bert import FastClassifier
from examples.bert_dp.model import prepare
from examples.bert_dp.reviews import read_reviews, split
from examples.bert_dp.tokens import LengthSampler, encode

STEPS = {
    "naive": "tokenised in collate, padded to 128, dropout 0.1, Adam",
    "+ tokenised once, dynamic padding": "padded to the longest of the batch",
    "+ batches of like lengths": "LengthSampler",
    "+ fused optimizer": "AdamW(fused=True)",
    "+ no dropout": "its random numbers cost time",
    "+ first token only in the last layer": "FastClassifier",
    "+ bfloat16": "autocast, where the device computes it natively",
}
NAIVE, ONCE, ALIKE, FUSED, NO_DROPOUT, OURS, BF16 = STEPS


class Recipe:
    """One way to train, step by step.

    Args:
        name: one of `STEPS`; it includes those before it.
        text: reviews and model.
        batch_size: reviews per step.
        seed: of parameters and order.
        devices: for DataParallel; empty for the first device alone.
        micro_batches: gradients are added up over so many parts of a batch.

    Attributes:
        total: steps of the whole run, for the learning rate.
    """

    def __init__(
        self,
        name: str,
        text: TextArgs,
        batch_size: int,
        seed: int = 0,
        devices: Sequence[torch.device] = (),
        micro_batches: int = 1,
    ) -> None:
        names = list(STEPS)
        self.has = set(names[: names.index(name) + 1])
        self.batch_size, self.seed, self.epoch, self.done, self.total = batch_size, seed, 0, 0, 1000
        self.text = replace(text, dropout=0.0 if NO_DROPOUT in self.has else 0.1)
        reviews = read_reviews(text.csv)
        train, test = (
            ([reviews.texts[n] for n in part], [reviews.labels[n] for n in part])
            for part in split(reviews, 0)
        )
        self.texts, self.labels = train[0], torch.tensor(train[1])
        self.steps_per_epoch = -(-len(self.texts) // batch_size)
        torch.manual_seed(seed)
        self.bert, self.tokenizer, _ = prepare(self.text, self.texts)
        self.data, self.test = (encode(self.tokenizer, *part, 128) for part in (train, test))
        self.device = device()
        self.bert.to(self.device).train()
        precision = Precision("bf16" if BF16 in self.has else "fp32", channels_last="no")
        classifier = FastClassifier(self.bert, MixedPrecision(precision, self.device).autocast)
        wrap = nn.DataParallel if self.device.type == "cuda" else Replicas  # torch's needs CUDA
        self.model: nn.Module = wrap(classifier, devices) if devices else classifier
        self.micro_batches = micro_batches
        fused: dict[str, Any] = {"weight_decay": 0.01, "fused": True} if FUSED in self.has else {}
        kind = AdamW if FUSED in self.has else Adam
        self.optimizer = kind(self.bert.parameters(), text.learning_rate, **fused)
        self.batches = self.order()

    def order(self) -> Iterator[list[int]]:
        """The indices of each batch, epoch after epoch."""
        size = self.batch_size
        alike = LengthSampler(self.data.lengths, size, self.seed, rank=0, world_size=1)
        while True:
            if ALIKE in self.has:
                alike.set_epoch(self.epoch)
                yield from ([index for _, index in batch] for batch in alike)
            else:
                generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)))
                order = torch.randperm(len(self.texts), generator=generator)
                yield from (part.tolist() for part in order.split(size))
            self.epoch += 1

    def step(self, chosen: list[int]) -> int:
        """Train on a batch, one of `batches`; return how many reviews it had."""
        for group in self.optimizer.param_groups:
            factor = self.text.factor(min(self.done, self.total - 1), self.total)
            group["lr"] = self.text.learning_rate * factor
        self.done += 1
        self.optimizer.zero_grad()
        if self.micro_batches == 1:
            self.loss(chosen).backward()
        else:
            parts = (each.chunk(self.micro_batches) for each in self.batch(chosen))
            for ids, labels in zip(*parts, strict=True):
                (self.model(ids, labels).sum() / len(chosen)).backward()
        nn.utils.clip_grad_norm_(self.bert.parameters(), 1.0)
        self.optimizer.step()
        return len(chosen)

    def loss(self, chosen: list[int]) -> torch.Tensor:
        """The mean loss of a batch."""
        if ONCE not in self.has:
            texts = [self.texts[index] for index in chosen]
            padding: Any = {"max_length": 128, "padding": "max_length", "truncation": True}
            inputs = self.tokenizer(texts, return_tensors="pt", **padding).to(self.device)
            return self.bert(**inputs, labels=self.labels[chosen].to(self.device)).loss
        ids, labels = self.batch(chosen)
        if OURS in self.has:
            return self.model(ids, labels).sum() / len(chosen)
        return F.cross_entropy(self.bert(ids, (ids != 0).long()).logits, labels)

    def batch(self, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token numbers [B, L], padded to the longest, and labels [B]."""
        ids, labels, _ = self.data.__getitems__(chosen)
        return ids.to(self.device), labels.to(self.device)

    def accuracy(self) -> float:
        """On the validation reviews, by the stock model."""
        self.bert.eval()
        right = 0
        with torch.inference_mode():
            for part in torch.arange(len(self.test)).split(64):
                ids, labels, _ = self.test.__getitems__(part.tolist())
                ids = ids.to(self.device)
                scores = self.bert(ids, (ids != 0).long()).logits
                right += int((scores.argmax(dim=1).cpu() == labels).sum())
        self.bert.train()
        return right / len(self.test)


def device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def known_steps() -> dict[str, str]:
    """Those that this machine computes natively; the last one is what `bert_dp --fast` does."""
    native = MixedPrecision(Precision(), device()).name == "bf16"
    return {name: what for name, what in STEPS.items() if native or name != BF16}
