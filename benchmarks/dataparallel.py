"""A training step on one device, with DataParallel and with DDP, over batch sizes.

    python -m benchmarks.dataparallel     # all GPUs if there are several, else two cores of the CPU
    python -m benchmarks.dataparallel --rounds 3 --batches 64 1024

It shows where several devices begin to pay. On a CPU a "device" is one core: one replica with one
thread, DataParallel (the eight steps by hand) with one thread per replica, DDP with one process of
one thread per core. Two more ways are measured there: one replica with all cores, and as many
processes that exchange nothing, each with its chunk: what several cores can do without GIL and
exchange. Processes that a way does not need wait in a barrier meanwhile; the time is that of the
slowest process. The model is `DigitNet` on 28x28 pixels. Besides the seconds:

* the milliseconds of each of the eight steps, and of each thread in forward and backward;
* CUDA: each device's peak memory and mean utilisation (by nvidia-smi), at the last batch.
"""

import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from tyro.conf import OmitArgPrefixes

from benchmarks.harness import RanksMeasurement, facts, medians, save, speedups
from benchmarks.ranks import Step, on_ranks, time_steps, wait_for_devices
from common.data.models import DigitNet
from common.launch.args import start
from common.launch.cgroup import cores
from common.launch.flags import Launch, at_least
from common.launch.place import Place
from common.train.amp import MixedPrecision
from common.train.precision import Precision
from examples.mnist_dataparallel.eight_steps import EightSteps, Net
from examples.mnist_dataparallel.engines import TorchDataParallel
from examples.mnist_dataparallel.explain import Explanation

ONE, ALL, BARE = "one device", "one replica, all cores", "processes without exchange"
DP, HAND, DDP = "nn.DataParallel", "eight steps by hand", "DDP"
WATCHED = 3  # iterations before the one whose steps are measured
Engine = TypeVar("Engine", EightSteps, TorchDataParallel)


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    rounds: int = 7
    batches: tuple[int, ...] = (8, 32, 128, 512, 2048)
    """Global batch sizes."""
    replicas: int = 2
    """Replicas and processes on a CPU; with GPUs it is their number."""
    chart: Path = Path("docs/images/mnist_dataparallel.png")
    """File for the chart."""
    launch: OmitArgPrefixes[Launch] = Launch(nproc=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, replicas=self.replicas, batches=min(self.batches, default=0))


class Ways:
    """A training step of each way, on a global batch of so many images."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.device, cuda = device, device.type == "cuda"
        count = dist.get_world_size()
        self.devices = [torch.device("cuda", n) if cuda else device for n in range(count)]
        self.images, self.labels = torch.randn(batch, 1, 28, 28), torch.arange(batch) % 10
        self.alone = (ONE, HAND, DP if cuda else ALL)
        self.steps: dict[str, Step] = dict.fromkeys(self.alone, lambda: None)
        if dist.get_rank() == 0:
            self.steps[ONE], _ = self.with_engine(EightSteps, 1)
            self.steps[HAND], self.engine = self.with_engine(EightSteps, count)
            if cuda:
                self.steps[DP], _ = self.with_engine(TorchDataParallel, count)
            else:
                self.steps[ALL] = partial(with_threads, cores(), self.with_engine(EightSteps, 1)[0])
        self.steps[DDP] = self.in_processes(exchange=True)
        if not cuda:
            self.steps[BARE] = self.in_processes(exchange=False)

    def net(self) -> tuple[Net, SGD]:
        """A model and its optimizer."""
        torch.manual_seed(0)
        amp = MixedPrecision(Precision("fp32"), self.device)
        net = Net(amp.move(DigitNet(28)), nn.CrossEntropyLoss(reduction="sum"), amp)
        return net, SGD(net.parameters(), 0.01, momentum=0.9)

    def with_engine(self, kind: type[Engine], count: int) -> tuple[Step, Engine]:
        """A step of one process with so many devices, and what does it."""
        net, optimizer = self.net()
        # The eight steps share these among their threads.
        torch.set_num_threads(1 if self.device.type == "cuda" else count)
        engine = kind(net, self.devices[:count], False)
        torch.set_num_threads(1)

        def step() -> None:
            engine.gradients(self.images, self.labels, 1 / len(self.images))
            optimizer.step()
            optimizer.zero_grad()

        return step, engine

    def in_processes(self, exchange: bool) -> Step:
        """A step of all processes, each with its chunk."""
        net, optimizer = self.net()
        ids = [self.device] if self.device.type == "cuda" else None
        model: nn.Module = DistributedDataParallel(net, device_ids=ids) if exchange else net
        rank, count = dist.get_rank(), dist.get_world_size()
        chunks = torch.arange(len(self.images)).chunk(count)
        mine = chunks[rank] if rank < len(chunks) else torch.arange(0)  # fewer samples than ranks
        images, labels = self.images[mine], self.labels[mine]

        def step() -> None:
            logits: Tensor = model(net.amp.to_device(images))
            loss = net.criterion(logits, labels.to(self.device))
            (loss * (count / len(self.images))).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def eight_steps(self, rounds: int) -> dict[str, Any]:
        """Milliseconds of each step by hand, and of each thread, in several iterations."""
        rows: dict[str, list[float]] = defaultdict(list)
        threads: list[list[float]] = []
        for number in range(rounds + WATCHED):
            watch = self.engine.explanation = Explanation(self.devices, 1)
            watch.begin()
            self.steps[HAND]()
            watch.did(8, "update")
            if number >= WATCHED:
                for step, _, milliseconds, _ in watch.rows:
                    rows[str(step)].append(milliseconds)
                threads.append([1e3 * busy for busy in watch.busy])
        return {"steps": rows, "threads": threads}

    def load(self, name: str, duration: float = 3.0) -> dict[str, Any]:
        """Each GPU's peak memory in bytes, mean utilisation in percent. Every rank calls this."""
        count, first = len(self.devices), dist.get_rank() == 0
        for number in range(count):
            torch.cuda.reset_peak_memory_stats(number)
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        watch = subprocess.Popen([*query, "-lms", "100"], stdout=subprocess.PIPE, text=True)
        deadline, over = time.monotonic() + duration, torch.zeros(1)
        while not over.item():  # as many steps in all processes
            for _ in range(10 if first or name not in self.alone else 0):
                self.steps[name]()
            wait_for_devices()
            over[0] = float(first and time.monotonic() > deadline)
            dist.all_reduce(over)
        watch.terminate()
        words = (watch.communicate()[0] or "").split()
        busy = [[float(word) for word in words[n::count] if word.isdigit()] for n in range(count)]
        memory = torch.tensor([float(torch.cuda.max_memory_allocated(n)) for n in range(count)])
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        means = [mean(each) if each else None for each in busy]
        return {"memory": memory.tolist(), "utilisation": means}


def with_threads(count: int, step: Step) -> None:
    """Do a step with so many threads of torch instead of one."""
    torch.set_num_threads(count)
    step()
    torch.set_num_threads(1)


def busy_shares(steps: Mapping[str, list[float]], threads: list[list[float]]) -> list[float]:
    """The share of the iteration in which each device is busy, by the milliseconds of each.

    Its thread is; and the first device with all other steps, too.
    """
    shares: list[list[float]] = []
    for number, (first, *rest) in enumerate(threads):
        spent = {step: values[number] for step, values in steps.items()}
        others = sum(value for step, value in spent.items() if step not in ("4", "6"))
        shares.append([one / sum(spent.values()) for one in (first + others, *rest)])
    return [round(median(values), 3) for values in zip(*shares, strict=True)]


def measure(args: Args, device: torch.device) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {"batches": {}}
    for batch in args.batches:
        ways, repeats = Ways(batch, device), max(2, min(20, 512 // batch))
        what = f"batch {batch}"
        found = {"seconds": time_steps(what, ways.steps, args.rounds, repeats, alone=ways.alone)}
        if dist.get_rank() == 0:
            found |= ways.eight_steps(args.rounds)
        dist.barrier()
        result["batches"][str(batch)] = found
        result["devices"] = list(map(str, ways.devices))
        if device.type == "cuda" and batch == args.batches[-1]:
            result["loads"] = {name: ways.load(name) for name in (ONE, DP, DDP)}
    return result


def main(place: Place, args: Args) -> None:
    """Measure, write the results, show them."""
    cpu = args.launch.device == "cpu" or args.launch.no_accel
    count = 0 if cpu else torch.cuda.device_count()
    if count < 2:  # one GPU shows nothing
        count, flags = args.replicas, replace(place.flags, device="cpu")
        place = replace(place, flags=flags)
    result = facts("torch") | {"rounds": args.rounds} | on_ranks(count, place, measure, args)
    for found in result["batches"].values():
        found["times_one_device"] = medians(speedups(found["seconds"], ONE))
        found["busy_share"] = busy_shares(found["steps"], found["threads"])
    save("dataparallel", result, args.out, args.chart)


if __name__ == "__main__":
    start(Args, "benchmarks.dataparallel:main", ["benchmarks.harness"])
