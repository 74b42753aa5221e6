"""manual_allreduce_sgd in one process: SGD on global batches, the last one of an epoch included."""

import torch
import torch.nn.functional as F
import tyro

from common.data import DigitNet
from examples.manual_allreduce_sgd.args import Args
from tests.reference import Reference, digits, judged, normalized

RANKS = (1, 2, 3, 4)  # the batch needs no equal parts
CASES = [
    # 28 batches of 50 images, and one of 37: 2, 3 and 4 ranks get unequal parts
    ["--epochs", "2", "--batch-size", "50", "--lr", "0.03", "--seed", "7"],
    # 4 batches of 359 images, and one of a single image: most ranks get none
    ["--all-reduce", "torch", "--epochs", "2", "--batch-size", "359", "--lr", "0.1"],
]


def train(flags: list[str]) -> Reference:
    """Train on global batches."""
    args = tyro.cli(Args, args=flags)
    images, labels, test_images, test_labels = digits()
    images, test_images = normalized([images, test_images])
    torch.manual_seed(args.seed)
    model = DigitNet(8, 10)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.5)
    losses = []
    for epoch in range(args.epochs):
        generator = torch.Generator().manual_seed(args.seed + epoch)
        for batch in torch.randperm(len(images), generator=generator).split(args.batch_size):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        metrics, _ = judged(model(test_images), test_labels)
    return Reference(losses, model.state_dict(), metrics)
