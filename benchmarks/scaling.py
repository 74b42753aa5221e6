"""Time of a training step against the number of ranks, and what a model predicts for more ranks.

    python -m benchmarks.scaling             # 1, 2, 3 and 4 processes; two minutes, quiet, please
    python -m benchmarks.scaling --ranks 1 2 --rounds 1 --image-size 32

A "device" is one thread of the CPU, and every rank has the same share of samples whatever the
number of ranks is. With more ranks than cores they share the cores: a step then takes
ranks / cores times as long at best. Ratios are taken to `compute`, in which all ranks compute at
the same time and exchange nothing. The time is that of the slowest rank.

* flat, ring: gradients averaged by one message after backward (`examples.manual_allreduce_sgd`);
* ddp: torch's DistributedDataParallel;
* pipeline: as many stages as ranks, 1F1B (`examples.resnet_pipeline`), with all ranks' samples.

All-reduces of several sizes are measured, too. The model (latency_bandwidth.py) is fitted to them,
and gives the steps of 8, 64 and 512 ranks with networks of 100 and 400 Gb/s. Those are calculated,
not measured, with three assumptions: every rank computes as fast as one rank alone here, the
network is used to the full, and a message costs the latency of --latency microseconds (or that
which was fitted here, which is this machine's, and that of gloo).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import prod
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import latency_bandwidth as theory
from benchmarks.harness import RanksMeasurement, facts, medians, ratios, save
from benchmarks.latency_bandwidth import Link, Point
from benchmarks.pipelines import Pipelines
from benchmarks.ranks import Step, on_ranks, time_steps, training_step
from common.launch.args import start
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.launch.place import Place
from common.train.precision import Precision
from examples.manual_allreduce_sgd.allreduce import ring
from examples.manual_allreduce_sgd.gradients import averaging
from examples.resnet_pipeline.args import PipelineArgs
from examples.resnet_pipeline.model import build

DATA_PARALLEL = ("compute", "flat", "ring", "ddp")
MORE_RANKS = (8, 64, 512)
NETWORKS = (100, 400)  # Gb/s
STAGES = 4  # with more ranks: a ResNet-18 has few blocks, so the others are replicas
TORCH = "dist.all_reduce"
KIB = 1 << 10
GRADIENTS = 44 << 20  # of ResNet-18
SIZES = (KIB, 16 * KIB, 256 * KIB, 1 << 20, 4 << 20, 16 << 20, GRADIENTS)


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    ranks: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of processes."""
    batch: int = 8
    """Images per rank and step."""
    image_size: int = 64
    """Height and width of the images, in pixels."""
    micro_batches: int = 4
    """Micro-batches of a step of the pipeline."""
    latency: float = 10.0
    """Microseconds per message that are assumed of a fast network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, batch=self.batch, image_size=self.image_size, micro_batches=self.micro_batches)
        at_least(0, latency=self.latency)
        if min(self.ranks, default=0) != 1 or max(self.ranks) < 2:
            raise UserError("--ranks: give 1, to compare with, and at least one larger number")
        if self.micro_batches > self.batch:
            raise UserError(f"--micro-batches {self.micro_batches}: give at most --batch")


def measure(args: Args, device: torch.device) -> dict[str, Any]:
    """Seconds of the steps and of all-reduces with as many ranks as there are."""
    torch.set_num_threads(1)  # a device is one thread
    ranks, patience, steps = dist.get_world_size(), args.launch.patience, dict[str, Step]()
    for way in DATA_PARALLEL:
        torch.manual_seed(0)
        model = build("resnet18", 10, "group")
        average = None if way == "compute" else averaging(way, model, timeout=patience)
        images = torch.randn(args.batch, 3, args.image_size, args.image_size)
        steps[way] = training_step(model, images, average)
    precision = Precision("fp32", channels_last="no")
    pipelines = Pipelines(args.batch * ranks, args.image_size, precision, device, patience)
    flags = PipelineArgs(arch="resnet18", norm="group", micro_batches=args.micro_batches)
    made = pipelines.make(flags)
    steps["pipeline"] = made.step
    inputs = [made.local.partition.input(stage) for stage in range(1, ranks)]
    largest = max((prod(shape) * dtype.itemsize for shape, dtype in inputs), default=0)
    timed, all_reduce = time_steps("step", steps, args.rounds), {}
    for size in SIZES if ranks > 1 else ():
        tensor, repeats = torch.zeros(size // 4), max(1, min(10, (1 << 20) // size))
        ways = {TORCH: partial(dist.all_reduce, tensor), "ring": partial(ring, tensor)}
        all_reduce[size] = time_steps(f"{size / 1e6:.3f} MB", ways, args.rounds, repeats)
    activations = made.sizes[0] * largest
    return {"steps": timed, "all_reduce": all_reduce, "activations": activations}


def fitted(found: Mapping[str, Any], way: str) -> dict[str, float]:
    """The model's latency and bandwidth for one way to all-reduce, and its errors."""
    points = [
        Point(int(ranks), int(size), median(samples[way]))
        for ranks, sizes in found.items()
        for size, samples in sizes.items()
    ]
    link = theory.fit(points)
    return asdict(link) | theory.errors(points, link)


def calculated(ranks: int, link: Link, found: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step of each way with more ranks, each of which computes as long as one here."""
    known = (ranks, found["gradient_bytes"], median(found["steps"]["1"]["compute"]), link)
    pipelined = (STAGES, found["micro_batches"], found["activation_bytes"])
    return {
        "flat": theory.data_parallel_seconds(*known, overlap=False),
        "ddp": theory.data_parallel_seconds(*known, overlap=True),
        "pipeline": theory.pipeline_seconds(*known, *pipelined),
    }


def main(place: Place, args: Args) -> None:
    """Measure, fit, calculate, write the results, show them."""
    gradients = sum(4 * p.numel() for p in build("resnet18", 10, "group").parameters())
    result: dict[str, Any] = facts("torch", "torchvision") | {
        "rounds": args.rounds,
        "arch": "resnet18",
        "batch_per_rank": args.batch,
        "image_size": args.image_size,
        "micro_batches": args.micro_batches,
        "gradient_bytes": gradients,
    }
    found = {str(ranks): on_ranks(ranks, place, measure, args) for ranks in args.ranks}
    steps = {ranks: of["steps"] for ranks, of in found.items()}
    all_reduce = {ranks: of["all_reduce"] for ranks, of in found.items() if ranks != "1"}
    result |= {
        "activation_bytes": max(of["activations"] for of in found.values()),
        "steps": steps,
        "times_compute": {n: medians(ratios(of, "compute")) for n, of in steps.items()},
        "all_reduce": all_reduce,
        "fit": {way: fitted(all_reduce, way) for way in (TORCH, "ring")},
        "extrapolation": [],
    }
    latencies = {"assumed": 1e-6 * args.latency, "fitted here": result["fit"][TORCH]["alpha"]}
    for gigabits, (source, alpha), ranks in product(NETWORKS, latencies.items(), MORE_RANKS):
        spent = calculated(ranks, Link.network(gigabits, alpha), result)
        row = {"gigabits": gigabits, "alpha": alpha, "alpha_from": source, "ranks": ranks}
        result["extrapolation"].append(row | {"seconds": spent})
    save("scaling", result, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.scaling:main", ["benchmarks.harness"])
