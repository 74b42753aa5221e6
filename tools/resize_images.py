"""Shrink a folder of images once, to 256 pixels on the shorter side: loaders then read less.

python -m tools.resize_images DIR DIR256
"""

import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import tyro
from torchvision.transforms.v2 import functional as F
from tyro.conf import Positional

from common.image_folder import decode, list_images
from common.launch import UserError


def shrink(old: str, new: Path, size: int) -> None:
    """Write an image, or copy it if it is small; a damaged one is left out with a warning."""
    new.parent.mkdir(parents=True, exist_ok=True)
    unfinished = new.with_name(f".{new.name}")  # a hidden file is no image
    try:
        if min((image := decode(old)).shape[1:]) > size:
            F.to_pil_image(F.resize(image, [size])).save(unfinished, quality=85)
        else:
            shutil.copyfile(old, unfinished)
        unfinished.rename(new)
    except UserError as error:
        print(f"warning: {error}", file=sys.stderr)


def main(source: Positional[Path], target: Positional[Path], size: int = 256) -> None:
    """Write the images of a folder to another one, where existing files remain."""
    images = {old: target / Path(old).relative_to(source) for old in list_images(str(source), {})}
    missing = {old: new for old, new in images.items() if not new.exists()}
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(shrink, *zip(*missing.items(), strict=True), [size] * len(missing)))
    damaged = sum(not new.exists() for new in missing.values())
    others = sum(path.is_file() and str(path) not in images for path in source.rglob("*"))
    print(
        f"{len(images) - damaged} images in {target}; left out: {damaged} damaged, {others} others"
    )
    sys.exit(2 if damaged else 0)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m tools.resize_images")
