"""What a pipeline of two processes, one core each, gains over one process on one core.

    python -m benchmarks.pipeline                       # 2 processes: all schedules, half an hour
    python -m benchmarks.pipeline --nproc 4 --memory    # 4 processes: activations of each stage

Compared in every round: the pipelines, and the un-split model on one core while the other core
idles (the whole batch at once, in micro-batches, and in the other memory layout; the fastest is the
baseline). Each process is bound to a core of its own. A step is forward, backward and optimizer.

The seconds of a step by our engine are split into

* ideal: those of the baseline, divided by the stages;
* small micro-batches: what the un-split model loses in micro-batches of this size;
* shared machine: what the stages lose to each other (memory, cache, clock) when both cores work;
* bubble: (P-1)/M of the work, for equal stages (interleaved: half of it; ZB-H1: a third, ZB-V: a
  sixth, if forward and both halves of backward take equally long);
* imbalance: what unequal times add to that, simulated with the measured ones;
* communication and rest: what was measured beyond the simulation, with the optimizer.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from tyro.conf import arg

from benchmarks.harness import RanksMeasurement, facts, save, speedups
from benchmarks.pipelines import Kept, Pipelines, losses
from benchmarks.ranks import Step, on_ranks, time_steps
from common.launch.args import start
from common.launch.collectives import gather_objects, print0
from common.launch.flags import at_least
from common.launch.place import Place
from common.train.amp import MixedPrecision
from common.train.precision import Precision
from examples.resnet_pipeline.args import PipelineArgs
from examples.resnet_pipeline.model import build
from examples.resnet_pipeline.operations import BY_HAND
from examples.resnet_pipeline.partition import describe
from examples.resnet_pipeline.schedule import ideal_bubble
from examples.resnet_pipeline.timeline import Event, Timeline, bubble, draw, merged

FORMS: dict[str, Literal["gpipe", "1f1b"]] = {"GPipe": "gpipe", "1F1B": "1f1b"}
OTHER_LAYOUT: dict[str, Literal["yes", "no"]] = {"yes": "no", "no": "yes"}


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
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
    memory: bool = False
    """Measure the activations that each stage keeps, and not the speed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, batch_size=self.batch_size, image_size=self.image_size)
        at_least(1, micro_batches=min(self.micro_batches))


def configurations(args: Args, processes: int) -> dict[str, PipelineArgs]:
    """The pipelines to compare, by engine, schedule and number of micro-batches."""
    found: dict[str, PipelineArgs] = {}
    base = PipelineArgs(arch=args.arch)
    for count in args.micro_batches:
        for engine in ("hand", "torch"):
            schedules = ["gpipe", "1f1b"] + ["interleaved"] * (count >= 4)
            if engine == "hand":
                schedules += ["zb-h1", "zbv"]
            elif count >= 2 * processes:
                schedules += ["zero-bubble", "zbv", "dualpipev"]
            fits = count >= processes and args.batch_size % count == 0
            for schedule in schedules if engine == "hand" or fits else ():
                changed = {"engine": engine, "schedule": schedule, "micro_batches": count}
                found[f"{engine} {schedule} {count}"] = replace(base, **changed)
    return found


def measure_speed(args: Args, pipelines: Pipelines) -> dict[str, Any]:
    """Measure all configurations in turn. Every rank calls this."""
    processes = dist.get_world_size()
    compared = configurations(args, processes)
    probe = pipelines.make(PipelineArgs(arch=args.arch))  # 4 micro-batches: the cut of all others
    plan = probe.local.partition
    for line in describe(plan, "1f1b", processes, probe.sizes):
        print0(line)
    steps: dict[str, Step] = {}
    timelines: dict[str, Timeline] = {}
    for name, flags in compared.items():
        made = pipelines.make(flags)
        steps[name], timelines[name] = made.step, made.timeline
    others = Precision(channels_last=OTHER_LAYOUT[args.channels_last])
    layouts = {
        "alone": pipelines.amp,
        "alone, other layout": MixedPrecision(others, pipelines.amp.device),
    }
    for kind, amp in layouts.items():
        model = build(args.arch, 10, "batch")
        for count in args.micro_batches if kind == "alone" else (1,):
            steps[f"{kind} {count}"] = pipelines.alone(model, count, amp)
    samples = time_steps("step", steps, args.rounds, alone=steps.keys() - compared.keys())
    events = {name: merged(gather_objects(timeline.steps)) for name, timeline in timelines.items()}
    return summarise(args, compared, samples, events) | {
        "cut": [plan.blocks[start].first for start in plan.starts]
    }


def summarise(
    args: Args,
    compared: Mapping[str, PipelineArgs],
    samples: Mapping[str, list[float]],
    events: Mapping[str, list[list[Event]]],
) -> dict[str, Any]:
    """Speed-ups, idle shares and losses of all configurations, and the timelines of the best.

    Only rank 0 has the events: what each pipeline computed in each round.
    """
    processes = dist.get_world_size()
    if dist.get_rank() != 0:
        return {}
    middle = {name: median(each) for name, each in samples.items()}
    alone = min((name for name in samples if name.startswith("alone")), key=lambda n: middle[n])
    found: dict[str, dict[str, Any]] = {}
    for name, each in speedups(samples, alone).items():
        measured = {"seconds": samples[name], "median_seconds": middle[name]}
        found[name] = {**measured, "speedup_per_round": each, "speedup": median(each)}
    best: dict[str, str] = {}
    for name, flags in compared.items():
        found[name]["bubble"] = median(map(bubble, events[name]))
        if flags.engine == "hand":
            cut = samples[f"alone {flags.micro_batches}"]
            rounds = zip(events[name], samples[name], samples[alone], cut, strict=True)
            parts = [losses(of, flags, processes, *spent) for of, *spent in rounds]
            found[name]["losses"] = {p: median(each[p] for each in parts) for p in parts[0]}
        other = best.setdefault(flags.engine, name)
        best[flags.engine] = max(other, name, key=lambda n: found[n]["speedup"])
    count, charts = compared[best["hand"]].micro_batches, {}
    shown = {*best.values(), *(f"hand {schedule} {count}" for schedule in BY_HAND)}
    for name in (name for name in compared if name in shown):
        part, flags = sorted(events[name], key=bubble)[args.rounds // 2], compared[name]
        ideal = ideal_bubble(flags.schedule, flags.micro_batches, processes)
        known = f", with equal stages {ideal:.0%}" if flags.schedule in BY_HAND else ""
        charts[f"{name}: idle {bubble(part):.0%}{known}"] = part
    args.out.mkdir(parents=True, exist_ok=True)
    draw(args.out / "pipeline_timeline.png", charts)
    return {"baseline": alone, "best": best, "configurations": found}


def measure_memory(args: Args, pipelines: Pipelines) -> dict[str, Any]:
    """Bytes of activations that each stage keeps at most while a step runs. Every rank calls this.

    With --recompute those that are computed again for one micro-batch, and dropped at once, are not
    counted.
    """
    found, cuts = {}, ()
    for recompute, (form, schedule) in product((False, True), FORMS.items()):
        name = f"{form}, recompute" if recompute else form
        flags = PipelineArgs(arch=args.arch, micro_batches=8, cuts=cuts)
        made = pipelines.make(replace(flags, schedule=schedule, recompute=recompute))
        partition = made.local.partition
        cuts = tuple(partition.blocks[begin].first for begin in partition.starts[1:])
        kept = Kept(made.local.parameters)
        with kept.counting():
            made.step()
        found[name] = gather_objects(kept.most)
        print0(f"{name}: " + ", ".join(f"{value / 2**20:.0f} MiB" for value in found[name]))
    return {"stages": ["stem", *cuts], "bytes": found}


def measure(args: Args, device: torch.device) -> dict[str, Any]:
    """What each rank does, bound to one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    torch.set_num_threads(1)
    precision, timeout = Precision(channels_last=args.channels_last), args.launch.patience
    pipelines = Pipelines(args.batch_size, args.image_size, precision, device, timeout)
    found = (measure_memory if args.memory else measure_speed)(args, pipelines)
    return {"precision": pipelines.amp.name, **found}


def main(place: Place, args: Args) -> None:
    """Measure, write the results, show them."""
    about = facts("torch", "torchvision") | {
        "arch": args.arch,
        "processes": place.local_world_size,
        "batch_size": args.batch_size,
        "image_size": args.image_size,
        "rounds": args.rounds,
    }
    found = on_ranks(place.local_world_size, place, measure, args)
    save("pipeline_memory" if args.memory else "pipeline", about | found, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.pipeline:main", ["benchmarks.harness"])
