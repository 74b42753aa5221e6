"""imagenet_ddp in one process.

BatchNorm and dropout see the samples of one rank, so the parts of a batch are computed in turn. The
model has smooth activations and small weights: with a ResNet, a change of 1e-7 grows to 1e-2 within
four steps.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image
from torch import Tensor, nn
from torchvision import models
from torchvision.transforms import v2

from examples.imagenet_ddp.args import Args
from tests.reference import Reference, batches, digits, judged

MODEL = ["-a", "mobilenet_v3_small", "--image-size", "32", "--lr", "0.005", "--epochs", "2"]
CASES = [
    # 12 classes, the last one not in val; 5 batches of 12 of 66 images; loader workers
    ["{data}", *MODEL, "-b", "12", "--accumulate", "2", "--ema", "0.6", "-j", "2", "--seed", "3"],
    [*MODEL, "-b", "479", "--lr", "0.004", "--seed", "1"],
]
RANKS = (1,)  # more ranks are compared in tests/examples/test_imagenet_ddp.py


def prepare(folder: Path) -> None:
    """Write small pictures of many shapes and formats; each class has a color of its own."""
    random = np.random.default_rng(0)
    colors = random.integers(0, 150, (12, 3))
    for part, count in (("train", 66), ("val", 23)):
        for number in range(count):
            label = number % (12 if part == "train" else 11)
            height, width = random.integers(20, 60, 2)
            pixels = colors[label] + random.integers(0, 100, (height, width, 3))
            path = folder / part / f"class {label:02}" / f"{number}.{('jpg', 'png')[number % 2]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)


class GroupNet(nn.Sequential):
    """A model whose result does not depend on how a batch is divided over ranks."""

    def __init__(self, classes: int) -> None:
        torch.manual_seed(5)
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 5, 4), nn.GroupNorm(4, 16), nn.GELU()]
        layers += [nn.Conv2d(16, 32, 3, 2), nn.GroupNorm(4, 32), nn.GELU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(288, classes))


class Images:
    """A split in memory; `batch` returns normalized crops of an epoch, `test` the centers."""

    def __init__(self, args: Args, part: str) -> None:
        self.args, self.random_crop = args, v2.Identity()
        size = args.image_size
        if args.data:
            self.random_crop = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
            names = sorted(path.name for path in (args.data / "train").iterdir())
            files = [p for name in names for p in sorted((args.data / part / name).glob("*"))]
            self.pixels = [v2.functional.pil_to_tensor(Image.open(path)) for path in files]
            self.labels = torch.tensor([names.index(path.parent.name) for path in files])
            self.classes, resize = len(names), v2.Resize(round(size / 0.875))
        else:
            gray, self.labels = digits()[:2] if part == "train" else digits()[2:]
            gray = (255 * gray).round().byte()
            self.pixels = list(v2.functional.resize(gray, [size, size]).repeat(1, 3, 1, 1))
            self.classes, resize = 10, v2.Resize(round(size / 0.875))
        self.center = v2.Compose([resize, v2.CenterCrop(size)]) if args.data else v2.Identity()

    def batch(self, epoch: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        crops = []
        for index in indices.tolist():
            with torch.random.fork_rng():
                torch.manual_seed(hash((self.args.seed, epoch, index)))
                crops.append(self.random_crop(self.pixels[index]))
        return normalize(crops), self.labels[indices]

    def test(self) -> Tensor:
        return normalize([self.center(pixels) for pixels in self.pixels])


def normalize(images: list[Tensor]) -> Tensor:
    stacked = torch.stack(images).float() / 255
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]
    return ((stacked - mean) / std).contiguous(memory_format=torch.channels_last)


def train(
    flags: list[str], ranks: int = 1, build: Callable[[int], nn.Module] | None = None
) -> Reference:
    """Train on global batches, whose parts are computed in turn.

    Args:
        flags: of the example.
        ranks: parts of a batch; BatchNorm's statistics are those of the first one.
        build: makes another model from the number of classes.
    """
    args = tyro.cli(Args, args=flags)
    data, test_data = Images(args, "train"), Images(args, "val")
    generators = []
    for rank in reversed(range(ranks)):  # the parameters of rank 0 stay
        torch.manual_seed(args.seed + rank)
        model = models.get_model(args.arch, num_classes=data.classes)
        generators.insert(0, torch.get_rng_state())
    model = build(data.classes) if build else model
    model = model.to(memory_format=torch.channels_last)
    average: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(
        model.parameters(), 0.0, args.momentum, weight_decay=args.weight_decay
    )
    steps = len(data.labels) // args.batch_size
    losses, metrics, best, predictions = list[float](), dict[str, float](), -1.0, list[int]()
    for epoch in range(args.epochs):
        for batch in batches(len(data.labels), args.batch_size, args.seed + epoch):
            step, total = len(losses), args.epochs * steps
            rising, angle = (step + 1) / steps, (step - steps) / max(1, total - steps)
            factor = rising if step < steps else (1 + math.cos(math.pi * angle)) / 2
            optimizer.param_groups[0]["lr"] = args.lr * factor
            optimizer.zero_grad()
            loss, parts = 0.0, ranks * args.accumulate
            start = {name: value.clone() for name, value in model.named_buffers()}
            statistics = start
            for rank in range(ranks):
                model.load_state_dict(start, strict=False)
                torch.set_rng_state(generators[rank])
                for chosen in batch[rank::ranks].chunk(args.accumulate):
                    images, labels = data.batch(epoch, chosen)
                    logits = model(images)
                    part = F.cross_entropy(logits, labels, label_smoothing=0.1)
                    (part / parts).backward()
                    loss += part.item() / parts
                generators[rank] = torch.get_rng_state()
                if rank == 0:
                    statistics = {name: value.clone() for name, value in model.named_buffers()}
            model.load_state_dict(statistics, strict=False)
            optimizer.step()
            losses.append(loss)
            for name, value in model.state_dict().items():
                if name not in average or not value.is_floating_point():
                    average[name] = value.clone()
                else:
                    average[name] = args.ema * average[name] + (1 - args.ema) * value
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(average if args.ema else state)
        model.eval()
        with torch.no_grad():
            logits = model(test_data.test())
        model.train()
        model.load_state_dict(state)
        metrics, guess = judged(logits, test_data.labels)
        if metrics["accuracy"] > best:
            best, predictions = metrics["accuracy"], guess
    return Reference(losses, model.state_dict(), metrics, predictions)
