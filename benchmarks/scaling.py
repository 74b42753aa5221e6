"""Time of a training step against the number of ranks, and what a latency-bandwidth model makes of it for more ranks.

    python -m benchmarks.scaling                                  # 1, 2, 3 and 4 processes; two minutes, quiet, please
    python -m benchmarks.scaling --ranks 1 2 --rounds 1 --image-size 32

A "device" is one thread of the CPU, and every rank has the same share of samples whatever the number of ranks is. With
more ranks than cores they share the cores: a step then takes ranks / cores times as long at best. In every round each
way does one step, one after the other; ratios are medians of the rounds' ratios to `compute`, in which all ranks
compute at the same time and exchange nothing. The time is that of the slowest rank.

* flat, ring: gradients averaged by one message after backward (`examples.manual_allreduce_sgd`);
* ddp: torch's DistributedDataParallel;
* pipeline: as many stages as ranks, 1F1B (`examples.resnet_pipeline`), with all ranks' samples.

All-reduces of several sizes are measured, too. The model (latency_bandwidth.py) is fitted to them, and gives the steps
of 8, 64 and 512 ranks with networks of 100 and 400 Gb/s. Those are calculated, not measured, with three assumptions:
every rank computes as fast as one rank alone here, the network is used to the full, and a message costs the latency of
--latency microseconds (or that which was fitted here, which is this machine's, and that of gloo).
"""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from tyro.conf import OmitArgPrefixes

from benchmarks.latency_bandwidth import Link, Point, data_parallel_seconds, errors, fit, pipeline_seconds
from benchmarks.machine import describe_machine, describe_software
from common.errors import UserError
from common.flags import at_least, begin, leave
from common.launcher import Launch, Place

WAYS = ("compute", "flat", "ring", "ddp", "pipeline")
MORE_RANKS = (8, 64, 512)
NETWORKS = (100, 400)  # Gb/s
STAGES = 4  # of the pipeline with more ranks: a ResNet-18 has few blocks, so the others are replicas
TORCH, RING = "dist.all_reduce", "ring"


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    ranks: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of processes."""
    rounds: int = 5
    """Measurements of each way and of each all-reduce."""
    batch: int = 8
    """Images per rank and step."""
    image_size: int = 64
    """Height and width of the images, in pixels."""
    micro_batches: int = 4
    """Micro-batches of a step of the pipeline."""
    latency: float = 10.0
    """Microseconds per message that are assumed of a fast network."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json) and the chart (.png)."""
    launch: OmitArgPrefixes[Launch] = Launch(nproc=2)

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, batch=self.batch, image_size=self.image_size, micro_batches=self.micro_batches)
        at_least(0, latency=self.latency)
        if min(self.ranks, default=0) != 1 or max(self.ranks) < 2:
            raise UserError("--ranks: give 1, to compare with, and at least one larger number")
        if self.micro_batches > self.batch:
            raise UserError(f"--micro-batches {self.micro_batches}: give at most --batch {self.batch}")


if __name__ == "__main__":  # before the heavy imports
    args, place = begin(Args, __doc__, ("torchvision",))

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from benchmarks.allreduce import alternating, ratios
from benchmarks.charts import step_chart
from common.data import ImageData
from common.distributed import World, launch, say, taking_part
from common.precision import Precision
from examples.manual_allreduce_sgd.allreduce import Circle, ring
from examples.manual_allreduce_sgd.gradients import averaging
from examples.resnet_pipeline.grid import make_grid
from examples.resnet_pipeline.images import draw
from examples.resnet_pipeline.model import build
from examples.resnet_pipeline.options import Cut
from examples.resnet_pipeline.parts import make_parts, make_pipeline, micro_batch_sizes
from examples.resnet_pipeline.timeline import Timeline

KIB = 1 << 10
SIZES = (KIB, 16 * KIB, 256 * KIB, 1 << 20, 4 << 20, 16 << 20, 44 << 20)  # the last: ResNet-18's gradients
Step = Callable[[], object]


def data_parallel(way: str, args: Args, world: World) -> Step:
    """A step of one of the ways with the whole model on every rank."""
    torch.manual_seed(0)
    model = build("resnet18", 10, "group")
    images = torch.randn(args.batch, 3, args.image_size, args.image_size)
    labels = torch.arange(args.batch) % 10
    average = None if way == "compute" else averaging(way, model, world, torch.float32, 4.0, images[:1])
    trained = average.model if average else model
    optimizer = SGD(model.parameters(), 1e-3, 0.9)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(images), labels).backward()
        if average:
            average.average()
        optimizer.step()

    return step


def pipeline(args: Args, world: World) -> tuple[Step, int]:
    """A step of a pipeline with a stage per rank, and the largest bytes of activations of a micro-batch at a cut."""
    samples = args.batch * world.size
    drawn = draw(samples, args.image_size, seed=0)
    data = ImageData("shapes", drawn, drawn, 10, 0.4, 0.3)
    numerics = Precision(precision="fp32", channels_last="no").on(world.device)
    images, labels, _ = data.normalise(drawn.__getitems__(list(range(samples))))
    images = numerics.images(images)
    cut, grid = Cut(arch="resnet18", norm="group", micro_batches=args.micro_batches), make_grid(world, None)
    parts = make_parts(cut, 0, images, data, numerics, world, grid)
    engine = make_pipeline(cut, parts, grid, images.shape, Timeline(world.rank, world.device, range(0)))
    sizes = micro_batch_sizes(samples, args.micro_batches)
    optimizer = SGD([p for stage in parts.stages.values() for p in stage.parameters()], 1e-3, 0.9)

    def step() -> None:
        engine.step(images, labels, sizes, samples)
        optimizer.step()
        optimizer.zero_grad()

    inputs = [parts.plan.input(stage) for stage in range(1, grid.stages)]
    return step, max((sizes[0] * prod(shape) * dtype.itemsize for shape, dtype in inputs), default=0)


def main_worker(local_rank: int, place: Place, job: tuple[Args, str]) -> None:
    """One process: measure, and let the main rank write what was found."""
    args, file = job
    with taking_part(place, local_rank) as world:
        torch.set_num_threads(1)  # a device is one thread
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        steps: dict[str, Step] = {way: data_parallel(way, args, world) for way in WAYS[:-1]}
        steps["pipeline"], activations = pipeline(args, world)
        found: dict[str, Any] = {"steps": alternating(steps, args.rounds), "all_reduce": {}, "activations": activations}
        say(world, f"{world.size} rank(s), step, ms: " + ", ".join(
            f"{name} {1e3 * median(seconds):.0f}" for name, seconds in found["steps"].items()
        ))  # fmt: skip
        circle = Circle.of(world)
        for size in SIZES if world.size > 1 else ():
            tensor = torch.zeros(size // 4)
            ways = {TORCH: lambda t=tensor: dist.all_reduce(t), RING: lambda t=tensor: ring(t, circle)}
            found["all_reduce"][size] = alternating(ways, args.rounds, max(1, min(10, (1 << 20) // size)))
        if world.is_main:
            Path(file).write_text(json.dumps(found))


def points(found: dict[str, Any], way: str) -> list[Point]:
    """The medians of one way's all-reduces."""
    return [
        Point(int(ranks), int(size), median(seconds[way]))
        for ranks, sizes in found.items()
        for size, seconds in sizes.items()
    ]


def extrapolate(
    compute: float, size: int, activations: int, micro_batches: int, latencies: dict[str, float]
) -> list[dict[str, Any]]:
    """Calculated steps for more ranks: a row for each network, latency and number of ranks."""
    rows = []
    for gigabits in NETWORKS:
        for source, alpha in latencies.items():
            link = Link.network(gigabits, alpha)
            for ranks in MORE_RANKS:
                seconds = {
                    "flat": data_parallel_seconds(ranks, size, compute, link, overlap=False),
                    "ddp": data_parallel_seconds(ranks, size, compute, link, overlap=True),
                    "pipeline": pipeline_seconds(ranks, size, compute, link, STAGES, micro_batches, activations),
                }
                rows.append({"gigabits": gigabits, "alpha": alpha, "alpha_from": source, "ranks": ranks,
                             "seconds": seconds})  # fmt: skip
    return rows


def main(args: Args, place: Place) -> int:
    """Measure, fit, calculate, write the results, show them; returns the exit code."""
    if not place.spawns or place.nodes > 1:
        raise SystemExit("error: this benchmark starts its processes itself, on one machine")
    place = replace(place, flags=replace(place.flags, device="cpu"))
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine(),
        "load_before": os.getloadavg()[0],  # of other programs: on a busy machine the figures say little
        "versions": describe_software("torch", "torchvision"), "rounds": args.rounds, "arch": "resnet18",
        "batch_per_rank": args.batch, "image_size": args.image_size, "micro_batches": args.micro_batches,
        "gradient_bytes": sum(4 * p.numel() for p in build("resnet18", 10, "group").parameters()),
        "activation_bytes": 0, "steps": {}, "times_compute": {}, "all_reduce": {},
    }  # fmt: skip
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "found.json")
            code = launch(main_worker, replace(place, local_size=ranks, size=ranks), (args, str(file)))
            if code:
                return code
            found = json.loads(file.read_text())
        result["steps"][str(ranks)] = found["steps"]
        result["times_compute"][str(ranks)] = {
            name: round(1 / ratio, 3) for name, ratio in ratios(found["steps"], "compute").items()
        }
        result["activation_bytes"] = max(result["activation_bytes"], found["activations"])
        if ranks > 1:
            result["all_reduce"][str(ranks)] = found["all_reduce"]
    result["fit"] = {}
    for way in (TORCH, RING):
        measured = points(result["all_reduce"], way)
        link = fit(measured)
        result["fit"][way] = asdict(link) | errors(measured, link)
        gigabytes = f"{1e-9 / link.beta:.2f} GB/s" if link.beta else "no limit"
        print(f"{way}: alpha {1e6 * link.alpha:.0f} us, {gigabytes}, "
              f"median error {result['fit'][way]['median_error']:.0%}")  # fmt: skip
    compute = median(result["steps"]["1"]["compute"])
    latencies = {"assumed": 1e-6 * args.latency, "fitted here": result["fit"][TORCH]["alpha"]}
    result["extrapolation"] = extrapolate(
        compute, result["gradient_bytes"], result["activation_bytes"], args.micro_batches, latencies
    )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "scaling.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    step_chart(result).savefig(path.with_suffix(".png"), dpi=130)
    print("\ncalculated, ms per step:")
    for row in result["extrapolation"]:
        seconds = ", ".join(f"{way} {1e3 * value:.1f}" for way, value in row["seconds"].items())
        print(f"  {row['ranks']:4} ranks, {row['gigabits']} Gb/s, "
              f"{1e6 * row['alpha']:.0f} us ({row['alpha_from']}): {seconds}")  # fmt: skip
    print(f"result: {path}, chart: {path.with_suffix('.png')}", flush=True)
    return 0


if __name__ == "__main__":
    leave(main(args, place))
