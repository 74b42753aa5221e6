"""Images per second of `imagenet_ddp`, compared with pytorch/examples: the input, and training.

    python -m benchmarks.imagenet_throughput --data DIR --peer ../pytorch-examples    # everything
    python -m benchmarks.imagenet_throughput --data DIR --part input      # or training, or gpu

DIR/train/CLASS/* holds JPEGs; those of at most 640 x 640 pixels are used, up to 1,000, through
folders of links.

* input: images per second of CPU time of one process on one thread, in batches of 32, after one
  pass over all images that is not counted. Every measurement is a process of its own. The peer's
  transforms end in normalised float32. Ours deliver bytes, which are normalised later per batch on
  the device: `uint8` is without that, `normalised` with it on the CPU. All see the same images in
  the same order. Then per second, by 1, 2, 4 and 8 loader processes on all cores.
* training: ResNet-18, batch 32, 1,000 classes, all cores, no GPU. Both programs log every step; the
  time between the lines of two steps counts, after two steps for the start. They are ended then.
* gpu: the same with ResNet-50 and batch 256 on one GPU, over ten times as many steps, after 20, and
  with a line per 10 steps. The share is that of the bf16 FLOP/s of a large matrix product there.

Memory: the high-water mark of the largest process, and of all processes together; on a GPU what the
driver counts at the end, minus what it counted before the start.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks import harness, imagenet_input
from benchmarks.commands import (
    check_peer,
    device_memory,
    device_memory_at_rest,
    observe,
    peak_memory,
    peer_facts,
)
from benchmarks.harness import ROOT, Measurement, against_peer, compare, earlier, facts
from benchmarks.imagenet_input import choose_images, describe_images, in_new_process, link
from common.launch.cgroup import cores
from common.launch.errors import UserError
from common.launch.flags import at_least

PEER, MAIN = "pytorch/examples imagenet", "imagenet/main.py"
CLASSES = 1000
WORKERS = (1, 2, 4, 8)
RESNET50_FLOP = 3 * 4.09e9 * 2  # per image of 224 px, forward and backward; a multiply-add is two
STEP = re.compile(r"(?:epoch \d+/\d+, step |Epoch: \[\d+\]\[ *)(\d+)/")
Found = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Args(Measurement):
    """The flags of this program."""

    rounds: int = 3
    data: Path
    """Folder of images: train/CLASS/*."""
    peer: Path | None = None
    """Checkout of https://github.com/pytorch/examples; without it only our training is measured."""
    part: Literal["input", "training", "gpu", "all"] = "all"
    """What to measure; the results of the other parts stay in the file."""
    steps: int = 5
    """Training steps that count in each run; ten times as many on a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, steps=self.steps)
        if not (self.data / "train").is_dir():
            raise UserError(f"--data {self.data}: it must hold train/CLASS/*.jpg")
        check_peer(self.peer, MAIN)


def summarise(programs: Mapping[str, tuple[str, Callable[[], Found]]], rounds: int) -> Found:
    """Measure programs: what they are, raw samples, medians, ratios to the peer.

    Args:
        programs: by name, a description and what measures the program once.
        rounds: samples of each.
    """

    def speed(sample: Found) -> float:
        return sample["images_per_second"]

    runs = {name: run for name, (_, run) in programs.items()}
    samples = compare(runs, rounds, show=lambda name, one: f"{name}, {speed(one):.1f} images/s")
    medians = against_peer(samples, PEER, speed)
    what = {name: words for name, (words, _) in programs.items()}
    return {"rounds": rounds, "programs": what, "samples": samples, "medians": medians}


@dataclass(frozen=True)
class Training:
    """Training programs that log their steps.

    Args:
        args: the flags.
        folder: for images, and a copy of the peer's program, if it is given.
        batch: images per step.
        warm: measure from the first line of this step, or a later one, on.
        steps: measure at least this many steps.
    """

    args: Args
    folder: Path
    batch: int
    warm: int
    steps: int

    def measure(self, options: Mapping[str, str]) -> Found:
        """Compare programs, given by their flags; DIR stands for the images."""
        chosen = choose_images(self.args.data / "train")
        count = max(CLASSES, self.batch * (self.warm + self.steps + 20))  # more than the run needs
        paths = [chosen[number % len(chosen)][1] for number in range(count)]
        # As many classes for both programs: the same last layer. Nothing is evaluated.
        link(self.folder / "train", [(f"n{n % CLASSES:04d}", path) for n, path in enumerate(paths)])
        link(self.folder / "val", [("n0000", paths[0])])
        programs = {}
        for name, flags in options.items():
            home, command = ROOT, "python -m examples.imagenet_ddp --out OUT"
            if name == PEER:
                home, command = self.folder / "peer", "python -u main.py"
            if name != PEER or self.args.peer:
                command = f"{command} -b {self.batch} {flags}"
                programs[name] = command, partial(self.run, command, home)
        if self.args.peer:
            (self.folder / "peer").mkdir()  # it writes checkpoints into its working directory
            shutil.copy(self.args.peer / MAIN, self.folder / "peer")
        return summarise(programs, self.args.rounds)

    def run(self, command: str, home: Path) -> Found:
        """Run a program in a folder, and end it when enough steps have been logged."""
        lines: list[tuple[int, float]] = []
        before, after, memory = device_memory_at_rest(), None, (None, None)
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as out,  # still being written
            closing(observe(command, home, {"DIR": str(self.folder), "OUT": out})) as output,
        ):
            for now, line in output:
                match = STEP.match(line)
                if match and int(match[1]) >= self.warm:
                    lines.append((int(match[1]), now))
                    if lines[-1][0] - lines[0][0] >= self.steps:
                        after, memory = device_memory(), peak_memory()
                        break
            else:
                raise SystemExit(f"error: `{command}` ended before {self.warm + self.steps} steps")
        (first, start), (last, end) = lines[0], lines[-1]
        return {
            "images_per_second": self.batch * (last - first) / (end - start),
            "lines": lines,
            "largest_process_mib": memory[0],
            "all_processes_mib": memory[1],
            "device_mib": None if after is None or before is None else after - before,
        }


def input_part(args: Args, folder: Path) -> Found:
    """The peer's input pipeline and ours."""
    chosen = choose_images(args.data / "train")
    train, cache = link(folder / "train", chosen), folder / "cache"
    built = in_new_process(imagenet_input.build_cache, train, cache)
    peers = "torchvision ImageFolder and the transforms of main.py, default_collate"
    linux, macos, cached = "nvimgcodec", "simplejpeg", "ImageFolder with PixelCache"
    variants: dict[str, tuple[str, bool, bool, Path | None, str]] = {
        PEER: (peers, False, False, None, linux),
        "ours, uint8": ("ImageFolder", True, False, None, linux),
        "ours, uint8, as on macOS": ("ImageFolder", True, False, None, macos),
        "ours, normalised": ("ImageFolder, Batches", True, True, None, linux),
        "ours, cache, uint8": (cached, True, False, cache, linux),
        "ours, cache, normalised": (f"{cached}, Batches", True, True, cache, linux),
    }
    measure = partial(in_new_process, imagenet_input.measure_input, train)
    programs = {name: (what, partial(measure, *how)) for name, (what, *how) in variants.items()}
    about = {"cache": built}
    by_workers: dict[str, Found] = {}
    loading = partial(in_new_process, imagenet_input.measure_workers, train)
    for workers in WORKERS:
        ways = {
            name: (what, partial(loading, ours, store, decoder, workers))
            for name, (what, ours, normalised, store, decoder) in variants.items()
            if not normalised
        }
        by_workers[str(workers)] = summarise(ways, args.rounds)
    return about | dict(summarise(programs, args.rounds)) | {"workers": by_workers}


def training_part(args: Args, folder: Path) -> Found:
    """ResNet-18 on the CPU, as it is and with what makes it fast switched off."""
    same = "-a resnet18 -p 1"
    ours = f"{same} --device cpu DIR"
    options = {
        PEER: f"{same} -j {cores()} --no-accel DIR",
        "ours, float32, channels first": f"{ours} --precision fp32 --channels-last no",
    }
    if in_new_process(imagenet_input.probe)["cpu_precision"] == "bf16":  # else that is the default
        options["ours, float32"] = f"{ours} --precision fp32"
        options["ours, channels first"] = f"{ours} --channels-last no"
    options |= {"ours, 1 process": ours, "ours, 2 processes": f"{ours} --nproc 2"}
    return Training(args, folder, batch=32, warm=2, steps=args.steps).measure(options)


def gpu_part(args: Args, folder: Path) -> Found:
    """ResNet-50 on one GPU: real and synthetic images, compiled and not; its share of the peak."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    training = Training(args, folder, batch=256, warm=20, steps=10 * args.steps)
    ours = "-a resnet50 --device cuda"
    made_up = f"--dummy --dummy-images {256 * (training.steps + 40)}"
    options = {
        PEER: f"-a resnet50 -j {cores()} DIR",
        "ours, real images": f"{ours} DIR",
        "ours, real images, compiled": f"{ours} --compile DIR",
        "ours, synthetic images": f"{ours} {made_up}",
        "ours, synthetic images, compiled": f"{ours} --compile {made_up}",
    }
    peak, found = in_new_process(imagenet_input.peak_bf16), training.measure(options)
    for values in found["medians"].values():
        values["peak_share"] = values["images_per_second"] * RESNET50_FLOP / peak
    return {"peak_bf16_flops": peak, **found}


def main(args: Args) -> None:
    """Measure, write the results, show them."""
    choices = in_new_process(imagenet_input.probe)
    if args.part == "gpu" and not choices["cuda"]:
        raise UserError("--part gpu: torch finds no CUDA device here")
    about = facts("torch", "torchvision", "pillow", "numpy") | {"choices": choices}
    about |= peer_facts(args.peer, MAIN, f"training of {PEER}")
    about |= {"images": describe_images(choose_images(args.data / "train"))}
    sections = earlier("imagenet_throughput", args.out)
    parts = {"input": input_part, "training": training_part, "gpu": gpu_part}
    for part in parts if args.part == "all" else (args.part,):
        if part == "gpu" and not choices["cuda"]:
            print("skipped: gpu: torch finds no CUDA device here")
            continue
        with tempfile.TemporaryDirectory() as folder:
            sections[part] = about | dict(parts[part](args, Path(folder)))
    ordered = {part: sections[part] for part in parts if part in sections}
    harness.save("imagenet_throughput", ordered, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
