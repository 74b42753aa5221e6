"""All-reduces by hand beside torch's: time against message size, and time of a training step of ResNet-18.

    python -m benchmarks.allreduce                 # 2 and 4 processes on this machine; needs it to be quiet
    python -m benchmarks.allreduce --starts 1 --rounds 3 --steps 0 --ranks 2

In every round each algorithm runs once, in an order drawn for the round, so that a change of the machine's load meets
all of them; the time is that of the slowest rank, ratios are medians of the rounds' ratios. Which memory a process gets
moves ratios by a tenth until it ends, so the processes are started several times. Measured in the same run:

* memory: all ranks add two arrays of 64 MiB into a third at the same time, bytes read and written per second; in every
  round of messages of 1 MB and more, since what other programs leave of the memory's bandwidth changes;
* loopback: all ranks send to their right and receive from their left over plain TCP sockets at the same time.

They give the dashed lines in the plot: a ring sends 2 (W - 1) / W of the bytes; the sum in shared memory reads S and
writes S / W bytes per rank. The former is no hard limit: Python's threads move the bytes, gloo can be faster.
"""

import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from tyro.conf import OmitArgPrefixes

from benchmarks.machine import describe_machine, describe_software
from common.errors import UserError
from common.flags import at_least, begin
from common.launcher import Launch, Place


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of processes to measure message sizes with."""
    starts: int = 3
    """Times that the processes are started anew."""
    rounds: int = 7
    """Measurements of each algorithm at each size and start."""
    steps: int = 21
    """Measurements of each training step and start, with 2 processes; 0 leaves them out."""
    batch: int = 1
    """Images of 224x224 pixels per process and step."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json) and the charts (.png)."""
    launch: OmitArgPrefixes[Launch] = Launch(nproc=2)

    def __post_init__(self) -> None:
        at_least(1, starts=self.starts, rounds=self.rounds, batch=self.batch)
        at_least(0, steps=self.steps)
        if min(self.ranks, default=0) < 2:
            raise UserError("--ranks: give numbers of processes from 2 up")


if __name__ == "__main__":  # before the heavy imports
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed import World, launch, say, taking_part
from examples.manual_allreduce_sgd import gradients
from examples.manual_allreduce_sgd.allreduce import Circle, backend, connected, recursive_doubling, ring
from examples.manual_allreduce_sgd.shared_memory import SharedMemory

MIB = 1 << 20
RESNET18 = 4 * 11_689_512  # bytes of its parameters
SIZES = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, MIB, 4 * MIB, 16 * MIB, RESNET18, 64 * MIB]
MEMORY = "memory"
DDP_BOUNDED = "ddp, bounded buffers"
WAYS = ("none", "per-parameter", "flat", "ring", "bucketed", "shared-memory", "ddp", DDP_BOUNDED)
IN_PLACE = "shared memory, in place"
TORCH, BOUNDED = "dist.all_reduce", "dist.all_reduce, bounded buffers"
COLOURS = {
    TORCH: "#000000", BOUNDED: "#cc79a7", "ring": "#0072b2", "recursive doubling": "#e69f00",
    "shared memory, copies": "#56b4e9", IN_PLACE: "#009e73",
}  # fmt: skip


def alternating(
    ways: Mapping[str, Callable[[], object]], rounds: int, repeats: int = 1, meet: Callable[[], object] = dist.barrier
) -> dict[str, list[float]]:
    """Seconds of each way in each round: those of the slowest rank. One round before is not counted.

    Each round has an order of its own, the same on all ranks: what runs after another finds its data in the caches.
    All start when they have met: out of gloo's barrier, some ranks come milliseconds after others.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(sorted(ways), len(ways)):  # noqa: S311 - no secret
            way = ways[name]
            meet()
            started = time.perf_counter()
            for _ in range(repeats):
                way()
            seconds = torch.tensor((time.perf_counter() - started) / repeats, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:
                found[name].append(seconds.item())
    return found


def loopback_bandwidth(world: World) -> float:
    """Bytes per second that a rank sends over TCP while all ranks send to their right and receive from their left."""
    listener = socket.create_server(("127.0.0.1", 0))
    ports: list[int] = [0] * world.size
    dist.all_gather_object(ports, listener.getsockname()[1])
    right = socket.create_connection(("127.0.0.1", ports[(world.rank + 1) % world.size]))
    left, _ = listener.accept()
    outgoing, incoming = bytearray(64 * MIB), memoryview(bytearray(4 * MIB))

    def transfer() -> None:
        sender = threading.Thread(target=right.sendall, args=(outgoing,))
        sender.start()
        rest = len(outgoing)
        while rest:
            rest -= left.recv_into(incoming)
        sender.join()

    seconds = alternating({"transfer": transfer}, 7)["transfer"]
    for each in (listener, left, right):
        each.close()
    return len(outgoing) / median(seconds)


def measure_sizes(world: World, args: Args) -> dict[str, Any]:
    """Seconds of every algorithm for every size, and the machine's limits with as many processes."""
    memory, circle = SharedMemory(world, 64 * MIB), Circle.of(world)
    found: dict[str, Any] = {"memory": {}, "loopback": loopback_bandwidth(world), "seconds": {}}
    one, two, three = (torch.ones(16 * MIB) for _ in range(3))
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        mine = memory.mine(len(tensor), tensor.dtype).zero_()

        def check(tensor: Tensor = tensor, mine: Tensor = mine) -> None:
            for algorithm in (backend, ring, recursive_doubling, memory.all_reduce):
                tensor.fill_(world.rank + 1)
                algorithm(tensor, circle)
                assert (tensor == sum(range(world.size + 1))).all()
            mine.fill_(world.rank + 1)
            assert (memory.sum(len(tensor), tensor.dtype) == sum(range(world.size + 1))).all()
            memory.meet()
            tensor.zero_()  # so that sums of sums do not overflow
            mine.zero_()

        check()
        ways = {
            TORCH: lambda tensor=tensor: dist.all_reduce(tensor),
            BOUNDED: lambda tensor=tensor: backend(tensor, circle),
            "ring": lambda tensor=tensor: ring(tensor, circle),
            "recursive doubling": lambda tensor=tensor: recursive_doubling(tensor, circle),
            "shared memory, copies": lambda tensor=tensor: memory.all_reduce(tensor),
            IN_PLACE: lambda tensor=tensor: memory.sum(len(tensor), tensor.dtype),
        }
        if size >= MIB:
            ways[MEMORY] = lambda: torch.add(one, two, out=three)
        seconds = alternating(ways, args.rounds, max(1, min(20, 8 * MIB // size)), memory.meet)
        if size >= MIB:
            found["memory"][size] = [3 * one.nbytes / each for each in seconds.pop(MEMORY)]
        found["seconds"][size] = seconds
        line = ", ".join(f"{name} {1e3 * median(each):.2f}" for name, each in seconds.items())
        say(world, f"{world.size} ranks, {size / 1e6:.3f} MB, ms: {line}")
    return found


def measure_steps(world: World, args: Args) -> dict[str, Any]:
    """Seconds of a training step of ResNet-18 (float32, images of 224x224), by every way to average its gradients."""
    from torchvision.models import resnet18  # 3 s

    images = torch.randn(args.batch, 3, 224, 224)
    labels = torch.arange(args.batch) % 1000
    steps: dict[str, Callable[[], object]] = {}
    for name in WAYS:
        torch.manual_seed(0)
        net = resnet18(norm_layer=partial(nn.BatchNorm2d, track_running_stats=False))  # no buffers for DDP to send
        if name in ("none", DDP_BOUNDED):
            way = gradients.Ddp.__new__(gradients.Ddp)  # its `average` does nothing
            way.model = net
            if name == DDP_BOUNDED:
                way.model = DistributedDataParallel(
                    net, process_group=connected(world, range(world.size)), gradient_as_bucket_view=True
                )
        else:
            way = gradients.averaging(name, net, world, torch.float32, 4.0, images[:2])
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)

        def step(way: gradients.Averaging = way, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(way.model(images), labels).backward()
            way.average()
            optimizer.step()

        steps[name] = step
    found = alternating(steps, args.steps, meet=SharedMemory(world, 0).meet)
    say(world, "step, ms: " + ", ".join(f"{name} {1e3 * median(s):.0f}" for name, s in found.items()))
    return {"seconds": found}


def main_worker(local_rank: int, place: Place, job: tuple[Args, str, str]) -> None:
    """One process: measure, and let the main rank write what was found."""
    args, what, file = job
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        found = measure_steps(world, args) if what == "steps" else measure_sizes(world, args)
        if world.is_main:
            Path(file).write_text(json.dumps(found | {"threads": torch.get_num_threads()}))


def joined(starts: list[Any]) -> Any:
    """What several starts found: lists one after the other, of other numbers the median."""
    first = starts[0]
    if isinstance(first, dict):
        return {name: joined([start[name] for start in starts]) for name in first}
    return list(chain(*starts)) if isinstance(first, list) else median(starts)


def ratios(seconds: Mapping[str, list[float]], reference: str) -> dict[str, float]:
    """How many times faster than the reference: the medians of the rounds' ratios."""
    return {
        name: round(median(other / one for one, other in zip(mine, seconds[reference], strict=True)), 3)
        for name, mine in seconds.items()
    }


def times_limit(found: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """For each size, time of a sum in place over that of reading S and writing S / W at the memory's bandwidth."""
    return {
        size: round(median(
            seconds * bandwidth / ((1 + 1 / ranks) * int(size))
            for seconds, bandwidth in zip(found["seconds"][size][IN_PLACE], bandwidths, strict=True)
        ), 3)
        for size, bandwidths in found["memory"].items()
    }  # fmt: skip


def draw_sizes(path: Path, sizes: Mapping[str, Any], title: str) -> None:
    """Time against size, a panel for each number of ranks, with the limits of the hardware."""
    import matplotlib  # a second

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 6), sharey=True, squeeze=False)
    for axis, (ranks, found) in zip(axes[0], sizes.items(), strict=True):
        size = int(ranks)
        lengths = [int(length) for length in found["seconds"]]
        for name, colour in COLOURS.items():
            times = [1e3 * median(seconds[name]) for seconds in found["seconds"].values()]
            axis.plot([length / 1e6 for length in lengths], times, color=colour, marker="o", label=name)
        ends = [length for length in lengths if length >= MIB]
        memory = median(chain(*found["memory"].values()))
        limits = {
            f"ring over plain TCP sockets, {found['loopback'] / 1e9:.1f} GB/s": (
                2 * (size - 1) / size / found["loopback"], "#0072b2",
            ),
            f"limit of shared memory: {memory / 1e9:.1f} GB/s per rank": ((1 + 1 / size) / memory, "#009e73"),
        }  # fmt: skip
        for name, (per_byte, colour) in limits.items():
            axis.plot(
                [end / 1e6 for end in ends], [1e3 * end * per_byte for end in ends], "--", color=colour, label=name
            )
        axis.set(xscale="log", yscale="log", xlabel="MB", title=f"{ranks} ranks")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    axes[0][0].set_ylabel("ms")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_steps(path: Path, seconds: Mapping[str, list[float]], title: str) -> None:
    """A bar for each way: its step, and the share of it that is not computing."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4))
    medians = {name: 1e3 * median(values) for name, values in seconds.items()}
    faster = ratios(seconds, "ddp")
    computing = medians["none"]
    axis.barh(list(medians), [min(computing, value) for value in medians.values()], color="#999999", label="computing")
    rest = [max(0.0, value - computing) for value in medians.values()]
    axis.barh(list(medians), rest, left=computing, color="#0072b2", label="waiting for the exchange")
    for position, (name, value) in enumerate(medians.items()):
        note = f"{value:.0f} ms ({faster[name]:.2f} times DDP's speed)"
        axis.annotate(note, (value, position), (5, 0), textcoords="offset points", va="center")
    axis.invert_yaxis()
    axis.set(xlabel="ms per step", xlim=(0, 1.55 * max(medians.values())))
    axis.set_title(title, loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(args: Args, place: Place) -> int:
    """Measure, write the results, show them; returns the exit code."""
    if not place.spawns or place.nodes > 1:
        raise SystemExit("error: this benchmark starts its processes itself, on one machine")
    machine = describe_machine()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "load_before": os.getloadavg()[0],  # of other programs: on a busy machine the figures say little
        "versions": describe_software("torch", "torchvision"),
        "sizes": {},
        "step": None,
    }
    jobs = [(str(ranks), ranks) for ranks in args.ranks] + ([("steps", 2)] if args.steps else [])
    for what, ranks in jobs:
        starts = []
        for _ in range(args.starts):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "found.json")
                code = launch(main_worker, replace(place, local_size=ranks, size=ranks), (args, what, str(file)))
                if code:
                    return code
                starts.append(json.loads(file.read_text()))
        found = joined(starts)
        if what == "steps":
            result["step"] = found | {"batch": args.batch, "times_faster_than_ddp": ratios(found["seconds"], "ddp")}
        else:
            faster = {size: ratios(seconds, TORCH) for size, seconds in found["seconds"].items()}
            result["sizes"][what] = found | {
                "times_faster_than_torch": faster, "times_memory_limit": times_limit(found, ranks),
            }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "allreduce.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    where = f"{machine['cpu']}, {machine['cores']} cores, gloo"
    draw_sizes(
        path.with_suffix(".png"),
        result["sizes"],
        f"All-reduce of float32, median of {args.starts * args.rounds}, {where}",
    )
    for ranks, found in result["sizes"].items():
        print(f"\n{ranks} ranks: times faster than {TORCH}")
        for size, faster in found["times_faster_than_torch"].items():
            line = ", ".join(f"{name} {value:.2f}" for name, value in faster.items() if name != TORCH)
            share = found["times_memory_limit"].get(size)
            limit = f"; in place {share:.1f} times the memory's limit" if share else ""
            print(f"  {int(size) / 1e6:9.3f} MB: {line}{limit}")
    if result["step"]:
        title = f"Step of ResNet-18, 2 ranks x {args.batch} images, {where}"
        draw_steps(args.out / "allreduce_step.png", result["step"]["seconds"], title)
        print("\nstep: times faster than DDP's", result["step"]["times_faster_than_ddp"])
    print(f"result: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(args, place))
