"""Compare bert_dp with a naive recipe (speed) and with a linear model (accuracy).

    python -m benchmarks.bert

The naive recipe draws batches at random, pads them to 128 tokens, and uses dropout 0.1, torch's
default Adam and float32. It reads the loss in each step. Both recipes train a BERT of the same size
on the same reviews, using all cores.
"""

import re
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW
from torch.utils.data import DataLoader, Subset
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

from benchmarks import harness
from benchmarks.harness import Claim, Measurement, Result, Table, compare, ratio
from common.precision import autocast
from examples.bert_dp.data import Reviews, collate
from examples.bert_dp.model import small
from examples.bert_dp.train import Classifier

NAIVE, OURS, LINEAR = "naive recipe", "bert_dp", "linear model"
SPEED_FLOOR = 3.0
BATCH, TOKENS = 32, 128
ACCURACY_FLOOR = 0.85  # for a BERT without pretraining; the linear model reaches 0.90
CSV = "chnsenticorp/ChnSentiCorp_htl_all.csv"
Model = tuple[BertForSequenceClassification, BertTokenizer]


def build(texts: list[str], dropout: float) -> Model:
    """Return a BERT with 4 layers and width 256, and the tokenizer of the example's small BERT."""
    _, tokenizer = small(texts, TOKENS)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config), tokenizer


def per_second(step: Callable[[Any], object], batches: Iterable[Any], count: int) -> float:
    """Train for one epoch; return the reviews per second, including tokenization and updates."""
    began = time.perf_counter()
    for batch in batches:
        step(batch)
    return count / (time.perf_counter() - began)


def naive(data: Subset[Any], texts: list[str]) -> Callable[[], float]:
    """Return a program that trains for one epoch with the naive recipe."""
    bert, tokenizer = build(texts, dropout=0.1)
    optimizer = Adam(bert.parameters(), 5e-4)

    def step(batch: tuple[list[str], Tensor]) -> None:
        tokens = tokenizer(
            list(batch[0]),
            padding="max_length",
            truncation=True,
            max_length=TOKENS,
            return_tensors="pt",
        )
        loss = bert(**tokens, labels=batch[1]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True)
    return lambda: per_second(step, loader, len(loader) * BATCH)


def ours(data: Subset[Any], texts: list[str]) -> Callable[[], float]:
    """Return a program that trains for one epoch like bert_dp."""
    bert, tokenizer = build(texts, dropout=0.0)
    classifier = Classifier(bert, tokenizer.pad_token_id, autocast("auto", torch.device("cpu")))
    optimizer = AdamW(bert.parameters(), 5e-4, weight_decay=0.01, fused=True)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        ids, labels = batch
        loss = F.cross_entropy(classifier(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(bert.parameters(), 1.0)
        optimizer.step()

    sampler = DistributedLengthGroupedSampler(
        BATCH, num_replicas=1, rank=0, lengths=[len(text) for text in texts], drop_last=True
    )
    loader = DataLoader(
        data, BATCH, sampler=sampler, drop_last=True, collate_fn=partial(collate, tokenizer, TOKENS)
    )
    return lambda: per_second(step, loader, len(loader) * BATCH)


def accuracies(csv: Path, seeds: int, epochs: int) -> dict[str, list[float]]:
    """Return both models' validation accuracies for each seed; the seed determines the split."""
    words = ("python", "-m", "examples.bert_dp.further.baseline", "--csv", csv, "--seeds", seeds)
    linear = re.findall(r"^seed \d+: accuracy ([\d.]+)", harness.run(words), re.MULTILINE)
    samples = {LINEAR: [float(value) for value in linear], OURS: list[float]()}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as out:
            flags = ("--csv", csv, "--epochs", epochs, "--seed", seed, "--out", out)
            output = harness.run(("python", "-m", "examples.bert_dp", *flags, "--device", "cpu"))
        found = re.findall(r"^epoch .* accuracy ([\d.]+)", output, re.MULTILINE)
        samples[OURS].append(float(found[-1]))
        print(f"seed {seed}: {samples[LINEAR][seed]}, {samples[OURS][seed]}", flush=True)
    return samples


def measure(args: Measurement) -> Result:
    """Compare the speed and, without --quick, the accuracy."""
    csv, count, rounds = args.data / CSV, 960, args.rounds
    if args.quick:
        count, rounds = 128, 1
    reviews = Reviews(csv)
    order = torch.randperm(len(reviews), generator=torch.Generator().manual_seed(0)).tolist()
    data = Subset(reviews, order[:count])
    texts = [reviews.texts[index] for index in data.indices]
    programs = {NAIVE: naive(data, texts), OURS: ours(data, texts)}
    if not args.quick:
        compare(programs, 1)  # warm-up: kernels are compiled for each shape
    speeds = compare(programs, rounds, "reviews/s")
    tables = {"Training": Table("reviews/s", speeds)}
    claims = [
        Claim(
            f"training of a BERT of 4 layers, faster than the {NAIVE}",
            ratio(speeds, OURS, NAIVE),
            SPEED_FLOOR,
        )
    ]
    inputs: dict[str, Any] = {"reviews": len(reviews), "batch": BATCH, "longest": TOKENS}
    if not args.quick:
        epochs = 3
        found = accuracies(csv, 5, epochs)
        tables["Validation accuracy of five splits"] = Table("accuracy", found)
        text = f"accuracy of a small BERT without pretraining after {epochs} epochs"
        claims.append(Claim(text, harness.medians(found)[OURS], ACCURACY_FLOOR, ""))
        inputs["epochs"] = epochs
    return Result(inputs, tables, claims)


if __name__ == "__main__":
    harness.main("bert", measure)
