"""A training step on one device, with DataParallel and with DDP, over batch sizes: where several devices begin to pay.

    python -m benchmarks.dataparallel                  # all GPUs if there are several, else two cores of the CPU
    python -m benchmarks.dataparallel --rounds 3 --batches 64 1024

On a CPU a "device" is one core: one replica with one thread, DataParallel (the eight steps by hand) with one thread per
replica, DDP with one process of one thread per core. Two ways more are measured there: one replica with all cores, and
as many processes that exchange nothing, each with its chunk: what several cores can do without GIL and exchange.

In every round each way runs once, one after the other, while the processes that it does not need wait in a barrier; the
time is that of the slowest process, ratios are medians of the rounds' ratios. The model is `DigitNet` on 28x28 pixels.
Beside the seconds:

* CPU: the milliseconds of each of the eight steps, and of each thread in forward and backward;
* CUDA: each device's highest memory and mean utilisation (by nvidia-smi) under DataParallel and DDP, at the last batch.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from tyro.conf import OmitArgPrefixes

from benchmarks.machine import describe_machine, describe_software
from common.flags import at_least, begin
from common.launcher import Launch, Place


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    batches: tuple[int, ...] = (8, 32, 128, 512, 2048)
    """Global batch sizes."""
    rounds: int = 7
    """Measurements of each way at each size."""
    replicas: int = 2
    """Replicas and processes on a CPU; with GPUs it is their number."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json)."""
    chart: Path = Path("docs/images/mnist_dataparallel.png")
    """File for the chart."""
    launch: OmitArgPrefixes[Launch] = Launch()

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds)
        at_least(2, replicas=self.replicas, **{"batches": min(self.batches, default=0)})


if __name__ == "__main__":  # before the heavy imports
    args, place = begin(Args, __doc__, ("torch._dynamo",))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from common.distributed import World, launch, say, taking_part
from common.models import DigitNet
from common.precision import Precision
from examples.mnist_dataparallel.eight_steps import EightSteps, Net
from examples.mnist_dataparallel.engines import TorchDataParallel
from examples.mnist_dataparallel.explain import Explanation

ONE, ALL, BARE = "one device", "one replica, all cores", "processes without exchange"
DP, HAND, DDP = "nn.DataParallel", "eight steps by hand", "DDP"
COLOURS = {ONE: "#000000", ALL: "#999999", BARE: "#56b4e9", DP: "#d55e00", HAND: "#e69f00", DDP: "#0072b2"}
WATCHED = 3  # iterations before the one whose steps are measured
Way = tuple[Callable[[], object], bool, int]  # the step, whether all processes take part, threads of the process


def step_of(gradients: Callable[[], object], optimizer: Optimizer) -> Callable[[], object]:
    """A training step."""

    def step() -> None:
        gradients()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_ways(world: World, batch: int, devices: list[torch.device]) -> dict[str, Way]:
    """A step of each way, for one global batch size."""
    cuda, count = world.device.type == "cuda", len(devices)
    images, labels = torch.randn(batch, 1, 28, 28), torch.arange(batch) % 10
    mine = torch.arange(batch).chunk(count)
    mine = mine[world.rank] if world.rank < len(mine) else torch.arange(0)  # fewer samples than processes
    here, there = images[mine], labels[mine]

    def net() -> tuple[Net, Optimizer]:
        torch.manual_seed(0)
        numerics = Precision("fp32").on(world.device)
        made = Net(numerics.prepare(DigitNet(28)), nn.CrossEntropyLoss(reduction="sum"), numerics)
        return made, SGD(made.parameters(), 0.01, momentum=0.9)

    def engine(chosen: list[torch.device], torchs: bool = False) -> Callable[[], object]:
        if not world.is_main:
            return lambda: None
        module, optimizer = net()
        parallel = TorchDataParallel(module, chosen, False) if torchs else EightSteps(module, chosen, False)
        return step_of(lambda: parallel.gradients(images, labels, 1 / batch), optimizer)

    def process(exchange: bool) -> Callable[[], object]:
        module, optimizer = net()
        ids = [world.device] if cuda else None
        model: nn.Module = DistributedDataParallel(module, device_ids=ids) if exchange else module
        criterion, numerics = module.criterion, module.numerics

        def gradients() -> None:
            logits: Tensor = model(numerics.images(here))
            (criterion(logits, there.to(world.device)) * (count / batch)).backward()

        return step_of(gradients, optimizer)

    cores = 1 if cuda else world.cores * world.size  # of the machine: `cores` is a process's share
    torch.set_num_threads(1 if cuda else count)  # the eight steps share them among their threads
    ways: dict[str, Way] = {ONE: (engine(devices[:1]), False, 1), HAND: (engine(devices), False, 1)}
    if cuda:
        ways[DP] = (engine(devices, torchs=True), False, 1)
    else:
        ways |= {ALL: (engine(devices[:1]), False, cores), BARE: (process(exchange=False), True, 1)}
    return ways | {DDP: (process(exchange=True), True, 1)}


def measure(world: World, batch: int, ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each way in each round: those of the slowest process. One round before is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    repeats = max(2, min(20, 512 // batch))
    for number in range(rounds + 1):
        for name, (step, everybody, threads) in ways.items():
            torch.set_num_threads(threads)
            dist.barrier()
            started = time.perf_counter()
            if everybody or world.rank == 0:
                for _ in range(repeats):
                    step()
                wait_for_devices()
            seconds = torch.tensor((time.perf_counter() - started) / repeats, dtype=torch.float64)
            seconds *= everybody or world.rank == 0  # the others' is the time in the barrier
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:
                found[name].append(seconds.item())
    return found


def wait_for_devices() -> None:
    """Devices work behind the host's back."""
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)


def eight_steps(world: World, batch: int, devices: list[torch.device], rounds: int) -> dict[str, Any]:
    """Milliseconds of each step by hand, and of each thread: medians of several iterations. On the main rank only."""
    torch.manual_seed(0)
    torch.set_num_threads(len(devices) if world.device.type == "cpu" else 1)
    numerics = Precision("fp32").on(devices[0])
    net = Net(numerics.prepare(DigitNet(28)), nn.CrossEntropyLoss(reduction="sum"), numerics)
    optimizer, parallel = SGD(net.parameters(), 0.01, momentum=0.9), EightSteps(net, devices, False)
    torch.set_num_threads(1)
    images, labels = torch.randn(batch, 1, 28, 28), torch.arange(batch) % 10
    rows: dict[str, list[float]] = {}
    threads: list[list[float]] = []
    for number in range(rounds + WATCHED):
        watch = parallel.explanation = Explanation(devices, 1)
        watch.begin()
        parallel.gradients(images, labels, 1 / batch)
        optimizer.step()
        watch.did(8, "update")
        optimizer.zero_grad()
        if number >= WATCHED:
            for step, _, milliseconds, _ in watch.rows:
                rows.setdefault(str(step), []).append(milliseconds)
            threads.append([1e3 * seconds for seconds in watch.busy])
    return {"steps": rows, "threads": threads}


def first_load(found: Mapping[str, Any]) -> list[float]:
    """The share of the iteration in which each device is busy: its thread, and for the first all other steps, too."""
    others = [step for step in found["steps"] if step not in ("4", "6")]
    shares: list[list[float]] = []
    for number, threads in enumerate(found["threads"]):
        total = sum(values[number] for values in found["steps"].values())
        extra = sum(found["steps"][step][number] for step in others)
        shares.append([(busy + (extra if device == 0 else 0)) / total for device, busy in enumerate(threads)])
    return [round(median(values), 3) for values in zip(*shares, strict=True)]


def loads(world: World, ways: Mapping[str, Way], seconds: float = 3.0) -> dict[str, Any]:
    """Each GPU's highest memory in bytes and mean utilisation in percent, under DataParallel and under DDP."""
    found: dict[str, Any] = {}
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    for name in (ONE, DP, DDP):
        step, everybody, _ = ways[name]
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)
        dist.barrier()
        watch = subprocess.Popen(query, stdout=subprocess.PIPE, text=True) if world.is_main else None
        goal = torch.zeros(1)
        deadline = time.monotonic() + seconds
        while goal.item() == 0:  # as many steps in all processes
            for _ in range(10 if everybody or world.is_main else 0):
                step()
            wait_for_devices()
            goal[0] = float(world.is_main and time.monotonic() > deadline)
            dist.all_reduce(goal)
        memory = torch.tensor([float(torch.cuda.max_memory_allocated(n)) for n in range(torch.cuda.device_count())])
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        if watch is not None:
            watch.terminate()
            words = (watch.communicate()[0] or "").split()
            count = torch.cuda.device_count()
            busy = [[float(word) for word in words[number::count] if word.isdigit()] for number in range(count)]
            found[name] = {"memory": memory.tolist(), "utilisation": [mean(each) if each else None for each in busy]}
    return found


def main_worker(local_rank: int, place: Place, job: tuple[Args, str]) -> None:
    """One process: measure, and let the main rank write what was found."""
    args, file = job
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        cuda = world.device.type == "cuda"
        devices = [torch.device("cuda", n) if cuda else torch.device("cpu") for n in range(world.size)]
        found: dict[str, Any] = {"devices": list(map(str, devices)), "batches": {}}
        ways: dict[str, Way] = {}
        for batch in args.batches:
            ways = make_ways(world, batch, devices)
            seconds = measure(world, batch, ways, args.rounds)
            dist.barrier()
            steps = eight_steps(world, batch, devices, args.rounds) if world.is_main else {}
            dist.barrier()
            found["batches"][batch] = {"seconds": seconds, **steps}
            line = ", ".join(f"{name} {1e3 * median(values):.2f}" for name, values in seconds.items())
            say(world, f"batch {batch}, ms per step: {line}")
        if cuda:
            found["loads"] = loads(world, ways)
        if world.is_main:
            Path(file).write_text(json.dumps(found))


def ratios(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """How many times as fast as one device: the medians of the rounds' ratios."""
    return {
        name: round(median(other / one for one, other in zip(values, seconds[ONE], strict=True)), 3)
        for name, values in seconds.items()
    }


def draw(path: Path, found: Mapping[str, Any], title: str) -> None:
    """Left: speed against batch size. Right: where an iteration of the eight steps spends its time."""
    import matplotlib  # a second

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.8))
    batches = list(found["batches"])
    for name, colour in COLOURS.items():
        if name in found["batches"][batches[0]]["times_one_device"]:
            speeds = [found["batches"][batch]["times_one_device"][name] for batch in batches]
            left.plot(list(map(int, batches)), speeds, color=colour, marker="o", label=name)
    left.axhline(len(found["devices"]), color="#bbbbbb", linestyle=":", label="ideal")
    left.set(xscale="log", xlabel="global batch, images", ylabel="times one device", ylim=(0, None))
    left.set_xticks([int(batch) for batch in batches], batches)
    left.minorticks_off()
    left.legend(fontsize=8)
    left.grid(alpha=0.3)
    left.set_title("below 1: slower than one device", fontsize=10)
    parts = {
        "to the first device, scatter (1, 2)": ("12", "#999999"), "copy the model (3)": ("3", "#d55e00"),
        "forward, backward in threads (4, 6)": ("46", "#0072b2"), "gather, loss (5)": ("5", "#56b4e9"),
        "add up gradients (7)": ("7", "#e69f00"), "update (8)": ("8", "#009e73"),
    }  # fmt: skip
    ends = [0.0] * len(batches)
    for label, (steps, colour) in parts.items():
        shares = []
        for batch in batches:
            rows = {step: median(values) for step, values in found["batches"][batch]["steps"].items()}
            shares.append(100 * sum(rows[step] for step in steps) / sum(rows.values()))
        right.bar(batches, shares, bottom=ends, color=colour, label=label)
        ends = [end + share for end, share in zip(ends, shares, strict=True)]
    right.set(xlabel="global batch, images", ylabel="% of an iteration", ylim=(0, 100))
    right.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
    right.set_title("the eight steps by hand", fontsize=10)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(args: Args, place: Place) -> int:
    """Measure, write the results, show them; returns the exit code."""
    gpus = torch.cuda.device_count() if args.launch.device != "cpu" and not args.launch.no_accel else 0
    if gpus < 2:  # one GPU shows nothing
        place = replace(place, flags=replace(place.flags, device="cpu"))
    count = gpus if gpus > 1 else args.replicas
    place = replace(place, launcher="spawn", local_size=count, size=count, host="127.0.0.1", store_hosted=True)
    machine = describe_machine()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "load_before": os.getloadavg()[0],  # of other programs: on a busy machine the figures say little
        "versions": describe_software("torch"),
        "rounds": args.rounds,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        code = launch(main_worker, place, (args, str(file)))
        if code:
            return code
        result |= json.loads(file.read_text())
    for found in result["batches"].values():
        found["times_one_device"] = ratios(found["seconds"])
        found["busy_share"] = first_load(found)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "dataparallel.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    with suppress(KeyError):
        print(json.dumps(result["loads"], indent=1))
    where = f"{machine['gpus'][0]} x {count}" if gpus > 1 else f"{machine['cpu']}, {count} cores as devices"
    where += f", load before {result['load_before']:.1f}"
    draw(args.chart, result, f"A training step of DigitNet (28x28), median of {args.rounds}, {where}")
    for batch, found in result["batches"].items():
        line = ", ".join(f"{name} {value:.2f}" for name, value in found["times_one_device"].items() if name != ONE)
        print(f"batch {batch}: times one device: {line}; busy share of the devices {found['busy_share']}")
    print(f"result: {path}, chart: {args.chart}")
    return 0


if __name__ == "__main__":
    sys.exit(main(args, place))
