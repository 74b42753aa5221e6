"""bert_dp in one process: every review padded to the maximum, BERT's own mask and loss."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import save_file
from torch.utils.data import random_split

from examples.bert_dp.args import Args
from tests.reference import Reference, judged

# transformers is imported in functions: it takes seconds, and the ranks have it preloaded.

CSV = ["--csv", "{data}/reviews.csv", "--max-length", "20"]
CASES = [
    # 113 training reviews, 9 batches of 12; 12 validation reviews
    [*CSV, "--epochs", "2", "--batch-size", "12", "--seed", "3", "--lr", "2e-3"],
    # A folder of 2018, with dropout 0; the last 7 batches are after a resume
    [*CSV, "--model", "{data}/bert", "--epochs", "2", "--batch-size", "24", "--lr", "1e-3"],
]
GOOD = ["很好", "干净", "👍", "최고", "ガラス", "clean"]
BAD = ["太差", "脏", "👎", "나빠", "うるさい", "dirty"]
NOUNS = ["房间", "服务", "早餐", "位置", "的", "方", "hotel", "아침"]


def prepare(folder: Path) -> None:
    """Write 133 rows, 125 of them usable, and a BERT with the names and files of 2018."""
    from transformers import BertConfig, BertForMaskedLM

    random.seed(0)
    rows: list[tuple[int | str, str]] = []
    for number in range(125):
        text = [*random.choices(NOUNS, k=random.randint(1, 12)), str(number)]
        text.insert(random.randint(0, len(text)), random.choice((BAD, GOOD)[number % 3 == 0]))
        rows.append((int(number % 3 == 0), '，"\r'.join(text)))
    rows[10:10] = [(1, ""), (0, "  "), ("", "没有标签"), (0, "又好又坏"), (1, "又好又坏")]
    rows += [rows[50], (1, rows[20][1]), (rows[40][0], rows[40][1] + " ")]
    with (folder / "reviews.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("label", "n", "review"), *((a, 7, b) for a, b in rows)])

    torch.manual_seed(1)
    characters = sorted({c for _, text in rows for c in text.lower() if not c.isspace()})
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    tokens += [f"##{character}" for character in characters]
    config = BertConfig(
        vocab_size=-(-len(tokens) // 8) * 8,  # padded to a multiple of 8
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    weights = BertForMaskedLM(config).state_dict()
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in list(weights):
        for new, before in old.items():
            if name.endswith(new):
                weights[name.replace(new, before)] = weights.pop(name)
    model = folder / "bert"
    model.mkdir()
    weights = {name: value.clone() for name, value in weights.items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    del (settings := config.to_dict())["model_type"]
    (model / "config.json").write_text(json.dumps(settings))
    (model / "vocab.txt").write_text("\n".join(tokens) + "\n")


def read(path: Path) -> tuple[list[str], list[int]]:
    """Return reviews and labels: without incomplete rows, repeats, and reviews of both labels."""
    labels: dict[str, set[int]] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file):
            if row["label"] and row["review"].strip():
                labels.setdefault(row["review"].strip(), set()).add(int(row["label"]))
    clear = {text: found.pop() for text, found in labels.items() if len(found) == 1}
    return list(clear), list(clear.values())


def train(flags: list[str]) -> Reference:
    """Train on global batches."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    from examples.bert_dp.model import build

    args = tyro.cli(Args, args=flags)
    texts, labels = read(args.csv)
    every: Any = range(len(texts))
    split = random_split(every, [0.9, 0.1], torch.Generator().manual_seed(args.seed))
    own, validation = ([texts[i] for i in part] for part in split)
    y, y_validation = (torch.tensor([labels[i] for i in part]) for part in split)
    torch.manual_seed(args.seed)
    bert, tokenizer = build(args.model, own, args.max_length)
    fixed = {"padding": "max_length", "truncation": True, "max_length": args.max_length}
    x, x_validation = (tokenizer(t, return_tensors="pt", **fixed) for t in (own, validation))
    count = len(own) // args.batch_size
    optimizer = torch.optim.AdamW(bert.parameters(), args.peak_lr, weight_decay=0.01)
    steps = args.epochs * count
    warm = steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: s / max(1, warm) if s < warm else (steps - s) / (steps - warm)
    )
    bert.train()
    losses, metrics, best, predictions = [], {}, -1.0, []
    for epoch in range(args.epochs):
        generator = torch.Generator().manual_seed(args.seed + epoch)
        lengths = [len(text) for text in own]
        order = list(LengthGroupedSampler(args.batch_size, lengths=lengths, generator=generator))
        for batch in torch.tensor(order)[: count * args.batch_size].view(count, -1):
            loss = bert(**{name: value[batch] for name, value in x.items()}, labels=y[batch]).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bert.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        with torch.no_grad():
            metrics, guess = judged(bert(**x_validation).logits, y_validation)
        if metrics["accuracy"] > best:
            best, predictions = metrics["accuracy"], guess
    return Reference(losses, bert.state_dict(), metrics, predictions)
