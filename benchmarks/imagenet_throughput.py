"""Images per second of `imagenet_ddp`, beside pytorch/examples `imagenet/main.py`: the input alone, and training.

    python -m benchmarks.imagenet_throughput --data DIR --peer ../pytorch-examples              # everything
    python -m benchmarks.imagenet_throughput --data DIR --peer ../pytorch-examples --part input
    python -m benchmarks.imagenet_throughput --data DIR --peer ../pytorch-examples --part training
    python -m benchmarks.imagenet_throughput --data DIR --peer ../pytorch-examples --part gpu   # where there is one

DIR/train/CLASS/* holds JPEGs; those of at most 640 x 640 pixels are used, up to 1,000, through folders of links. In
every round each program runs once, one after the other; a ratio is the median of the rounds' ratios to the peer.

* input: images per second of CPU time of one process on one thread, in batches of 32, after one pass over all images
  that is not counted (it fills the file cache, and checks the sums of our pixel cache). Every measurement is a process
  of its own. The peer's transforms end in normalised float32. Ours deliver bytes, which are normalised later per batch
  on the device: `uint8` is without that, `normalised` with it on the CPU. All see the same images in the same order.
* training: ResNet-18, batch 32, 1,000 classes, all cores, no GPU. Both programs log every step; the time between the
  lines of two steps counts, after two steps for the start. They are ended then.
* gpu: the same with ResNet-50 and batch 256 on one GPU, over ten times as many steps, after 20, and with a line per 10
  steps. The share is that of the bf16 FLOP/s that a large matrix product reaches there.

Memory: the high-water mark of the largest process, and of all processes together, in which pages that they share at
the end count once; on a GPU what the driver counts at the end, minus what it counted before the start.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice, zip_longest
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from PIL import Image

from benchmarks.machine import describe_machine, describe_software
from benchmarks.mnist_time_to_accuracy import ROOT, observe
from common.errors import UserError
from common.flags import at_least, fail, parse

PEER = "pytorch/examples imagenet"
DEFAULT = "ours, 1 process"
LARGEST, MOST, CLASSES = 640, 1000, 1000  # pixels, images, classes
BATCH, PASSES = 32, 3  # of the measurement of the input
RESNET50_FLOP = 3 * 4.09e9 * 2  # per image of 224 px: forward and backward, a multiply-add counts as two
GOALS = {"input": {"ours, uint8": 2.0, "ours, cache, uint8": 4.0}, "training": {DEFAULT: 4.0}, "gpu": {}}
Sections = Literal["input", "training", "gpu"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    data: Path
    """Folder of images: train/CLASS/*."""
    peer: Path | None = None
    """Checkout of https://github.com/pytorch/examples; without it only our training is measured."""
    part: Literal["input", "training", "gpu", "all"] = "all"
    """What to measure; the results of the other parts stay in the file."""
    rounds: int = 3
    """Runs of each program."""
    steps: int = 5
    """Training steps that count in each run; ten times as many on a GPU."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json) and the chart (.png)."""

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, steps=self.steps)
        if not (self.data / "train").is_dir():
            raise UserError(f"--data {self.data}: it must hold train/CLASS/*.jpg")
        if self.peer and not (self.peer / "imagenet/main.py").is_file():
            raise UserError(f"--peer {self.peer}: no checkout of pytorch/examples, imagenet/main.py is missing")


@dataclass(frozen=True)
class InputSample:
    """One measurement of an input pipeline, by one process on one thread."""

    images_per_second: float
    """Per second of CPU time, which is per second and core."""
    images: int
    cpu_seconds: float
    wall_seconds: float


@dataclass(frozen=True)
class TrainingSample:
    """One run of a training program."""

    images_per_second: float
    lines: list[tuple[int, float]]
    """Step and seconds since the start of the process, of the lines between which was measured."""
    largest_process_mib: float | None
    """Peak memory; None where there is no /proc."""
    all_processes_mib: float | None
    device_mib: float | None
    """Memory of the GPU."""


Sample = InputSample | TrainingSample


@dataclass(frozen=True)
class Program:
    """One bar of the chart."""

    name: str
    what: str
    """The command with placeholders for paths, or the classes that are measured."""
    measure: Callable[[], Sample]


# ------------------------------------------------------------------------------------------------- in a new process


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of this module in a process that shares nothing with this one, or with earlier ones."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def probe() -> dict[str, Any]:
    """What our program would choose here."""
    import torch

    from common.images import DECODER
    from common.precision import Precision

    cpu = Precision().on(torch.device("cpu")).name
    return {"cpu_precision": cpu, "cuda": torch.cuda.is_available(), "decoder": DECODER}


def build_cache(train: Path, cache: Path) -> dict[str, float]:
    """Decode all images with all cores, as `--cache` does."""
    import torch

    from common.images import ImageFolder
    from common.pixel_cache import pixel_cache

    dataset = ImageFolder(train, 224, training=True)
    wall, cpu = time.perf_counter(), time.process_time()
    pixel_cache(cache, dataset.root, dataset.names, dataset.pixels, threads=torch.get_num_threads())
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    size = sum(path.stat().st_size for path in cache.rglob("*.pixels"))
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "mib": size / 2**20,
        "times_the_files": size / sum(path.stat().st_size for path in map(dataset.file, range(len(dataset)))),
    }


def measure_input(train: Path, ours: bool, normalised: bool, cache: Path | None) -> InputSample:
    """Load all images `PASSES` times.

    Args:
        train: the folder of classes.
        ours: our dataset; otherwise the peer's.
        normalised: with our normalisation per batch, as training on the CPU does it; the peer's is in its transforms.
        cache: read from our pixel cache there, which must be complete.
    """
    import torch
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    from common.data import MEAN, STD, Batches
    from common.images import ImageFolder
    from common.pixel_cache import pixel_cache
    from common.precision import Precision

    torch.set_num_threads(1)
    dataset: Any
    if ours:
        dataset = ImageFolder(train, 224, training=True)
        if cache:
            pixels, decoded = pixel_cache(cache, dataset.root, dataset.names, dataset.pixels, threads=1)
            assert decoded == 0
            dataset = ImageFolder(train, 224, training=True, cache=pixels)
    else:  # as in imagenet/main.py
        steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        dataset = datasets.ImageFolder(str(train), transforms.Compose([*steps, transforms.Normalize(MEAN, STD)]))
    numerics = Precision(channels_last="yes").on(torch.device("cpu"))

    seen, cpu, wall = 0, 0.0, 0.0
    for number in range(PASSES + 1):  # the first is not counted
        generator = torch.Generator().manual_seed(number)
        order = [part.tolist() for part in torch.randperm(len(dataset), generator=generator).split(BATCH)]
        keys: Any = [[(number, index) for index in part] for part in order] if ours else order
        loader = DataLoader(dataset, batch_sampler=keys, collate_fn=_as_it_is if ours else None)
        batches: Any = Batches(loader, numerics) if normalised else loader
        started = time.process_time(), time.perf_counter()
        loaded = 0
        for batch in batches:
            images = batch.images if ours and not normalised else batch[0]
            assert images.shape[1:] == (3, 224, 224), images.shape
            assert images.dtype is (torch.uint8 if ours and not normalised else torch.float32), images.dtype
            loaded += len(images)
        assert loaded == len(dataset)
        if number:
            cpu, wall = cpu + time.process_time() - started[0], wall + time.perf_counter() - started[1]
            seen += loaded
    return InputSample(seen / cpu, seen, cpu, wall)


def _as_it_is(batch: Any) -> Any:
    return batch


def peak_bf16() -> float:
    """FLOP/s of the best of five runs of 20 products of 8192 x 8192 matrices in bf16."""
    import torch

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


# -------------------------------------------------------------------------------------------------------- the images


def choose_images(train: Path) -> list[tuple[str, Path]]:
    """Up to `MOST` images that are not large, as (class, file), taken from all classes in turn.

    Raises:
        UserError: there are fewer than one batch.
    """

    def suitable() -> Iterator[tuple[str, Path]]:
        folders = [sorted(folder.iterdir()) for folder in sorted(train.iterdir()) if folder.is_dir()]
        for path in chain.from_iterable(zip_longest(*folders)):
            if path and path.suffix.lower() in (".jpg", ".jpeg") and not path.name.startswith("._"):
                with Image.open(path) as image:
                    if max(image.size) <= LARGEST:
                        yield path.parent.name, path.resolve()

    chosen = list(islice(suitable(), MOST))
    if len(chosen) < BATCH:
        raise UserError(f"--data: {train} has {len(chosen)} JPEGs of at most {LARGEST} pixels; give at least {BATCH}")
    return chosen


def describe_images(chosen: Sequence[tuple[str, Path]]) -> dict[str, Any]:
    """How many images, and of what size."""
    sizes = []
    for _, path in chosen:
        with Image.open(path) as image:
            sizes.append(image.size)
    return {
        "count": len(chosen),
        "median_width": median(width for width, _ in sizes),
        "median_height": median(height for _, height in sizes),
        "mean_kib": round(sum(path.stat().st_size for _, path in chosen) / len(chosen) / 1024, 1),
    }


def link_classes(folder: Path, chosen: Sequence[tuple[str, Path]]) -> Path:
    """A folder of links, in the classes that the images have."""
    for number, (name, path) in enumerate(chosen):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{number:06d}.jpg").symlink_to(path)
    return folder


def link_training_set(folder: Path, chosen: Sequence[tuple[str, Path]], count: int) -> Path:
    """`count` links to the images, again and again, in `CLASSES` classes: both programs have the same last layer."""
    for number in range(count):
        directory = folder / f"train/n{number % CLASSES:04d}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:06d}.jpg").symlink_to(chosen[number % len(chosen)][1])
    (folder / "val/n0000").mkdir(parents=True)
    (folder / "val/n0000/000000.jpg").symlink_to(chosen[0][1])  # never evaluated: runs are ended before
    return folder


# ---------------------------------------------------------------------------------------------------------- training


def train_program(name: str, command: str, cwd: Path, places: Mapping[str, str], warm: int, steps: int) -> Program:
    """A program that logs its steps.

    Args:
        name: in the chart.
        command: with placeholders, and `-b`.
        cwd: its working directory.
        places: what the placeholders stand for.
        warm: measure from the first line of this step, or a later one, on.
        steps: measure at least this many steps.
    """
    batch = int(command.partition(" -b ")[2].split()[0])

    def measure() -> TrainingSample:
        lines: list[tuple[int, float]] = []
        before = device_memory()
        used: tuple[float | None, float | None, float | None] = None, None, None
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as out,  # a process may still be writing
            closing(observe(command, cwd, {**places, "OUT": out})) as output,
        ):
            for now, line in output:
                match = re.match(r"(?:epoch \d+/\d+, step |Epoch: \[\d+\]\[ *)(\d+)/", line)
                if match and int(match[1]) >= warm:
                    lines.append((int(match[1]), now))
                    if lines[-1][0] - lines[0][0] >= steps:
                        after = device_memory()
                        used = *memory(), after - before if after is not None and before is not None else None
                        break
        if len(lines) < 2:
            raise SystemExit(f"error: `{command}` ended before {warm + steps} steps")
        (first, start), (last, end) = lines[0], lines[-1]
        return TrainingSample(batch * (last - first) / (end - start), lines, *used)

    return Program(name, command, measure)


def cpu_programs(args: Args, folder: Path, peer: Path | None, bf16: bool) -> list[Program]:
    """The peer and ours, as it is and with what makes it fast switched off, on the CPU."""
    cores = describe_machine()["cores"]
    images = link_training_set(folder, choose_images(args.data / "train"), max(CLASSES, 32 * (args.steps + 10)))
    places = {"python": sys.executable, "DIR": str(images)}
    ours = "python -m examples.imagenet_ddp.train -a resnet18 -b 32 -p 1 --device cpu --out OUT"
    variants = {"ours, float32, channels first": " --precision fp32 --channels-last no"}
    if bf16:  # otherwise float32 and channels last is what it does by default
        variants |= {"ours, float32": " --precision fp32", "ours, channels first": " --channels-last no"}
    variants |= {DEFAULT: "", "ours, 2 processes": " --nproc 2"}
    options: dict[str, Any] = {"places": places, "warm": 2, "steps": args.steps}
    programs = [train_program(name, f"{ours}{flags} DIR", ROOT, **options) for name, flags in variants.items()]
    if peer:
        command = f"python -u main.py -a resnet18 -b 32 -p 1 -j {cores} --no-accel DIR"
        programs.insert(0, train_program(PEER, command, peer, **options))
    return programs


def gpu_programs(args: Args, folder: Path, peer: Path | None) -> list[Program]:
    """ResNet-50 on one GPU: the peer, and ours with made-up and with real images, compiled and not."""
    cores, steps, batch = describe_machine()["cores"], 10 * args.steps, 256
    count = batch * (steps + 40)  # one epoch is longer than the run
    images = link_training_set(folder, choose_images(args.data / "train"), count)
    places = {"python": sys.executable, "DIR": str(images)}
    ours = f"python -m examples.imagenet_ddp.train -a resnet50 -b {batch} --device cuda --out OUT"
    variants = {
        "ours, real images": " DIR",
        "ours, real images, compiled": " --compile DIR",
        "ours, synthetic images": f" --dummy --dummy-images {count}",
        "ours, synthetic images, compiled": f" --compile --dummy --dummy-images {count}",
    }
    options: dict[str, Any] = {"places": places, "warm": 20, "steps": steps}
    programs = [train_program(name, ours + flags, ROOT, **options) for name, flags in variants.items()]
    if peer:
        command = f"python -u main.py -a resnet50 -b {batch} -j {cores} DIR"
        programs.insert(0, train_program(PEER, command, peer, **options))
    return programs


def memory() -> tuple[float | None, float | None]:
    """High-water marks of the processes of the program that runs: of the largest one, and of all, in MiB."""
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], sessions[int(folder.name)] = int(fields[1]), int(fields[3])
    peaks, unshared = [], []
    for process in parents:
        ancestor = process
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid() and sessions[process] != os.getsid(0):  # `observe` gives it a session of its own
            with suppress(OSError, KeyError):
                text = Path(f"/proc/{process}/status").read_text() + Path(f"/proc/{process}/smaps_rollup").read_text()
                kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
                peaks.append(kib["VmHWM"] / 1024)
                unshared.append((kib["VmHWM"] - kib["Rss"] + kib["Pss"]) / 1024)
    # Pages that are shared with other programs make the sum too small.
    return (max(peaks), max(*peaks, sum(unshared))) if peaks else (None, None)


def device_memory() -> float | None:
    """Memory in use on the GPU that the programs see, in MiB; None without a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0"), "--query-gpu=memory.used"]
    shown = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False)
    return float(shown.stdout) if re.fullmatch(r"\d+\s*", shown.stdout) else None


# ----------------------------------------------------------------------------------------------------------- results


def measure_all(programs: list[Program], rounds: int) -> dict[str, list[Sample]]:
    """Run all programs in turn, so that a change of the machine's load meets all of them."""
    samples: dict[str, list[Sample]] = {program.name: [] for program in programs}
    for number in range(1, rounds + 1):
        for program in programs:
            samples[program.name].append(program.measure())
            speed = samples[program.name][-1].images_per_second
            print(f"round {number}/{rounds}: {program.name}, {speed:.1f} images/s", flush=True)
    return samples


def summarise(programs: list[Program], rounds: int, part: Sections) -> dict[str, Any]:
    """Measure the programs of a part: commands, raw samples, medians and ratios to the peer."""
    samples = measure_all(programs, rounds)
    medians: dict[str, dict[str, Any]] = {}
    for name, mine in samples.items():
        columns = {key: [asdict(run)[key] for run in mine] for key in asdict(mine[0]) if key != "lines"}
        medians[name] = {key: None if None in values else median(values) for key, values in columns.items()}
        if name != PEER and PEER in samples:
            pairs = zip(mine, samples[PEER], strict=True)
            ratios = [round(one.images_per_second / other.images_per_second, 3) for one, other in pairs]
            medians[name] |= {"peer_ratio_per_round": ratios, "peer_ratio": median(ratios)}
            if goal := GOALS[part].get(name):
                medians[name]["goal"] = goal
    return {
        "rounds": rounds,
        "programs": {program.name: program.what for program in programs},
        "samples": {name: [asdict(run) for run in runs] for name, runs in samples.items()},
        "medians": medians,
    }


def input_part(args: Args, temporary: Path) -> dict[str, Any]:
    """The peer's input pipeline and ours."""
    chosen = choose_images(args.data / "train")
    train, cache = link_classes(temporary / "input", chosen), temporary / "cache"
    built = in_new_process(build_cache, train, cache)
    variants: dict[str, tuple[str, tuple[bool, bool, Path | None]]] = {
        PEER: ("torchvision ImageFolder and the transforms of main.py, default_collate", (False, False, None)),
        "ours, uint8": ("ImageFolder", (True, False, None)),
        "ours, normalised": ("ImageFolder, Batches", (True, True, None)),
        "ours, cache, uint8": ("ImageFolder with PixelCache", (True, False, cache)),
        "ours, cache, normalised": ("ImageFolder with PixelCache, Batches", (True, True, cache)),
    }
    programs = [
        Program(name, what, partial(in_new_process, measure_input, train, *arguments))
        for name, (what, arguments) in variants.items()
    ]
    return {"images": describe_images(chosen), "cache": built, **summarise(programs, args.rounds, "input")}


def training_part(args: Args, temporary: Path, peer: Path | None, bf16: bool) -> dict[str, Any]:
    """ResNet-18 on the CPU."""
    return summarise(cpu_programs(args, temporary / "training", peer, bf16), args.rounds, "training")


def gpu_part(args: Args, temporary: Path, peer: Path | None) -> dict[str, Any]:
    """ResNet-50 on one GPU, with its share of the peak."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    peak = in_new_process(peak_bf16)
    found = summarise(gpu_programs(args, temporary / "gpu", peer), args.rounds, "gpu")
    for values in found["medians"].values():
        values["peak_share"] = values["images_per_second"] * RESNET50_FLOP / peak
    return {"peak_bf16_flops": peak, **found}


def print_table(part: str, found: Mapping[str, Any]) -> None:
    """The medians of a part."""
    columns = {
        "images_per_second": ("images/s", 1, ".1f"),
        "peer_ratio": ("ours/peer", 1, ".2f"),
        "goal": ("goal", 1, ".1f"),
        "wall_seconds": ("wall s", 1, ".2f"),
        "largest_process_mib": ("largest GiB", 1024, ".2f"),
        "all_processes_mib": ("all GiB", 1024, ".2f"),
        "device_mib": ("device GiB", 1024, ".1f"),
        "peak_share": ("% of peak", 0.01, ".1f"),
    }
    shown = {
        key: column
        for key, column in columns.items()
        if any(values.get(key) is not None for values in found["medians"].values())
    }
    print(f"\n{part:34}" + "".join(f"{head:>13}" for head, _, _ in shown.values()))
    for name, values in found["medians"].items():
        cells = [
            format(values[key] / unit, style) if values.get(key) is not None else "-"
            for key, (_, unit, style) in shown.items()
        ]
        print(f"{name:34}" + "".join(f"{cell:>13}" for cell in cells))
    if "cache" in found:
        print(
            f"cache of {found['images']['count']} images: built in {found['cache']['seconds']:.1f} s "
            f"({found['cache']['cpu_seconds']:.1f} s of CPU time), {found['cache']['mib']:.0f} MiB, "
            f"{found['cache']['times_the_files']:.1f} times the files"
        )
    if "peak_bf16_flops" in found:
        print(f"peak: {found['peak_bf16_flops'] / 1e12:.0f} TFLOP/s in bf16")


def draw(path: Path, sections: Mapping[str, Mapping[str, Any]]) -> None:
    """A panel per part, a bar per program."""
    import matplotlib  # a second

    matplotlib.use("agg")
    from matplotlib import pyplot

    titles = {
        "input": "Input: images per second and core",
        "training": "Training, ResNet-18, batch 32, CPU: images per second",
        "gpu": "Training, ResNet-50, batch 256, GPU: images per second",
    }
    heights = [1 + len(found["medians"]) for found in sections.values()]
    figure, axes = pyplot.subplots(
        len(sections), figsize=(10, 0.55 * sum(heights)), squeeze=False, height_ratios=heights
    )
    for axis, (part, found) in zip(axes[:, 0], sections.items(), strict=True):
        names, values = list(found["medians"]), list(found["medians"].values())
        speeds = [value["images_per_second"] for value in values]
        axis.barh(names, speeds, height=0.6, color=["#999999" if name == PEER else "#0072b2" for name in names])
        for position, value in enumerate(values):
            ratio = f" ({value['peer_ratio']:.2f} times the peer)" if "peer_ratio" in value else ""
            share = f", {value['peak_share']:.0%} of the bf16 peak" if "peak_share" in value else ""
            note = f"{value['images_per_second']:,.4g}{ratio}{share}"
            axis.annotate(note, (value["images_per_second"], position), (5, 0), textcoords="offset points", va="center")
        axis.invert_yaxis()  # the first program on top
        axis.set_xlim(0, max(speeds) * 1.7)
        machine = found["machine"]
        device = ", ".join(machine["gpus"]) if part == "gpu" else f"{machine['cpu']}, {machine['cores']} cores"
        axis.set_title(f"{titles[part]}\n{device}, median of {found['rounds']} round(s)", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(args: Args) -> None:
    """Measure, write the results, show them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by default `observe` could not end its program
    args.out.mkdir(parents=True, exist_ok=True)
    choices = in_new_process(probe)
    if args.part == "gpu" and not choices["cuda"]:
        raise UserError("--part gpu: torch finds no CUDA device here")
    wanted = ["input", "training", "gpu"] if args.part == "all" else [args.part]
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_software("torch", "torchvision", "pillow", "numpy"),
        "choices": choices,
        "peer_sha256": hashlib.sha256((args.peer / "imagenet/main.py").read_bytes()).hexdigest() if args.peer else None,
    }
    skipped = [] if args.peer or args.part == "input" else [f"training of {PEER}: --peer was not given"]
    if "gpu" in wanted and not choices["cuda"]:
        wanted.remove("gpu")
        skipped.append("gpu: torch finds no CUDA device here")
    if "training" in wanted and choices["cpu_precision"] == "fp32":
        skipped.append("training in bf16: this CPU does not compute it natively")

    file = args.out / "imagenet_throughput.json"
    sections: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        peer = folder / "peer" if args.peer else None  # it writes checkpoints into its working directory
        if args.peer and peer:
            peer.mkdir()
            shutil.copy(args.peer / "imagenet/main.py", peer)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "input": lambda: input_part(args, folder),
            "training": lambda: training_part(args, folder, peer, choices["cpu_precision"] == "bf16"),
            "gpu": lambda: gpu_part(args, folder, peer),
        }
        for part in wanted:
            sections[part] = about | parts[part]()
            sections = {name: sections[name] for name in parts if name in sections}  # in this order
            file.write_text(json.dumps(sections, indent=2) + "\n")
    draw(file.with_suffix(".png"), sections)
    for part in wanted:
        print_table(part, sections[part])
    for line in skipped:
        print(f"skipped: {line}")
    print(f"result: {file}, chart: {file.with_suffix('.png')}")


if __name__ == "__main__":
    try:
        main(parse(Args, description=__doc__))
    except UserError as mistake:
        fail(mistake)
