"""Compare data loading and training of imagenet_ddp with pytorch/examples, in images per second.

    python -m benchmarks.imagenet
    python -m benchmarks.imagenet --device cuda      # ResNet-50, training only

The recipe of pytorch/examples uses Pillow, RandomResizedCrop, RandomHorizontalFlip, ToTensor and
Normalize. It trains in float32 with torch's default memory format and kernels, and reads the loss
in each step. Data loading uses one core. Training reuses a small set of random images.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import datasets, models, transforms

from benchmarks import harness
from benchmarks.harness import Claim, Measurement, Result, Table, compare, lines, on_ranks, ratio
from common.image_folder import ImageFolder
from common.images import MEAN, STD, normalize

RECIPE = "recipe of pytorch/examples"
BYTES, FLOATS, RESIZED = "bytes", "bytes, normalized", "bytes, after resize_images"
INPUT_FLOORS = {BYTES: 1.3, RESIZED: 3.0}
TRAINING_FLOORS = {"cpu": 2.0, "cuda": 2.0}
GPU_FLOORS = {"eager": 4500.0, "compiled": 6000.0}  # images per second
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Args(Measurement):
    """The flags of this benchmark."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device to train on."""

    @property
    def suffix(self) -> str:
        """Suffix of the result's file name."""
        return "_cuda" if self.device == "cuda" else ""


def copy_images(source: Path, target: Path, count: int) -> int:
    """Copy JPEGs of about 500x375 pixels to target/a; return their number."""
    (target / "a").mkdir(parents=True)
    chosen = list[Path]()
    for path in sorted(source.rglob("*.[jJ]*")):
        with Image.open(path) as image:
            if min(image.size) >= 300 and max(image.size) <= 640:
                chosen.append(path)
    for path in chosen[:count]:
        shutil.copy(path, target / "a")
    return len(chosen[:count])


def per_second(images: Iterable[Tensor], finish: Callable[[Tensor], object], count: int) -> float:
    """Read images in batches of 32; return the images per second of CPU time."""
    began, batch = time.process_time(), list[Tensor]()
    for image in images:
        batch.append(image)
        if len(batch) == 32:
            finish(torch.stack(batch))
            batch.clear()
    return count / (time.process_time() - began)


def compare_input(full: Path, resized: Path, count: int, rounds: int) -> dict[str, list[float]]:
    """Return the images per second of CPU time for each way to read them."""
    recipe = datasets.ImageFolder(
        str(full),
        transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        ),
    )
    ours, small = ImageFolder(full, 224), ImageFolder(resized, 224)

    def all_of(data: Any, epoch: bool) -> Iterable[Tensor]:
        return (data[(0, index) if epoch else index][0] for index in range(count))

    to_floats = partial(normalize, device=CPU)
    programs = {
        RECIPE: lambda: per_second(all_of(recipe, False), len, count),
        BYTES: lambda: per_second(all_of(ours, True), len, count),
        FLOATS: lambda: per_second(all_of(ours, True), to_floats, count),
        RESIZED: lambda: per_second(all_of(small, True), len, count),
    }
    programs[RECIPE]()  # warm-up: fills the file cache
    return compare(programs, rounds, "images/s")


def train_recipe(arch: str, batch: int, steps: int, device: torch.device) -> float:
    """Train with the recipe; return the images per second, excluding the first two steps."""
    model = models.get_model(arch).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    images, labels, began = torch.randn(batch, 3, 224, 224), torch.arange(batch), 0.0
    images = images.pin_memory() if device.type == "cuda" else images
    for number in range(steps + 2):
        began = time.perf_counter() if number == 2 else began
        loss = criterion(model(images.to(device, non_blocking=True)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    return steps * batch / (time.perf_counter() - began)


def train_ours(
    arch: str, batch: int, steps: int, device: torch.device, *more: object, every: int = 1
) -> float:
    """Run imagenet_ddp; return the images per second, excluding the first steps."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as out:  # the run is killed
        words = ("python", "-m", "examples.imagenet_ddp", "--dummy", "-a", arch, "-b", batch)
        words += ("--print-freq", every, "--device", device.type, "--out", out, *more)
        first: tuple[int, float] | None = None
        with closing(lines(words)) as output:
            for seconds, line in output:
                step = re.match(r"epoch \d+/\d+, step (\d+)/", line)
                if step and int(step[1]) > 2 * every:
                    first = first or (int(step[1]), seconds)
                    if int(step[1]) >= first[0] + steps:
                        return batch * (int(step[1]) - first[0]) / (seconds - first[1])
    raise SystemExit("error: imagenet_ddp ended early")


def training_programs(kind: str, quick: bool) -> tuple[str, int, dict[str, Callable[[], float]]]:
    """Return the model name, the batch size and the programs for a device."""
    arch, batch, steps, device = "resnet18", 32, 6, torch.device(kind)
    programs: dict[str, Callable[[], float]] = {}
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("error: torch finds no CUDA device")
        arch, batch, steps = "resnet50", 256, 60
        own = partial(train_ours, arch, batch, steps, device, every=10)
        programs = {"eager": own, "compiled": partial(own, "--compile")}
    else:
        batch, steps = (8, 2) if quick else (batch, steps)
        programs = {"imagenet_ddp": partial(train_ours, arch, batch, steps, device)}
    programs[RECIPE] = partial(train_recipe, arch, batch, steps, device)
    return arch, batch, programs


def measure_input(args: Args) -> tuple[int, dict[str, list[float]]]:
    """Return the number of images, and the samples of `compare_input`."""
    with tempfile.TemporaryDirectory() as temporary:
        full, resized = Path(temporary, "full"), Path(temporary, "resized")
        found = copy_images(args.data / "imagenet_superclass", full, 64 if args.quick else 256)
        harness.run(("python", "-m", "tools.resize_images", full, resized))
        rounds = 1 if args.quick else args.rounds
        return found, on_ranks(1, compare_input, full, resized, found, rounds)


def measure(args: Args) -> Result:
    """Compare data loading and training of imagenet_ddp with the recipe."""
    rounds, tables, claims = 1 if args.quick else args.rounds, dict[str, Table](), list[Claim]()
    arch, batch, programs = training_programs(args.device, args.quick)
    inputs: dict[str, Any] = {"model": arch, "batch": batch, "pixels": "224x224"}
    if args.device == "cpu":
        inputs["JPEGs"], samples = measure_input(args)
        tables["Input on one core"] = Table("images/s", samples)
        for name, floor in INPUT_FLOORS.items():
            text = f"input of 500x375 JPEGs, {name}, faster than the {RECIPE}"
            claims.append(Claim(text, ratio(samples, name, RECIPE), floor))
    samples = compare(programs, rounds, "images/s")
    tables[f"Training of {arch} on {args.device}"] = Table("images/s", samples)
    ours = next(name for name in samples if name != RECIPE)
    text = f"training of {arch} on {args.device}, faster than the {RECIPE}"
    claims.append(Claim(text, ratio(samples, ours, RECIPE), TRAINING_FLOORS[args.device]))
    if args.device == "cuda":
        for name, floor in GPU_FLOORS.items():
            value = harness.medians(samples)[name]
            claims.append(Claim(f"training of {arch}, bf16, {name}", value, floor, "images/s"))
    return Result(inputs, tables, claims)


if __name__ == "__main__":
    harness.main("imagenet", measure, Args)
