"""Which images a run trains and evaluates on: a user's folder, drawn ones, or synthetic ones."""

import contextlib
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.images.args import ImageArgs
from common.images.cache import PixelCache, pixel_cache
from common.images.decode import DECODER, BrokenImageError, Pixels, dimensions
from common.images.find import readable
from common.images.folder import ImageFolder
from common.images.index import index_places
from common.images.shapes import drawn_images
from common.images.synthetic import SyntheticImages
from common.launch.collectives import assert_same_on_all_ranks, gather_objects, print0
from common.launch.device import core_share
from common.launch.errors import UserError

Images = ImageFolder | SyntheticImages


@dataclass(frozen=True)
class ImageSets:
    """What to train on and what to evaluate on."""

    name: str
    train: Images
    val: Images

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return list(self.train.classes)

    @property
    def class_names(self) -> list[str]:
        """The same as it can be written."""
        return [readable(name) for name in self.classes]

    @property
    def test_columns(self) -> dict[str, list[str]]:
        """The files to evaluate on, for predictions.csv."""
        return {"file": [readable(name) for name in self.val.names]}

    @property
    def size(self) -> int:
        """Height and width, in pixels."""
        return self.train.size

    @property
    def facts(self) -> dict[str, Any]:
        """What result.json says about the data."""
        return {
            "dataset": self.name,
            "train_samples": len(self.train),
            "eval_samples": len(self.val),
            "classes": len(self.classes),
            "image_size": self.size,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed: the samples, wherever they lie."""
        return {
            "train_samples": len(self.train),
            "classes": len(self.classes),
            "image_size": self.size,
            "files": self.train.digest,
        }

    def __str__(self) -> str:
        """The name, the numbers of images and classes, the size and how the images are read."""
        decoder = "" if isinstance(self.train, SyntheticImages) else f", decoded by {DECODER}"
        return (
            f"{self.name} ({len(self.train)} train, {len(self.val)} val, {len(self.classes)} "
            f"classes, {self.size} px{decoder}{', cached' if self.train.cache else ''})"
        )


def load_images(args: ImageArgs, seed: int, out: Path) -> ImageSets:
    """Find, draw or make up the images that the flags name.

    Every rank calls this: one process per node draws while the others wait, and all ranks together
    fill the cache.

    Args:
        args: the flags.
        seed: of crops, or of synthetic images.
        out: where drawn images go, in a folder `images`.

    Raises:
        UserError: there is no such folder, it does not hold what it must, or is another one on
            another node.
    """
    if args.dummy:
        return synthetic_images(args.dummy_images, args.size, seed)
    folder = args.directory or drawn_images(out / "images")
    data = image_folders(folder, args.size, seed, args.skip_broken, args.cache)
    # With other files, a node may number the classes otherwise, or train on some images twice.
    names = data.train.digest + data.val.digest
    assert_same_on_all_ranks(names, "the images' names and classes")
    return data


def image_folders(
    directory: Path,
    size: int,
    seed: int,
    skip_broken: bool = False,
    cache: Path | None = None,
    augment: bool = True,
) -> ImageSets:
    """The images of `directory/train` and `directory/val`.

    Ranks that call this at the same time list large folders once, and fill the cache together.

    Args:
        directory: the folder.
        size: height and width to which images are cropped and resized, in pixels.
        seed: of the crops.
        skip_broken: replace broken images instead of raising.
        cache: folder of decoded pixels, which are added where they are missing.
        augment: whether training sees random crops, or the middle as evaluation does.

    Raises:
        UserError: a folder is missing or empty, or `val` has a class that `train` does not have.
    """
    index = index_places(cache)
    train = ImageFolder(directory / "train", size, augment, seed, skip_broken, index=index)
    val = ImageFolder(
        directory / "val", size, False, 0, skip_broken, classes=train.classes, index=index
    )
    for part in (train, val):
        if part.unused:
            print0(f"{readable(part.root)}: {part.unused}")
        if cache:
            part.cache = _filled_cache(part, cache)
    return ImageSets(readable(directory), train, val)


def synthetic_images(count: int, size: int, seed: int) -> ImageSets:
    """Made-up images of 10 classes: `count` to train on, a fifth of it to evaluate on."""
    train, val = (SyntheticImages(number, size, 10, seed) for number in (count, -(-count // 5)))
    return ImageSets("synthetic images", train, val)


def _filled_cache(images: ImageFolder, directory: Path) -> PixelCache:
    def pixels(index: int) -> Pixels | None:
        try:
            return images.pixels(index)
        except (BrokenImageError, OSError) as error:
            if images.skip_broken:
                return None
            raise images.mistake(index, error) from None

    def announce(missing: int) -> None:
        needed, free = missing * mean_bytes(images), shutil.disk_usage(directory).free
        print0(
            f"cache {readable(directory)}: {missing} of {len(images)} images to decode, about "
            f"{needed / 1e9:.3g} GB; {free / 1e9:.3g} GB are free"
        )
        if 0.9 * needed > free:  # the mean is that of a sample
            raise UserError(
                f"--cache {readable(directory)}: about {needed / 1e9:.3g} GB are needed, "
                f"{free / 1e9:.3g} GB are free: choose another folder, or leave out --cache"
            )

    started = time.monotonic()
    cache, decoded = pixel_cache(
        directory, images.root, images.files, pixels, core_share(), announce
    )
    seconds, by_rank = time.monotonic() - started, gather_objects(decoded)
    done = f"{sum(by_rank)} decoded in {seconds:.1f} s by {len(by_rank)} rank(s)"
    there = len(images) - sum(by_rank)
    done += f", {there} there already or by another run" if there and sum(by_rank) else ""
    done = done if sum(by_rank) else "all there already"
    print0(f"cache {readable(cache.folder)}: {len(images)} images, {done}")
    return cache


def mean_bytes(images: ImageFolder) -> float:
    """Of decoded images, from the heads of 256 of them."""
    sizes = []
    for index in range(0, len(images), -(-len(images) // 256)):
        with contextlib.suppress(BrokenImageError, OSError):  # it is named when it is decoded
            sizes.append(3 * math.prod(dimensions(images.file(index).read_bytes())))
    return sum(sizes) / max(1, len(sizes))
