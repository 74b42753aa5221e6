"""What a copied program gets from its new owner: data, an evaluation, and torch's own words for helpers.

test_copy.py puts this file beside each copy. It imports nothing of the project.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Anything: Any = object
ImageData = MixedPrecision = Launch = TextArgs = Recipe = Violation = Anything  # types in signatures
FOLDER = Path(__file__).parent


class UserError(Exception):
    """A mistake that has a sentence."""


class Lost(Exception):  # noqa: N818 - the project's name
    """Another process has ended."""


class Samples(Dataset[Any]):
    """Inputs and labels in memory."""

    names: tuple[str, ...] = ()

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs = self.pixels = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Any) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor([key[-1] if isinstance(key, tuple) else key for key in keys])
        return self.inputs[chosen], self.labels[chosen]


class Digits:
    """Grey images from a file."""

    def __init__(self, file: Path) -> None:
        kept = torch.load(file)
        self.train, self.test = Samples(*kept["train"]), Samples(*kept["test"])
        self.classes, self.size = 10, kept["train"][0].shape[-1]
        self.mean, self.std = kept["mean"], kept["std"]

    def normalise(self, pixels: Tensor) -> Tensor:
        return pixels.float().sub_(255 * self.mean).div_(255 * self.std)

    def collate(self, batch: Any) -> tuple[Tensor, Tensor]:
        pixels, labels = batch
        return self.normalise(pixels), labels

    def eval_loader(self, batch_size: int = 1000) -> Any:
        return DataLoader(self.test, batch_size, collate_fn=self.collate)


def image_data(name: str, folder: Path, most: int | None = None) -> Digits:
    return Digits(FOLDER / "data.pt")


class Images:
    """Colour images from a file, in batches of the sampler."""

    def __init__(self, samples: Samples, **order: Any) -> None:
        self.loader: Any = DataLoader(samples, collate_fn=tuple, **order)
        self.dataset, self.batch_sampler = samples, self.loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        std, mean = (torch.tensor(v).view(1, -1, 1, 1) for v in ((0.229, 0.224, 0.225), (0.485, 0.456, 0.406)))
        scale, shift = 1 / (255 * std), -mean / std
        for pixels, labels in self.loader:
            yield pixels.float().mul_(scale).add_(shift), labels


def load_images(*_: Any) -> Any:
    kept = torch.load(FOLDER / "data.pt")
    train, val = Samples(*kept["train"]), Samples(*kept["test"])
    return SimpleNamespace(train=train, val=val, classes=range(10), size=kept["train"][0].shape[-1])


def classifier_options(*_: Any) -> dict[str, Any]:
    return {}  # a ResNet needs none


def train_loader(samples: Samples, batch_size: int, _: Any, seed: int, *__: Any, **shard: Any) -> Images:
    from samplers import GlobalBatchSampler  # ty: ignore[import-not-found] - a copy of common/data/samplers.py

    return Images(samples, batch_sampler=GlobalBatchSampler(len(samples), batch_size, seed, **shard))


def eval_loader(samples: Samples, batch_size: int, *_: Any, **shard: Any) -> Images:
    return Images(samples, batch_size=batch_size)


def image_sets(args: Any) -> Any:
    return load_images()


def loaders(args: Any, data: Any, amp: Any, grid: Any) -> tuple[Images, Images]:
    shard = {"rank": grid.dp_rank, "world_size": grid.dp_size}
    return train_loader(data.train, args.batch_size, amp, args.seed, **shard), eval_loader(data.val, 50)


def broadcast_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def broadcast_object(compute: Any) -> Any:
    shared = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    return shared[0]


def gather_objects(value: Any) -> list[Any]:
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def all_reduce_mean(tensors: Any, group: Any = None) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor /= dist.get_world_size(group)


def assert_same_on_all_ranks(value: Any, *_: str) -> Any:
    return value


def print0(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def write_atomically(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def local_batch(batch_size: int, parts: int | None = None, what: str = "") -> int:
    return batch_size // (parts or dist.get_world_size())


def nothing(*_: Any, **__: Any) -> str:
    """Instead of checks and messages that a first copy does without."""
    return ""


check_replicas = check_smallest_batch = warn_of_broken = evaluate_only = init_model = warn = parameter_hash = nothing
current = local_rank0_first = report_timeline = nothing
