"""mnist_dataparallel as a plain loop: one process, one device, the whole batch at once."""

import torch
import torch.nn.functional as F
import tyro
from sklearn.datasets import load_digits
from torch import Tensor

from common.data import DigitNet
from examples.mnist_dataparallel.args import Args
from tests.reference import Reference

CASES = [
    # Local batches of 84, 42, 28 and 21 on 4 devices: the last one is split into 6, 6, 6 and 3.
    ["--device-ids", "0", "1", "2", "3", "--epochs", "2", "--batch-size", "84", "--seed", "3"],
]


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return normalized images and labels to train on, then those to test on: every fifth."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images * (255 / 16)).round().float().view(-1, 1, 8, 8) / 255
    chosen = torch.arange(len(labels)) % 5 == 0
    pixels = (pixels - pixels[~chosen].mean()) / pixels[~chosen].std()
    targets = torch.tensor(labels)
    return pixels[~chosen], targets[~chosen], pixels[chosen], targets[chosen]


def train(flags: list[str]) -> Reference:
    args = tyro.cli(Args, args=flags)
    images, labels, test_images, test_labels = digits()
    steps = len(images) // args.batch_size
    torch.manual_seed(args.seed)
    model = DigitNet(8, 10)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, args.epochs * steps, cycle_momentum=False
    )
    losses = []
    for epoch in range(args.epochs):
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(args.seed + epoch)
        )
        for batch in order[: steps * args.batch_size].split(args.batch_size):
            loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    with torch.no_grad():
        logits = model(test_images)
    metrics = {
        "loss": F.cross_entropy(logits, test_labels).item(),
        "accuracy": (logits.argmax(1) == test_labels).double().mean().item(),
    }
    return Reference(losses, model.state_dict(), metrics)
