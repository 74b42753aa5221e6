"""A million images and a billion samples: how the costs of many of them grow.

    python -m benchmarks.million --data DIR           # DIR/*.jpg, to which the images are links
    python -m benchmarks.million --images 1000 --samples 100000 --ranks 64

Each figure is of a process of its own, forked from one that has imported torch. Four parts:

* a folder of images in up to 1,000 classes, hard links to a few JPEGs: until its list is there,
  without an index and with one, beside torchvision's ImageFolder; in one process, and in eight that
  start at once. The folder has just been made, so the kernel knows its entries;
* the order of an epoch, beginning in its middle: a list by torch.randperm, and a permutation that
  is computed;
* the check that each sample was seen once: counts, and sums;
* the predictions for as many images as the largest folder has, put in order: one rank of many. The
  others are simulated, by torch's backend "fake", which sends nothing.

Memory is what the process holds at most beyond what it held before.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision import datasets

from benchmarks.harness import Measurement, compare, facts, medians, program, save
from common.data.samplers import BLOCK, GlobalBatchSampler, Permutation
from common.images.find import images_below
from common.images.folder import ImageFolder
from common.images.index import FEW
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.train.evaluate import ordered_predictions
from common.train.seen import Counts, Sums

IMAGENET = 1_281_167
CLASSES, SOURCES = 1000, 64  # ext4 allows 65,000 links to a file
RANKS, WORKER, BATCH = 8, 256, 1024
FIRST, SECOND, THEIRS = "ours, first start", "ours, second start", "torchvision's ImageFolder"
CONTEXT = get_context("forkserver")
COMING: list[Any] = []  # the barrier of this process's pool
Record = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Args(Measurement):
    """The flags of this program."""

    rounds: int = 3
    """Samples of each start."""
    data: Path | None = None
    """Folder with JPEGs, at any depth (default: some are drawn)."""
    images: tuple[int, ...] = (10_000, 100_000, 400_000, IMAGENET)
    """Images in the folder."""
    samples: tuple[int, ...] = (10**6, 10**7, 10**8, 10**9)
    """Samples of an epoch."""
    listed: int = 10**8
    """The most samples for which a list, or a count of each, is made."""
    ranks: tuple[int, ...] = (64, 256, 512, 1024)
    """Ranks whose predictions are gathered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("images", "samples", "ranks"):
            at_least(1, **{name: min(getattr(self, name), default=0)})


def kib(file: str, *names: str) -> float:
    """The sum of some lines of a file of /proc, in kB."""
    lines = (line.split() for line in Path(file).read_text().splitlines())
    return float(sum(int(line[1]) for line in lines if line[0].removesuffix(":") in names))


def measured(work: Callable[[], Any]) -> tuple[Any, Record]:
    """What work returns, its seconds, the megabytes it took at most, and those that it keeps.

    What it keeps is without the pages of files, which processes share.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the greatest size is counted from now on
    before, own = kib("/proc/self/status", "VmRSS"), kib("/proc/self/status", "RssAnon")
    began = time.perf_counter()
    found = work()
    seconds, ready = time.perf_counter() - began, time.monotonic()
    peak = kib("/proc/self/status", "VmHWM") - before
    kept = max(0.0, kib("/proc/self/status", "RssAnon") - own)
    sizes = {"mb": peak * 1024 / 1e6, "kept_mb": kept * 1024 / 1e6}
    return found, {"seconds": seconds, **sizes, "ready": ready}


def prepare(barrier: Any) -> None:
    """Prepare a process of the pool: one thread, as a rank on a machine with few cores has."""
    torch.set_num_threads(1)
    COMING.append(barrier)


def at_once(work: Callable[[], Any]) -> Any:
    """Do the work when all processes of the pool have come, and note when that was."""
    COMING[0].wait()
    return time.monotonic(), work()


def alone(work: Callable[..., Any], *words: Any, processes: int = 1) -> tuple[list[Any], float]:
    """Do the work in new processes at the same time: what each returns, and when all began."""
    barrier = CONTEXT.Barrier(processes)
    with ProcessPoolExecutor(processes, CONTEXT, prepare, (barrier,)) as pool:
        jobs = [pool.submit(at_once, partial(work, *words)) for _ in range(processes)]
        began, found = zip(*(job.result() for job in jobs), strict=True)
    return list(found), min(began)


def sources(data: Path | None, folder: Path) -> list[Path]:
    """Some JPEGs on the disk of the folder, copied or drawn.

    Raises:
        UserError: there are none.
    """
    root = data or folder / "drawn"
    if data is None:
        root.mkdir()
        random = np.random.default_rng(0)
        for number in range(SOURCES):
            noise = random.integers(0, 256, (64, 64, 3), np.uint8)
            Image.fromarray(noise).save(root / f"{number}.jpg")
    jpegs = [name for name in images_below(root) if name.lower().endswith((".jpg", ".jpeg"))]
    if not jpegs:
        raise UserError(f"--data {data} holds no JPEG")
    copies = [folder / f"{number}.jpg" for number in range(min(SOURCES, len(jpegs)))]
    for name, copy in zip(jpegs, copies, strict=False):
        shutil.copy(root / name, copy)
    return copies


def grow(root: Path, images: Sequence[Path], first: int, end: int) -> None:
    """Add the images of these numbers to the folder, named as ImageNet's are."""
    for number in range(first, end):
        folder = root / f"n{number % CLASSES:08d}"
        if number < CLASSES:
            folder.mkdir(parents=True)
        name = f"n{number % CLASSES:08d}_{number // CLASSES}.JPEG"
        os.link(images[number % len(images)], folder / name)


def start_up(way: str, root: Path, place: Path) -> Record:
    """Make the data set; what a loader worker then copies when it has touched all of it."""
    if way == THEIRS:
        data, found = measured(lambda: datasets.ImageFolder(str(root)))
        found["worker_mb"] = in_worker(
            lambda: sum(len(file) + label for file, label in data.samples)
        )
    else:
        ours, found = measured(lambda: ImageFolder(root, 224, training=True, index=[place]))
        names, labels = ours.files, ours.labels
        found["worker_mb"] = in_worker(lambda: sum(map(len, names)) + int(labels.sum()))
    return found


def in_worker(touch: Callable[[], object]) -> float:
    """The private megabytes that a forked process gains by touching all names and labels."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        private = partial(kib, "/proc/self/smaps_rollup", "Private_Clean", "Private_Dirty")
        before = private()
        touch()
        os.write(writing, str(private() - before).encode())
        os._exit(0)
    gained = float(os.read(reading, 64))
    os.waitpid(child, 0)
    return max(0.0, gained) * 1024 / 1e6


def folders(args: Args, home: Path) -> dict[str, Any]:
    """The starts for each size of the folder."""
    root, place, found = home / "train", home / "index", {}
    images, there = sources(args.data, home), 0

    def start(way: str, processes: int) -> Record:
        if way != SECOND:
            shutil.rmtree(place, ignore_errors=True)
        elif not list(place.glob("*.images")):
            alone(start_up, FIRST, root, place)
        each, began = alone(start_up, way, root, place, processes=processes)
        most = {name: max(one[name] for one in each) for name in each[0]}
        most["seconds"] = most.pop("ready") - began
        return most

    for number in sorted(args.images):
        grow(root, images, there, number)
        there = number
        shutil.rmtree(place, ignore_errors=True)
        os.sync()  # or the next measurement would meet the writing
        time.sleep(3)  # an index of a folder that has just changed would not be kept
        ways = (FIRST, SECOND, THEIRS) if number >= FEW else (FIRST, THEIRS)
        found[str(number)] = {
            words: summary(
                compare(
                    {way: partial(start, way, processes) for way in ways},
                    args.rounds if processes == 1 else 1,
                    show=lambda way, of, n=number, p=processes: (
                        f"{n:,} images, {p} process(es), {way}: {of['seconds']:.2f} s, "
                        f"{of['mb']:.0f} MB, {of['kept_mb']:.1f} kept, "
                        f"worker {of['worker_mb']:.1f} MB"
                    ),
                )
            )
            for words, processes in (("one process", 1), (f"{RANKS} processes", RANKS))
        }
    return found


def summary(samples: dict[str, list[Record]]) -> dict[str, Any]:
    """The figures of each way, and their medians."""
    return {
        way: {
            "samples": of,
            "medians": medians({key: [one[key] for one in of] for key in of[0]}, 4),
        }
        for way, of in samples.items()
    }


def first_batch(samples: int, listed: bool) -> Record:
    """Begin in the middle of an epoch; then 200 batches more."""
    sampler = GlobalBatchSampler(samples, BATCH, 0, 0, 1)
    generator = torch.Generator().manual_seed(0)

    def order() -> Tensor | Permutation:
        if listed:
            return torch.randperm(samples, generator=generator)
        return Permutation(samples, generator)

    next(iter(GlobalBatchSampler(BLOCK, BATCH, 0, 0, 1)))  # what torch loads in its first call
    Permutation(BLOCK, generator)[torch.arange(BLOCK)]
    sampler.order = order
    sampler.skip(samples // BATCH // 2)
    batches = iter(sampler)
    _, found = measured(lambda: next(batches))
    began, drawn = time.perf_counter(), 0
    for batch, _ in zip(batches, range(200), strict=False):
        drawn += len(batch)
    found["ns_per_sample"] = (time.perf_counter() - began) / drawn * 1e9
    return {name: found[name] for name in ("seconds", "mb", "ns_per_sample")}


def once_each(samples: int, listed: bool) -> Record:
    """Note all samples, the first million in batches of a rank; then the check."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    for first in (Counts(BLOCK), Sums(BLOCK)):  # what torch and NumPy load in their first calls
        first.add(torch.arange(BLOCK))
        first.check(True)
    times = [0.0]

    def epoch() -> None:
        noted = Counts(samples) if listed else Sums(samples)
        batches = torch.arange(min(samples, 1 << 20)).split(WORKER)
        times.append(time.perf_counter())
        for batch in batches:
            noted.add(batch)
        times.append((time.perf_counter() - times[1]) / len(batches))
        for start in range(1 << 20, samples, BLOCK):  # not in batches: it would take minutes
            noted.add(torch.arange(start, min(samples, start + BLOCK)))
        times.append(time.perf_counter())
        noted.check(True)
        times.append(time.perf_counter() - times[3])

    _, found = measured(epoch)
    return {"check_seconds": times[4], "mb": found["mb"], "us_per_batch": times[2] * 1e6}


def sequences(args: Args, work: Callable[[int, bool], Record], ways: Sequence[str]) -> Any:
    """For each number of samples, both ways: the first needs memory for each sample."""
    found: dict[str, dict[str, Record]] = {}
    for samples in sorted(args.samples):
        found[str(samples)] = {}
        for way, listed in zip(ways, (True, False), strict=True):
            if listed and samples > args.listed:
                continue
            (figures,), _ = alone(work, samples, listed)
            found[str(samples)][way] = figures
            told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(f"{samples:,} samples, {way}: {told}", flush=True)
    return found


def gather(ranks: int, rank: int, total: int, columns: int, everywhere: bool) -> Record:
    """What one rank needs to put the predictions of all in order."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mine = torch.zeros(len(range(rank, total, ranks)), columns)
    ordered_predictions(mine[:1], ranks, everywhere)  # what torch loads in its first call
    found = measured(lambda: ordered_predictions(mine, total, everywhere))[1]
    return {name: found[name] for name in ("seconds", "mb")}


def gatherings(args: Args) -> dict[str, Any]:
    """Predictions of 1,000 classes, on all ranks; scores of 100 classes, on rank 0 and another."""
    total, found = max(args.images), dict[str, Any]()
    ways = {
        "predictions, every rank": (1, 7, True),
        "scores of 100 classes, rank 0": (0, 100, False),
        "scores of 100 classes, other ranks": (1, 100, False),
    }
    for ranks in args.ranks:
        found[str(ranks)] = {}
        for way, (rank, columns, everywhere) in ways.items():
            (figures,), _ = alone(gather, ranks, rank, total, columns, everywhere)
            found[str(ranks)][way] = figures
            print(f"{ranks} ranks, {way}: {figures['seconds']:.2f} s, {figures['mb']:.0f} MB")
    return {"rows": total, "ranks": found}


def main(args: Args) -> None:
    """Measure all parts, and write the result."""
    result: dict[str, Any] = facts("torch", "torchvision") | {"rounds": args.rounds}
    CONTEXT.set_forkserver_preload(["benchmarks.harness", "common.images.folder", "torchvision"])
    with tempfile.TemporaryDirectory() as home:
        result["folder"] = folders(args, Path(home))
    result["order"] = sequences(args, first_batch, ("torch.randperm", "computed"))
    result["once_each"] = sequences(args, once_each, ("counts", "sums"))
    result["gathering"] = gatherings(args)
    save("million", result, args.out)


if __name__ == "__main__":
    program(Args, main, __doc__)
