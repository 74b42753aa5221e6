"""What a pipeline of two processes with one core each gains over one process with one core, and where the rest goes.

    python -m benchmarks.pipeline                       # 2 processes: speed, all schedules, 17 minutes
    python -m benchmarks.pipeline --nproc 4 --memory    # 4 processes: activations kept by each stage, a minute

In every round each configuration does one step after the other, so that a change of the machine's load meets all of
them: the pipelines, then the un-split model on one core while the other core idles (the whole batch at once, in
micro-batches, and in the other memory layout; the fastest is the baseline). Ratios are taken within a round. Each
process is bound to a core of its own. A step is forward, backward and optimizer.

The seconds of a step by our engine are split into

* ideal: those of the baseline, divided by the stages;
* small micro-batches: what the un-split model loses when it computes in micro-batches of this size;
* shared machine: what the stages lose to each other (memory, cache, clock) when both cores are at work;
* bubble: (P-1)/M of the work, for equal stages (interleaved: half of it);
* imbalance: what the schedule adds to that because stages are unequal, simulated with the measured times;
* communication and rest: what was measured beyond the simulation, with the optimizer.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from common.flags import at_least, begin
from common.launcher import Launch, Place
from examples.resnet_pipeline.options import Cut


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    arch: Annotated[Literal["resnet18", "resnet50"], arg(aliases=["-a"])] = "resnet50"
    """Model."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 32
    """Samples in a batch."""
    image_size: int = 224
    """Height and width of the images, in pixels."""
    micro_batches: tuple[int, ...] = (2, 4, 8, 16)
    """Numbers of micro-batches to compare."""
    channels_last: Literal["yes", "no"] = "yes"
    """Memory layout; in NHWC small micro-batches lose less."""
    rounds: int = 5
    """Steps of each configuration; the median of the rounds' ratios counts."""
    memory: bool = False
    """Measure the activations that each stage keeps, and not the speed."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json) and the charts (.png)."""
    launch: OmitArgPrefixes[Launch] = Launch(nproc=2)

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size, rounds=self.rounds, image_size=self.image_size)
        at_least(1, micro_batches=min(self.micro_batches))


if __name__ == "__main__":
    args, place = begin(Args, __doc__)

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

from benchmarks.machine import describe_machine, describe_software
from common.data import ImageData
from common.distributed import World, gather, launch, say, taking_part
from common.precision import Numerics, Precision
from examples.resnet_pipeline.grid import Grid, make_grid
from examples.resnet_pipeline.images import draw
from examples.resnet_pipeline.model import build
from examples.resnet_pipeline.parts import Parts, make_parts, make_pipeline, micro_batch_sizes
from examples.resnet_pipeline.plan import describe, simulate
from examples.resnet_pipeline.schedule import SCHEDULES
from examples.resnet_pipeline.timeline import Event, Timeline, bubble, merged
from examples.resnet_pipeline.timeline import draw as draw_timelines

PARTS = {
    "ideal": "#999999",
    "small micro-batches": "#56b4e9",
    "shared machine": "#cc79a7",
    "bubble": "#e69f00",
    "imbalance": "#f0e442",
    "communication and rest": "#d55e00",
}


class Kept:
    """Counts the bytes that autograd keeps for the backward pass, while they are kept, without parameters."""

    def __init__(self, parameters: Iterator[Tensor]) -> None:
        self.ignored = {parameter.data_ptr() for parameter in parameters}
        self.holders: dict[int, int] = {}
        self.now = self.most = 0

    def hold(self, tensor: Tensor) -> "Held":
        """A tensor is saved."""
        return Held(self, tensor)


class Held:
    """A tensor that autograd keeps; several may share one storage, which counts once."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.kept, self.tensor, self.storage = kept, tensor, tensor.untyped_storage()
        self.key = self.storage.data_ptr()
        if self.key in kept.ignored:
            return
        kept.holders[self.key] = kept.holders.get(self.key, 0) + 1
        if kept.holders[self.key] == 1:
            kept.now += self.storage.nbytes()
            kept.most = max(kept.most, kept.now)

    def __del__(self) -> None:
        if self.key in self.kept.ignored:
            return
        self.kept.holders[self.key] -= 1
        if self.kept.holders[self.key] == 0:
            self.kept.now -= self.storage.nbytes()


@contextmanager
def counting(parts: Parts) -> Generator[Kept]:
    """Count what autograd keeps in the body."""
    kept = Kept(p for stage in parts.stages.values() for p in stage.parameters())
    with torch.autograd.graph.saved_tensors_hooks(kept.hold, lambda held: held.tensor):
        yield kept


@dataclass(frozen=True)
class Setting:
    """What all configurations share."""

    args: Args
    world: World
    grid: Grid
    numerics: Numerics
    images: Tensor
    labels: Tensor
    data: ImageData


class Pipelines:
    """Makes configurations; those with the same stages in this process share them, to save memory."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.parts: dict[tuple[Any, ...], tuple[Parts, SGD]] = {}

    def make(self, cut: Cut) -> tuple[Parts, Callable[[], None], Timeline]:
        """Stages, a step, and the record of what its stages compute."""
        setting = self.setting
        placement = cut.schedule if cut.schedule in ("interleaved", "zero-bubble", "zbv") else "one stage per process"
        key = (placement, cut.recompute)
        if key not in self.parts:
            made = make_parts(cut, 0, setting.images, setting.data, setting.numerics, setting.world, setting.grid)
            parameters = [p for stage in made.stages.values() for p in stage.parameters()]
            self.parts[key] = made, SGD(parameters, 0.01, 0.9)
        parts, sgd = self.parts[key]
        timeline = Timeline(setting.world.rank, setting.world.device, range(1, 1000))
        engine = make_pipeline(cut, parts, setting.grid, setting.images.shape, timeline)
        sizes = micro_batch_sizes(len(setting.labels), cut.micro_batches)

        def step() -> None:
            timeline.begin()
            engine.step(setting.images, setting.labels, sizes, len(setting.labels))
            sgd.step()
            sgd.zero_grad()

        return parts, step, timeline


def alone(setting: Setting, layout: torch.memory_format) -> Callable[[int], None]:
    """The un-split model on the main rank, a step in so many micro-batches; the others wait at the next barrier."""
    if not setting.world.is_main:
        return lambda count: None
    model = build(setting.args.arch, 10, "batch").to(memory_format=layout)
    images = setting.images.contiguous(memory_format=layout)
    sgd = SGD(model.parameters(), 0.01, 0.9)

    def step(count: int) -> None:
        sizes = micro_batch_sizes(len(setting.labels), count)
        for x, y in zip(images.split(sizes), setting.labels.split(sizes), strict=True):
            with setting.numerics.autocast():
                scores = model(x).float()
            (F.cross_entropy(scores, y, reduction="sum") / len(setting.labels)).backward()
        sgd.step()
        sgd.zero_grad()

    return step


def timed(step: Callable[[], None]) -> float:
    """Seconds from a barrier until all processes are done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def losses(
    events: list[Event], schedule: str, count: int, processes: int, step: float, whole: float, cut: float
) -> dict[str, float]:
    """Where the seconds of a step went.

    Args:
        events: of the step, of all stages.
        schedule: gpipe, 1f1b or interleaved.
        count: micro-batches.
        processes: each has one stage, or two.
        step: measured seconds of the pipeline.
        whole: of the un-split model, the batch at once.
        cut: of the un-split model in as many micro-batches.
    """
    stages = len({event.stage for event in events})
    spent = {
        kind: [sum(e.end - e.start for e in events if e.kind == kind and e.stage == s) / count for s in range(stages)]
        for kind in ("F", "B")
    }
    busy = count * (sum(spent["F"]) + sum(spent["B"])) / processes
    simulated = simulate(schedule, spent["F"], spent["B"], count, processes)
    filling = busy * (processes - 1) / count * processes / stages
    return {
        "ideal": whole / processes,
        "small micro-batches": (cut - whole) / processes,
        "shared machine": busy - cut / processes,
        "bubble": filling,
        "imbalance": simulated - busy - filling,
        "communication and rest": step - simulated,
    }


def speed(setting: Setting) -> dict[str, Any]:
    """Measure all configurations in turn."""
    args, stages = setting.args, setting.grid.stages
    base = Cut(arch=args.arch)
    configurations: dict[str, Cut] = {}
    for count in args.micro_batches:
        for engine in ("hand", "torch"):
            schedules = ["gpipe", "1f1b"] + ["interleaved"] * (count >= 4)
            schedules += ["zero-bubble", "zbv"] * (engine == "torch" and count == 8)
            for schedule in schedules:
                if engine == "hand" or (count >= stages and len(setting.labels) % count == 0):
                    name = f"{engine} {schedule} {count}"
                    configurations[name] = replace(base, engine=engine, schedule=schedule, micro_batches=count)
    steps: dict[str, Callable[[], None]] = {}
    timelines: dict[str, Timeline] = {}
    layouts = {"yes": torch.channels_last, "no": torch.contiguous_format}
    pipelines, single = Pipelines(setting), alone(setting, layouts.pop(args.channels_last))
    other = alone(setting, next(iter(layouts.values())))
    probe = replace(base, micro_batches=4)  # the balanced cut hardly depends on the micro-batch
    plan = pipelines.make(probe)[0].plan
    for line in describe(plan, probe.schedule, stages, 4, len(setting.labels) // 4):
        say(setting.world, line)
    for name, cut in configurations.items():
        _, steps[name], timelines[name] = pipelines.make(cut)
    for count in args.micro_batches:
        steps[f"alone {count}"] = partial(single, count)
    steps["alone, other layout 1"] = partial(other, 1)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds + 1):
        for name, step in steps.items():
            value = timed(step)
            if number:  # the first connects and allocates
                seconds[name].append(value)
        say(setting.world, f"round {number}/{args.rounds}" + (" (does not count)" if number == 0 else ""))
    events = {name: merged(held) for name, t in timelines.items() if (held := gather(setting.world, t.steps))}
    if not events:
        return {}
    found: dict[str, Any] = {}
    best_alone = min((name for name in seconds if name.startswith("alone")), key=lambda name: median(seconds[name]))
    for name, values in seconds.items():
        ratios = [one / value for one, value in zip(seconds[best_alone], values, strict=True)]
        found[name] = {"seconds": values, "median_seconds": median(values), "speedup_per_round": ratios}
        found[name]["speedup"] = median(ratios)
        if name in configurations:
            cut = configurations[name]
            found[name] |= {"bubble": median(map(bubble, events[name]))}
            if cut.engine == "hand":
                rounds = [
                    losses(events[name][i], cut.schedule, cut.micro_batches, stages, values[i], seconds[best_alone][i],
                           seconds[f"alone {cut.micro_batches}"][i])
                    for i in range(args.rounds)
                ]  # fmt: skip
                found[name]["losses"] = {part: median(r[part] for r in rounds) for part in PARTS}
    best = {e: max((n for n in configurations if n.startswith(e)), key=lambda n: found[n]["speedup"])
            for e in ("hand", "torch")}  # fmt: skip
    middle = {n: sorted(events[n], key=bubble)[args.rounds // 2] for n in (best["hand"], best["torch"])}
    count = configurations[best["hand"]].micro_batches
    middle |= {
        n: sorted(events[n], key=bubble)[args.rounds // 2] for n in (f"hand gpipe {count}", f"hand 1f1b {count}")
    }
    charts = {}
    for name, part in sorted(middle.items()):
        count = configurations[name].micro_batches
        schedule = configurations[name].schedule
        each, factor = (2, "2") if schedule == "interleaved" else (1, "")
        ideal = (stages - 1) / (each * count + stages - 1)
        known = f", (P-1)/({factor}M+P-1) = {ideal:.0%}" if schedule in SCHEDULES else ""
        charts[f"{name}: idle {bubble(part):.0%}{known}"] = part
    draw_timelines(args.out / "pipeline_timeline.png", charts)
    return {
        "baseline": best_alone,
        "cut": [plan.parts[start].first for start in plan.starts],
        "best": best,
        "configurations": found,
    }


def memory(setting: Setting) -> dict[str, Any]:
    """Bytes of activations that each stage keeps at most, counted while a step runs.

    With --recompute those that are computed again for one micro-batch, and dropped at once, are not counted.
    """
    found = {}
    base = Cut(arch=setting.args.arch, micro_batches=8)
    cuts: tuple[str, ...] = ()
    for name, cut in {
        "GPipe": replace(base, schedule="gpipe"),
        "1F1B": base,
        "GPipe, recompute": replace(base, schedule="gpipe", recompute=True),
        "1F1B, recompute": replace(base, recompute=True),
    }.items():
        parts, step, _ = Pipelines(setting).make(replace(cut, cuts=cuts))
        cuts = tuple(parts.plan.parts[start].first for start in parts.plan.starts[1:])
        with counting(parts) as kept:
            step()
        held = gather(setting.world, kept.most)
        found[name] = held
        say(setting.world, f"{name}: " + ", ".join(f"{value / 2**20:.0f} MiB" for value in held))
    return {"stages": ["stem", *cuts], "bytes": found}


def draw_speed(path: Path, result: dict[str, Any], args: Args, title: str) -> None:
    """Speed-up by number of micro-batches, and where the seconds go."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = result["configurations"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2))
    for kind in sorted({name.rsplit(" ", 1)[0] for name in found}):
        points = [
            (count, found[f"{kind} {count}"]["speedup"]) for count in args.micro_batches if f"{kind} {count}" in found
        ]
        label = {"alone": "un-split, one core"}.get(kind, kind)
        left.plot(*zip(*points, strict=True), marker="o", label=label, linestyle="-" if "hand" in kind else "--")
    left.plot(args.micro_batches, [2 * m / (m + 1) for m in args.micro_batches], ":", color="grey", label="P M/(M+P-1)")
    left.set(xscale="log", xticks=args.micro_batches, xticklabels=args.micro_batches, ylim=(0, 2),
             xlabel=f"micro-batches of a batch of {args.batch_size}", ylabel="times as fast as one core")  # fmt: skip
    left.minorticks_off()
    left.grid(alpha=0.3)
    left.legend(fontsize=7, ncols=2, loc="lower left")
    names = [f"hand 1f1b {count}" for count in args.micro_batches]
    bottoms = [0.0] * len(names)
    for part, colour in PARTS.items():
        heights = [max(0.0, found[name]["losses"][part]) for name in names]
        right.bar([n.split()[-1] for n in names], heights, bottom=bottoms, color=colour, label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    right.plot(
        [n.split()[-1] for n in names],
        [found[n]["median_seconds"] for n in names],
        "k_",
        markersize=22,
        label="measured",
    )
    right.set(xlabel="micro-batches (ours, 1F1B)", ylabel="seconds per step")
    right.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_memory(path: Path, result: dict[str, Any], title: str) -> None:
    """Activations kept per stage."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6))
    width = 0.8 / len(result["bytes"])
    for number, (name, values) in enumerate(result["bytes"].items()):
        places = [stage + (number - 1.5) * width for stage in range(len(values))]
        axis.bar(places, [value / 2**20 for value in values], width, label=name)
    axis.set(xticks=range(len(result["stages"])), xlabel="stage", ylabel="MiB kept at most")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process, bound to one core."""
    with taking_part(place, local_rank) as world:
        machine = describe_machine()  # before this process is bound to one of its cores
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        drawn = draw(args.batch_size, args.image_size, seed=0)
        data = ImageData("shapes", drawn, drawn, 10, 0.4, 0.3)
        images, labels, _ = data.normalise(drawn.__getitems__(list(range(args.batch_size))))
        numerics = Precision(channels_last=args.channels_last).on(world.device)
        images = numerics.images(images)
        setting = Setting(args, world, make_grid(world, None), numerics, images, labels, data)
        args.out.mkdir(parents=True, exist_ok=True)
        result = memory(setting) if args.memory else speed(setting)
        if not world.is_main:
            return
        common = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine,
            "versions": describe_software("torch", "torchvision"), "precision": numerics.name, "arch": args.arch,
            "processes": world.size, "batch_size": args.batch_size, "image_size": args.image_size,
            "rounds": args.rounds,
        }  # fmt: skip
        file = args.out / ("pipeline_memory.json" if args.memory else "pipeline.json")
        file.write_text(json.dumps(common | result, indent=2) + "\n")
        what = f"{args.arch}, {args.image_size} px, {numerics.name}, {machine['cpu']}"
        if args.memory:
            draw_memory(file.with_suffix(".png"), result, f"{what}: batch {args.batch_size} in 8 micro-batches")
            return
        draw_speed(file.with_suffix(".png"), result, args, f"{what}, {world.size} processes x 1 core")
        print(f"\n{'configuration':24}{'seconds':>9}{'speed-up':>10}{'bubble':>8}")
        for name, values in result["configurations"].items():
            idle = f"{values['bubble']:.0%}" if "bubble" in values else ""
            print(f"{name:24}{values['median_seconds']:9.2f}{values['speedup']:10.2f}{idle:>8}")
        losses = result["configurations"][result["best"]["hand"]]["losses"]
        print(f"{result['best']['hand']}: " + ", ".join(f"{part} {value:.2f} s" for part, value in losses.items()))
        print(f"result: {file}", flush=True)


if __name__ == "__main__":
    sys.exit(launch(main_worker, place, args))
