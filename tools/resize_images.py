"""Shrink images to 256 pixels on the shorter side, so that training loads them faster.

python -m tools.resize_images DIR DIR256
"""

import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import tyro
from torchvision.transforms.v2 import functional as F
from tyro.conf import Positional

from common.image_folder import decode, list_images
from common.launch import UserError, one_line_errors


def shrink(old: str, new: Path, size: int) -> None:
    """Write a resized image, or copy a small one unchanged; skip a damaged one with a warning."""
    new.parent.mkdir(parents=True, exist_ok=True)
    unfinished = new.with_name(f".{os.getpid()}-{new.name}")  # loaders skip hidden files
    try:
        if min((image := decode(old)).shape[1:]) > size:
            F.to_pil_image(F.resize(image, [size])).save(unfinished, quality=85)
        else:
            shutil.copyfile(old, unfinished)
        unfinished.rename(new)
    except UserError as error:
        print(f"warning: {error}", file=sys.stderr)


def main(source: Positional[Path], target: Positional[Path], size: int = 256) -> None:
    """Write smaller images to another folder, without changing existing files."""
    source, target = source.expanduser(), target.expanduser()
    if not source.is_dir():
        raise UserError(f"{source} is not a folder; pass the folder with the images")
    images = {old: target / Path(old).relative_to(source) for old in list_images(str(source), {})}
    missing = {old: new for old, new in images.items() if not new.exists()}
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(shrink, *zip(*missing.items(), strict=True), [size] * len(missing)))
    damaged = sum(not new.exists() for new in missing.values())
    others = sum(path.is_file() and str(path) not in images for path in source.rglob("*"))
    skipped = f"{damaged} damaged images and {others} other files"
    print(f"{len(images) - damaged} images in {target}; skipped {skipped}")
    sys.exit(2 if damaged else 0)


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, prog="python -m tools.resize_images")
