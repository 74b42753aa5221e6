"""Decoding a large folder of images into a cache: how seconds and bytes grow with the images.

    python -m benchmarks.pixel_cache --data DIR       # DIR/*.jpg, to which the images are links
    python -m benchmarks.pixel_cache --images 200 400

The folder holds hard links to some JPEGs, in 1,000 classes. For each number of images:

* one process with one thread fills an empty cache;
* a process for each core fills one, together, as the ranks of a node do;
* the same processes are killed when half of it is there, and started again: the seconds of both;
* they open the cache that is there.

Beside it: the bytes that a program announces before it decodes the first image, from the heads of
256 files, against those that the cache then takes. Chunks are written through to the disk.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Measurement, compare, facts, medians, program, save
from benchmarks.million import CONTEXT, alone, grow, measured, sources
from common.images.cache import pixel_cache
from common.images.folder import ImageFolder
from common.images.index import index_places
from common.images.sets import mean_bytes
from common.launch.cgroup import cores
from common.launch.flags import at_least

ONE, ALL, KILLED, THERE = "one core", "all cores", "all cores, killed half way", "there already"
Record = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Args(Measurement):
    """The flags of this program."""

    rounds: int = 1
    """Samples of each way."""
    data: Path | None = None
    """Folder with JPEGs, at any depth (default: some are drawn)."""
    images: tuple[int, ...] = (4_000, 12_000, 36_000, 100_000)
    """Images in the folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(128, images=min(self.images, default=0))  # two chunks: half of them is one


def fill(root: Path, cache: Path) -> Record:
    """Open the cache, and decode what is missing, in this process."""
    torch.set_num_threads(1)

    def opened() -> tuple[ImageFolder, int]:
        images = ImageFolder(root, 224, training=True, index=index_places(cache))
        return images, pixel_cache(cache, root, images.files, images.pixels, threads=1)[1]

    (images, decoded), found = measured(opened)
    return found | {"decoded": decoded, "announced_gb": mean_bytes(images) * len(images) / 1e9}


def together(root: Path, cache: Path, processes: int) -> Record:
    """Fill the cache with some processes: seconds until the last is ready, the most memory."""
    each, began = alone(fill, root, cache, processes=processes)
    return {
        "seconds": max(one["ready"] for one in each) - began,
        "mb": max(one["mb"] for one in each),
        "decoded": sum(one["decoded"] for one in each),
        "announced_gb": each[0]["announced_gb"],
    }


def killed_half_way(root: Path, cache: Path, images: int, processes: int) -> Record:
    """Fill a cache, kill the processes when half of it is there, and fill it with new ones."""
    first = [CONTEXT.Process(target=fill, args=(root, cache)) for _ in range(processes)]
    for process in first:
        process.start()
    while not list(cache.glob("*/.*.lock")):
        time.sleep(0.002)
    began = time.monotonic()
    while len(list(cache.glob("*/*.pixels"))) < images / 64 / 2:
        time.sleep(0.05)
    for process in first:
        process.kill()
        process.join()
    until_killed = time.monotonic() - began
    found = together(root, cache, processes)
    return found | {"seconds": until_killed + found["seconds"], "after": found["seconds"]}


def sample(way: str, root: Path, cache: Path, images: int) -> Record:
    """One way, once. The cache of a way before it is away, but for the last one."""
    if way != THERE:
        shutil.rmtree(cache, ignore_errors=True)
    elif not cache.exists():
        together(root, cache, cores())
    os.sync()  # or this measurement would meet the writing of the one before
    if way == KILLED:
        found = killed_half_way(root, cache, images, cores())
    else:
        found = together(root, cache, 1 if way == ONE else cores())
    found["gb"] = sum(file.stat().st_size for file in cache.glob("*/*.pixels")) / 1e9
    return found


def told(images: int, way: str, of: Record) -> str:
    """A line about a sample."""
    return (
        f"{images:,} images, {way}: {of['seconds']:.2f} s, {of['decoded']:,} decoded, "
        f"{of['gb']:.2f} GB ({of['announced_gb']:.2f} announced)"
    )


def main(args: Args) -> None:
    """Measure all sizes, and write the result."""
    result: dict[str, Any] = facts("torch") | {"rounds": args.rounds, "sizes": {}}
    CONTEXT.set_forkserver_preload(["benchmarks.million", "common.images.sets"])
    with tempfile.TemporaryDirectory() as home:
        root, there = Path(home) / "train", 0
        files = sources(args.data, Path(home))
        result["source_bytes"] = sum(file.stat().st_size for file in files) / len(files)
        for images in sorted(args.images):
            grow(root, files, there, images)
            there = images
            time.sleep(3)  # an index of a folder that has just changed would not be kept
            shutil.rmtree(Path(home) / "cache", ignore_errors=True)
            programs: dict[str, Callable[[], Record]] = {
                way: partial(sample, way, root, Path(home) / "cache", images)
                for way in (ONE, ALL, KILLED, THERE)
            }
            found = compare(programs, args.rounds, show=partial(told, images))
            middle = {
                way: medians({key: [one[key] for one in of] for key in of[0]}, 4)
                for way, of in found.items()
            }
            middle[KILLED]["times_undisturbed"] = round(
                middle[KILLED]["seconds"] / middle[ALL]["seconds"], 3
            )
            result["sizes"][str(images)] = {"samples": found, "medians": middle}
    save("pixel_cache", result, args.out)


if __name__ == "__main__":
    program(Args, main, __doc__)
