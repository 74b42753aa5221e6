"""For imagenet_throughput.py: its images, and what it measures in new processes."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, islice, zip_longest
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from common.images import decode
from common.images.cache import pixel_cache
from common.images.folder import ImageFolder
from common.images.loader import MEAN, STD, Batches
from common.launch.errors import UserError
from common.train.amp import MixedPrecision
from common.train.precision import Precision

BATCH, PASSES = 32, 3  # of the measurement of the input
LARGEST, MOST = 640, 1000  # pixels, images
Images = Sequence[tuple[str, Path]]  # class, file
Result = TypeVar("Result")


def dimensions(path: Path) -> tuple[int, int]:
    """Width and height of an image."""
    with Image.open(path) as image:
        return image.size


def choose_images(train: Path) -> Images:
    """Up to `MOST` images that are not large, taken from all classes in turn.

    Raises:
        UserError: there are fewer than one batch.
    """

    def suitable(path: Path | None) -> bool:
        jpeg = path and path.suffix.lower() in (".jpg", ".jpeg") and path.name[:2] != "._"
        return bool(path and jpeg) and max(dimensions(path)) <= LARGEST

    folders = [sorted(folder.iterdir()) for folder in sorted(train.iterdir()) if folder.is_dir()]
    in_turn = filter(suitable, chain.from_iterable(zip_longest(*folders)))
    chosen = [(path.parent.name, path.resolve()) for path in islice(in_turn, MOST)]
    if len(chosen) < BATCH:
        small = f"JPEGs of at most {LARGEST} pixels"
        raise UserError(f"--data: {train} has {len(chosen)} {small}; give at least {BATCH}")
    return chosen


def describe_images(chosen: Images) -> dict[str, Any]:
    """How many images, and of what size."""
    widths, heights = zip(*(dimensions(path) for _, path in chosen), strict=True)
    kib = sum(path.stat().st_size for _, path in chosen) / len(chosen) / 1024
    sizes = {"median_width": median(widths), "median_height": median(heights)}
    return {"count": len(chosen), **sizes, "mean_kib": round(kib, 1)}


def link(folder: Path, files: Images) -> Path:
    """A folder of links to images, in their classes."""
    for number, (name, path) in enumerate(files):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{number:06d}.jpg").symlink_to(path)
    return folder


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of this module in a process that shares nothing with earlier ones."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def probe() -> dict[str, Any]:
    """What our program would choose here."""
    cpu = MixedPrecision(Precision(), torch.device("cpu")).name
    return {"cpu_precision": cpu, "cuda": torch.cuda.is_available(), "decoder": decode.DECODER}


def build_cache(train: Path, cache: Path) -> dict[str, float]:
    """Decode all images with all cores, as `--cache` does."""
    dataset = ImageFolder(train, 224, training=True)
    wall, cpu = time.perf_counter(), time.process_time()
    pixel_cache(cache, dataset.root, dataset.names, dataset.pixels, torch.get_num_threads())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = sum(path.stat().st_size for path in cache.rglob("*.pixels"))
    files = sum(dataset.file(index).stat().st_size for index in range(len(dataset)))
    times = {"mib": size / 2**20, "times_the_files": size / files}
    return {"seconds": wall, "cpu_seconds": cpu, **times}


def open_dataset(train: Path, ours: bool, cache: Path | None, decoder: str) -> Any:
    """Our dataset, with a complete pixel cache if there is one, or that of imagenet/main.py."""
    decode.DECODER = decoder
    if not ours:
        steps: list[Any] = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
        steps += [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        return datasets.ImageFolder(str(train), transforms.Compose(steps))
    dataset = ImageFolder(train, 224, training=True)
    if cache:
        names, pixels = dataset.names, dataset.pixels
        dataset.cache, decoded = pixel_cache(cache, dataset.root, names, pixels, threads=1)
        assert decoded == 0
    return dataset


def measure_input(
    train: Path, ours: bool, normalised: bool, cache: Path | None, decoder: str
) -> dict[str, Any]:
    """Load all images `PASSES` times, on one thread.

    Args:
        train: the folder of classes.
        ours: our dataset; otherwise the peer's.
        normalised: with our normalisation per batch, as training on the CPU does it; the peer's is
            in its transforms.
        cache: read from our pixel cache there, which must be complete.
        decoder: what decodes our JPEGs: `nvimgcodec` or `simplejpeg`.
    """
    torch.set_num_threads(1)
    dataset = open_dataset(train, ours, cache, decoder)
    amp = MixedPrecision(Precision(precision="fp32", channels_last="yes"), torch.device("cpu"))
    seen, cpu, wall = 0, 0.0, 0.0
    for number in range(PASSES + 1):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(number))
        keys: Any = [part.tolist() for part in order.split(BATCH)]
        if ours:
            keys = [[(number, index) for index in part] for part in keys]
        loader = DataLoader(dataset, batch_sampler=keys, collate_fn=_as_it_is if ours else None)
        batches: Any = Batches(loader, amp) if normalised else loader
        started, loaded = (time.process_time(), time.perf_counter()), 0
        for batch in batches:
            images = batch.images if ours and not normalised else batch[0]
            assert images.shape[1:] == (3, 224, 224), images.shape
            kind = torch.uint8 if ours and not normalised else torch.float32
            assert images.dtype is kind, images.dtype
            loaded += len(images)
        assert loaded == len(dataset)
        if number:  # the first pass fills the file cache, and checks the sums of the pixel cache
            cpu, wall = (
                cpu + time.process_time() - started[0],
                wall + time.perf_counter() - started[1],
            )
            seen += loaded
    return {
        "images_per_second": seen / cpu,
        "images": seen,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
    }


def measure_workers(
    train: Path, ours: bool, cache: Path | None, decoder: str, workers: int
) -> dict[str, Any]:
    """Load all images `PASSES` times by loader processes, all cores in use.

    The clock starts after a first pass, and stops before the end: what the workers have prepared in
    advance is as much then as at the start.

    Args:
        train: the folder of classes.
        ours: our dataset, in bytes; otherwise the peer's.
        cache: as in `measure_input`.
        decoder: as in `measure_input`.
        workers: loader processes.
    """
    dataset = open_dataset(train, ours, cache, decoder)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    once: Any = [part.tolist() for part in order[: len(order) // BATCH * BATCH].split(BATCH)]
    keys = once * (1 + PASSES + -(-2 * workers // len(once)))  # a worker prepares two in advance
    if ours:
        keys = [[(place, index) for index in part] for place, part in enumerate(keys)]
    collate = _as_it_is if ours else None
    loader = DataLoader(dataset, batch_sampler=keys, num_workers=workers, collate_fn=collate)
    batches = iter(loader)
    for _ in once:
        next(batches)
    started, seen = time.perf_counter(), 0
    for _ in range(PASSES * len(once)):
        batch = next(batches)
        seen += len(batch.images if ours else batch[0])
    wall = time.perf_counter() - started
    for _ in batches:  # a worker that is stopped while it hands over a batch can abort, with a core
        pass
    return {"images_per_second": seen / wall, "images": seen, "wall_seconds": wall}


def _as_it_is(batch: Any) -> Any:
    return batch


def peak_bf16() -> float:
    """FLOP/s of the best of five runs of 20 products of 8192 x 8192 matrices in bf16."""
    size, products, best = 8192, 20, 0.0
    one, other = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(6):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(products):
            one @ other
        end.record()
        end.synchronize()
        best = max(best, 2 * size**3 * products / (start.elapsed_time(end) / 1000))
    return best
