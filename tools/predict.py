"""Classify an image, or all images in a folder, with the weights from an image example.

    python -m tools.predict photo.jpg
    python -m tools.predict FOLDER --weights runs/mnist_ddp_spawn/best.safetensors >predictions.csv

The program prints a row `file,prediction,probability` per image. For an image that cannot be
decoded, the prediction is empty, and a warning is printed. The weights' metadata defines the model
and its classes.
"""

import csv
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torchvision import models
from torchvision.transforms.v2 import functional as F
from tyro.conf import Positional

from common.checkpoint import load_model, load_weights
from common.data import DigitNet
from common.image_folder import center_crop, decode, list_images, readable
from common.images import normalize
from common.launch import UserError, one_line_errors

CPU = torch.device("cpu")


def build(about: dict[str, Any]) -> nn.Module:
    """Build the model that the weights' metadata describes."""
    classes, options = len(about["classes"]), about.get("options", {})
    if about["model"] == "DigitNet":
        return DigitNet(about["size"], classes)
    if about.get("norm") == "group":  # trained by resnet_pipeline
        options["norm_layer"] = partial(nn.GroupNorm, 32)
    return models.get_model(about["model"], num_classes=classes, **options)


def prepare(path: str, about: dict[str, Any]) -> Tensor:
    """Return an image [C, size, size], preprocessed like the example's test images."""
    image, size = decode(path), about["size"]
    if about["model"] != "DigitNet":
        return normalize(center_crop(size)(image), CPU)
    gray = F.resize(F.rgb_to_grayscale(image / 255), [size, size])
    return (gray - about["mean"]) / about["std"]


@torch.no_grad()
def main(
    path: Positional[Path],
    weights: Path = Path("runs/imagenet_ddp/best.safetensors"),
    batch_size: int = 64,
) -> None:
    """Classify an image, or all images in a folder, and print a csv table."""
    path, weights = path.expanduser(), weights.expanduser()
    if not path.exists():
        raise UserError(f"{path} does not exist; pass an image or a folder")
    paths = list_images(str(path), {}) if path.is_dir() else [str(path)]
    _, about = load_weights(weights)
    if not {"model", "classes", "size"} <= about.keys():
        raise UserError(f"{weights} contains no model name; use the best.safetensors file of a run")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(about).eval().to(device)
    load_model(weights, model, {})
    table = csv.writer(sys.stdout)
    table.writerow(("file", "prediction", "probability"))
    for start in range(0, len(paths), batch_size):
        predictions = dict.fromkeys(paths[start : start + batch_size], ("", ""))
        images = dict[str, Tensor]()
        for file in predictions:
            try:
                images[file] = prepare(file, about)
            except UserError as error:
                print(f"warning: {error}", file=sys.stderr)
        if images:
            best = model(torch.stack([*images.values()]).to(device)).softmax(dim=1).max(dim=1)
            for file, label, chance in zip(images, best.indices, best.values, strict=True):
                predictions[file] = about["classes"][label], f"{chance:.4f}"
        for file, prediction in predictions.items():
            table.writerow((readable(file), *prediction))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, prog="python -m tools.predict")
