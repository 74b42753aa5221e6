"""resnet_pipeline in one process: the un-split ResNet accumulates gradients over micro-batches."""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
import tyro
from PIL import Image
from torch import Tensor, nn

from common.images import ImageFolder
from examples.resnet_pipeline.args import Args
from tests.reference import Reference, batches, judged

SMALL = ["--data", "{data}", "-a", "resnet18", "--batch-size", "12", "--seed", "5"]
CASES = [
    # Micro-batches of 3, 3, 2, 2, 2 samples; 2 batches of 12 of 29 images.
    [*SMALL, "--micro-batches", "5", "--epochs", "3"],
    # BatchNorm over micro-batches of 6: these, unlike stages, are a part of the model.
    [*SMALL, "--micro-batches", "2", "--epochs", "2", "--norm", "batch", "--schedule", "gpipe"],
]


def prepare(folder: Path) -> None:
    """Write noisy images of different sizes, of three classes; the last one is not tested."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 200, (3, 3, 1, 1), generator=generator)
    for split, count, classes in (("train", 29, 3), ("val", 7, 2)):
        for number in range(count):
            label = number % classes
            path = folder / split / "abc"[label] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = torch.randint(0, 56, (3, 36 + number % 5, 40), generator=generator)
            pixels = (patterns[label] + noise).byte().permute(1, 2, 0)
            Image.fromarray(pixels.numpy()).save(path)


def normalized(images: list[Tensor]) -> Tensor:
    mean, std = (
        255 * torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    batch = torch.stack(images).float().to(memory_format=torch.channels_last)
    return (batch - mean) / std


def train(flags: list[str], replicas: int = 1) -> Reference:
    """Train on global batches; a replica has every `replicas`-th sample of them."""
    args = tyro.cli(Args, args=flags)
    assert args.data is not None
    images = ImageFolder(args.data / "train", args.image_size, args.seed)
    test = ImageFolder(args.data / "val", args.image_size, classes=images.classes)
    torch.manual_seed(args.seed)
    norm = nn.BatchNorm2d if args.norm == "batch" else partial(nn.GroupNorm, 32)
    model = getattr(torchvision.models, args.arch)(
        num_classes=len(images.classes), norm_layer=norm, zero_init_residual=True
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    statistics = list(model.buffers())  # of BatchNorm
    losses, metrics, best, predictions = [], {}, -1.0, []
    for epoch in range(args.epochs):
        for batch in batches(len(images), args.batch_size, args.seed + epoch):
            samples = [images[epoch, index] for index in batch.tolist()]
            optimizer.zero_grad()
            losses.append(0.0)
            before, after = [buffer.clone() for buffer in statistics], []
            for replica in range(replicas):
                for buffer, value in zip(statistics, before, strict=True):
                    buffer.copy_(value)
                own = samples[replica::replicas]
                pixels = normalized([image for image, _ in own])
                labels = torch.tensor([label for _, label in own])
                for x, y in zip(
                    pixels.tensor_split(args.micro_batches),
                    labels.tensor_split(args.micro_batches),
                    strict=True,
                ):
                    loss = F.cross_entropy(model(x), y, reduction="sum") / args.batch_size
                    loss.backward()
                    losses[-1] += loss.item()
                after.append([buffer.clone() for buffer in statistics])
            for buffer, values in zip(statistics, zip(*after, strict=True), strict=True):
                buffer.copy_(torch.stack(values).double().mean(0))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(normalized([test[index][0] for index in range(len(test))]))
        model.train()
        metrics, guess = judged(logits, torch.tensor(test.targets))
        if metrics["accuracy"] > best:
            best, predictions = metrics["accuracy"], guess
    return Reference(losses, model.state_dict(), metrics, predictions)
