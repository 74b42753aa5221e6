"""What a trained model says about an image, or about every image of a folder."""

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from common.data.models import DigitNet
from common.data.samplers import Shard
from common.images.args import PredictArgs
from common.images.crop import middle, resize
from common.images.decode import BrokenImageError, decode, dimensions
from common.images.find import images_below, readable
from common.images.loader import MEAN, STD
from common.launch.collectives import gather_objects, print0
from common.launch.console import warn
from common.launch.device import choose_device
from common.launch.errors import UserError
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.train.amp import MixedPrecision
from common.train.evaluate import ordered_predictions
from common.train.files import write_atomically
from common.train.weights import load_model


@dataclass(frozen=True)
class Trained:
    """What best.safetensors tells beside the weights.

    Attributes:
        class_names: of the model's outputs, in their order.
        arguments: the flags of the training.
        data: facts about the images that it was trained on.
    """

    class_names: list[str]
    arguments: dict[str, Any]
    data: dict[str, Any]

    @property
    def size(self) -> int:
        """Height and width of the model's images, in pixels."""
        return int(self.data["image_size"])

    def load(self, path: Path) -> Tensor:
        """An image as the model was evaluated on: the middle in colours, or all of it in grey.

        Returns:
            [3, size, size], or [1, size, size] for a model of grey images.

        Raises:
            BrokenImageError: it is broken.
        """
        content = path.read_bytes()
        height, width = dimensions(content)
        grey = "mean" in self.data
        box = (0, 0, height, width) if grey else middle(height, width)
        pixels = torch.from_numpy(resize(decode(content, box), self.size)) / 255  # [size, size, 3]
        if grey:
            luma = pixels @ torch.tensor([0.299, 0.587, 0.114])  # ITU-R BT.601, as Pillow's "L"
            return ((luma - self.data["mean"]) / self.data["std"]).unsqueeze(0)
        return ((pixels - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)


def digit_net(trained: Trained) -> nn.Module:
    """The model of the examples that train on digits."""
    return DigitNet(trained.size, len(trained.class_names))


def read_trained(file: Path, example: str) -> Trained:
    """Read what the weights of an example tell.

    Raises:
        UserError: the file cannot be read, tells nothing, or is another example's.
    """
    try:
        with safe_open(file, "pt") as weights:
            about = weights.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"--weights {file} cannot be read ({error}): give best.safetensors of a training"
        ) from None
    if about.get("example") != example:
        other = f"of {about['example']}" if "example" in about else "without the names of classes"
        raise UserError(f"--weights {file} is {other}: give best.safetensors of {example}")
    return Trained(*(json.loads(about[name]) for name in ("class_names", "arguments", "data")))


@record
def predict(
    local_rank: int,
    place: Place,
    args: PredictArgs,
    example: str,
    build: Callable[[Trained], nn.Module],
) -> None:
    """Become a rank; print what an image is, or write a row for each image of a folder.

    Every rank calls this, with its shard of the images; rank 0 writes. An image that is broken gets
    a row without a class, and a warning.

    Args:
        local_rank: of this process.
        place: of the job.
        args: the flags.
        example: whose weights they must be.
        build: makes the model.

    Raises:
        UserError: as `read_trained` and `images_below`; the one image is broken.
    """
    place.export(local_rank)
    device, backend = choose_device(args.launch, local_rank)
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience)
    weights = args.weights or Path("runs") / example / "best.safetensors"
    trained = read_trained(weights, example)
    amp = MixedPrecision(args.amp, device)
    model = build(trained)
    load_model(str(weights), Path(), model)
    model = amp.move(model).eval()
    if args.images.is_dir():
        names = images_below(args.images)
        rows = probabilities(args, [args.images / name for name in names], trained, model, amp)
        if dist.get_rank() == 0:
            write_atomically(args.out, table(names, rows, trained.class_names).encode())
        print0(f"{len(names):,} images: {args.out}")
    else:
        try:
            trained.load(args.images)
        except (BrokenImageError, OSError) as error:
            raise UserError(f"{readable(args.images)} cannot be used ({error})") from None
        (row,) = probabilities(args, [args.images], trained, model, amp)
        name = trained.class_names[int(row.argmax())]
        print0(f"{name} {row.max().item():.4f}  {readable(args.images)}")
    dist.destroy_process_group()


@torch.inference_mode()
def probabilities(
    args: PredictArgs, files: list[Path], trained: Trained, model: nn.Module, amp: MixedPrecision
) -> Tensor:
    """What the model gives each image, [N, classes], on every rank; NaN for one that is broken.

    Every rank calls this.
    """
    shard, classes = list(Shard(len(files))), len(trained.class_names)
    rows, broken = [torch.empty(0, classes)], list[str]()
    for start in range(0, len(shard), args.batch_size):
        chosen = shard[start : start + args.batch_size]
        images, whole = torch.zeros(len(chosen), *_shape(trained)), torch.ones(len(chosen)).bool()
        for row, number in enumerate(chosen):
            try:
                images[row] = trained.load(files[number])
            except (BrokenImageError, OSError) as error:
                whole[row] = False
                broken.append(f"{readable(files[number])} cannot be used ({error})")
        with amp.autocast():
            logits = model(amp.to_device(images)).float().cpu()
        rows.append(logits.softmax(dim=1).masked_fill(~whole.unsqueeze(1), torch.nan))
    for line in sorted(line for lines in gather_objects(broken) for line in lines):
        warn(line)
    return ordered_predictions(torch.cat(rows), len(files))


def _shape(trained: Trained) -> tuple[int, int, int]:
    return 1 if "mean" in trained.data else 3, trained.size, trained.size


def table(names: list[str], rows: Tensor, class_names: list[str]) -> str:
    """A csv table: file, class, probability; the last two are empty for an image that is broken."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["file", "class", "probability"])
    best, number = rows.max(dim=1)
    for name, probability, label in zip(names, best.tolist(), number.tolist(), strict=True):
        known = not math.isnan(probability)
        found = [class_names[label], f"{probability:.4f}"] if known else ["", ""]
        lines.writerow([readable(name), *found])
    return text.getvalue()
