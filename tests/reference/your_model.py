"""your_model in one process: AdamW, one-cycle schedule, scikit-learn's breast cancer table."""

import torch
import torch.nn.functional as F
import tyro
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import accuracy_score, log_loss
from torch import nn

from examples.your_model.args import Args
from tests.reference import Reference, batches

CASES = [
    ["--epochs", "2", "--seed", "3"],
    # 20 batches of 21 of 426 samples, 6 are left out; 1 and 3 ranks
    ["--epochs", "3", "--batch-size", "21", "--lr", "0.03", "--seed", "11"],
]


def train(flags: list[str]) -> Reference:
    """Train on global batches."""
    args = tyro.cli(Args, args=flags)
    rows, labels = load_breast_cancer(return_X_y=True)
    rows = [rows[[i for i in range(len(rows)) if (i % 4 == 0) == test]] for test in (False, True)]
    mean, std = rows[0].mean(0), rows[0].std(0, ddof=1)
    train_rows, test_rows = (
        torch.tensor((part - mean) / std, dtype=torch.float32) for part in rows
    )
    test_labels = labels[::4]
    train_labels = torch.tensor([label for i, label in enumerate(labels) if i % 4])

    torch.manual_seed(args.seed)
    first, second = nn.Linear(30, 32), nn.Linear(32, 2)
    model = nn.Sequential(first, nn.GELU(), second)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.01)
    steps = args.epochs * (len(train_rows) // args.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=steps, cycle_momentum=False
    )
    losses, metrics, best, predictions = [], {}, -1.0, []
    for epoch in range(args.epochs):
        for batch in batches(len(train_rows), args.batch_size, args.seed + epoch):
            loss = F.cross_entropy(second(F.gelu(first(train_rows[batch]))), train_labels[batch])
            model.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        with torch.no_grad():
            probabilities = model(test_rows).double().softmax(1)
        guess = probabilities.argmax(1).tolist()
        metrics = {"loss": log_loss(test_labels, probabilities)}
        metrics["accuracy"] = accuracy_score(test_labels, guess)
        if metrics["accuracy"] > best:
            best, predictions = metrics["accuracy"], guess
    return Reference(losses, model.state_dict(), metrics, predictions)
