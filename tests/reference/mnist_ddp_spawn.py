"""mnist_ddp_spawn in one process: SGD with momentum, one-cycle schedule, label smoothing."""

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from sklearn.metrics import f1_score, precision_score, recall_score, roc_auc_score
from torch import Tensor

from common.data import DigitNet
from examples.mnist_ddp_spawn.args import Args
from tests.reference import Reference, batches, digits, judged, normalized

CASES = [
    ["--epochs", "2", "--seed", "3"],
    # 13 classes, the last one not among the test images. Of 191 images, 7 batches of 24 are used;
    # one more image would make it 8. The best epoch is not the last.
    ["--dataset", "{data}", "--epochs", "3", "--batch-size", "24", "--lr", "0.03", "--seed", "7"],
]


def prepare(folder: Path) -> None:
    """Write noisy patterns of 12x12 pixels in MNIST's format, one file of them packed."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 70, (13, 12, 12))
    for split, count, classes in (("train", 191, 13), ("t10k", 53, 12)):
        labels = np.arange(count) % classes
        images = patterns[labels] + generator.integers(0, 186, (count, 12, 12))
        images = struct.pack(">HBB3I", 0, 8, 3, *images.shape) + images.astype(np.uint8).tobytes()
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labels = struct.pack(">HBBI", 0, 8, 1, count) + labels.astype(np.uint8).tobytes()
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(labels)


def load(dataset: str) -> list[Tensor]:
    """Return training images [N, 1, S, S] from 0 to 1 and labels, test images and labels."""
    if dataset == "digits":
        return digits()
    splits = list[Tensor]()
    for split in ("train", "t10k"):
        path = Path(dataset) / f"{split}-images-idx3-ubyte.gz"
        pixels = gzip.decompress(path.read_bytes())[16:]
        splits.append(torch.tensor(list(pixels)).view(-1, 1, 12, 12) / 255)
        labels = (Path(dataset) / f"{split}-labels-idx1-ubyte").read_bytes()[8:]
        splits.append(torch.tensor(list(labels)))
    return splits


def train(flags: list[str]) -> Reference:
    """Train on global batches."""
    args = tyro.cli(Args, args=flags)
    return fit(args, args.lr)


def fit(args: Any, lr: float) -> Reference:
    images, labels, test_images, test_labels = load(args.dataset)
    images, test_images = normalized([images, test_images])
    classes, steps = int(labels.max()) + 1, len(images) // args.batch_size
    torch.manual_seed(args.seed)
    model = DigitNet(images.shape[-1], classes)
    optimizer = torch.optim.SGD(
        model.parameters(), lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=args.epochs * steps, cycle_momentum=False
    )
    losses, metrics, best, predictions = [], {}, -1.0, []
    for epoch in range(args.epochs):
        for batch in batches(len(images), args.batch_size, args.seed + epoch):
            logits = model(images[batch])
            loss = F.cross_entropy(logits, labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        with torch.no_grad():
            logits = model(test_images)
        metrics, guess = judged(logits, test_labels)
        scorers = {"precision": precision_score, "recall": recall_score, "f1": f1_score}
        for name, score in scorers.items():
            metrics[name] = float(score(test_labels, guess, average="macro", zero_division=0))
        if len(test_labels.unique()) == classes:
            scores = logits.softmax(1).double()
            metrics["auc"] = float(roc_auc_score(test_labels, scores, multi_class="ovr"))
        if metrics["accuracy"] > best:
            best, predictions = metrics["accuracy"], guess
    return Reference(losses, model.state_dict(), metrics, predictions)
