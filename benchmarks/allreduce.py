"""All-reduces by hand compared with torch's: time against message size, and a step of ResNet-18.

    python -m benchmarks.allreduce        # 2 and 4 processes on this machine; it should be quiet
    python -m benchmarks.allreduce --starts 1 --rounds 3 --steps 0 --ranks 2

The time is that of the slowest rank. Which memory a process gets moves ratios by a tenth until it
ends, so the processes are started several times. Measured in the same run:

* bounded buffers: torch's all-reduce and DDP over connections whose send buffers hold 1 MiB;
* memory: all ranks add two arrays of 64 MiB into a third at the same time, bytes read and written
  per second; in every round of messages of 1 MiB and more, since the bandwidth that other programs
  leave changes;
* loopback: all ranks send to their right and receive from their left over plain TCP sockets.

The last two give the dashed lines of the chart: a ring sends 2 (W - 1) / W of the bytes; the sum in
shared memory reads S and writes S / W bytes per rank. Python threads
move the bytes over loopback, so gloo can be faster than that line.
"""

import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from benchmarks.harness import RanksMeasurement, facts, medians, save, speedups
from benchmarks.ranks import Step, on_ranks, time_steps, training_step
from common.launch.args import start
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.launch.place import Place, current
from examples.manual_allreduce_sgd.allreduce import backend, recursive_doubling, ring
from examples.manual_allreduce_sgd.fast_ring import FastRing
from examples.manual_allreduce_sgd.gradients import averaging
from examples.manual_allreduce_sgd.shared_memory import SharedMemory

MIB = 1 << 20
RESNET18 = 4 * 11_689_512  # bytes of its parameters
SIZES = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, MIB, 4 * MIB, 16 * MIB, RESNET18, 64 * MIB]
TORCH, IN_PLACE, MEMORY = "dist.all_reduce", "shared memory, in place", "memory"
BOUNDED = "bounded buffers"
BY_HAND = ("per-parameter", "flat", "ring", "fast-ring", "bucketed", "shared-memory", "ddp")
STEPS = ("none", *BY_HAND, f"ddp, {BOUNDED}")


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    rounds: int = 7
    ranks: tuple[int, ...] = (2, 4)
    """Numbers of processes to measure message sizes with."""
    starts: int = 3
    """Times that the processes are started anew."""
    steps: int = 21
    """Measurements of each training step and start, with 2 processes; 0 leaves them out."""
    batch: int = 1
    """Images of 224x224 pixels per process and step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, starts=self.starts, batch=self.batch)
        at_least(0, steps=self.steps)
        if min(self.ranks, default=0) < 2:
            raise UserError("--ranks: give numbers of processes from 2 up")


def bounded_group() -> dist.ProcessGroup | None:
    """A group of all ranks whose connections have send buffers of 1 MiB. Every rank calls this.

    Linux lets the send buffer of a connection grow to several megabytes; within a machine that is
    only memory for the kernel to look after. torch has no call that bounds it: the connections are
    the sockets that are new after the group has been made.
    """

    def sockets() -> set[int]:
        return {int(path.name) for path in Path("/dev/fd").iterdir() if path.is_socket()}

    before = sockets()
    group = dist.new_group(timeout=current().flags.patience)
    for descriptor in sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()  # one that listens has no peer: an OSError
            # Linux sets twice what it is asked for.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB // 2)
    return group if isinstance(group, dist.ProcessGroup) else None


def loopback_bandwidth() -> float:
    """Bytes per second over TCP while all ranks send to their right and receive from their left."""
    listener = socket.create_server(("127.0.0.1", 0))
    ports: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(ports, listener.getsockname()[1])
    address = ("127.0.0.1", ports[(dist.get_rank() + 1) % dist.get_world_size()])
    right, (left, _) = socket.create_connection(address), listener.accept()
    outgoing, incoming = bytearray(64 * MIB), memoryview(bytearray(4 * MIB))

    def transfer() -> None:
        sender = threading.Thread(target=right.sendall, args=(outgoing,))
        sender.start()
        rest = len(outgoing)
        while rest:
            rest -= left.recv_into(incoming)
        sender.join()

    found = time_steps("plain TCP", {"64 MiB": transfer}, rounds=7)
    for each in (listener, left, right):
        each.close()
    return len(outgoing) / median(found["64 MiB"])


def measure_sizes(args: Args, _: torch.device) -> dict[str, Any]:
    """Seconds of every algorithm and size, and this machine's limits for this number of ranks."""
    memory = SharedMemory(64 * MIB, args.launch.patience)
    fast, bounded = FastRing(timeout=args.launch.patience), bounded_group()
    found: dict[str, Any] = {"memory": {}, "loopback": loopback_bandwidth(), "seconds": {}}
    one, two, three = (torch.ones(16 * MIB) for _ in range(3))
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        memory.local_tensor(len(tensor), tensor.dtype).zero_()  # so that no sum overflows
        ways: dict[str, Step] = {
            TORCH: partial(backend, tensor),
            f"{TORCH}, {BOUNDED}": partial(backend, tensor, bounded),
            "ring": partial(ring, tensor),
            "fast ring": partial(fast, tensor),
            "recursive doubling": partial(recursive_doubling, tensor),
            "shared memory, copies": partial(memory.all_reduce, tensor),
            IN_PLACE: partial(memory.sum, len(tensor), tensor.dtype),
        }
        if size >= MIB:
            ways[MEMORY] = partial(torch.add, one, two, out=three)
        repeats = max(1, min(20, 8 * MIB // size))
        what = f"{size / 1e6:.3f} MB"
        samples = time_steps(what, ways, args.rounds, repeats, memory.barrier)
        if size >= MIB:
            found["memory"][size] = [3 * one.nbytes / each for each in samples.pop(MEMORY)]
        found["seconds"][size] = samples
    return found | {"threads": torch.get_num_threads()}


def measure_steps(args: Args, _: torch.device) -> dict[str, Any]:
    """Seconds of a training step of ResNet-18, by every way to average its gradients."""
    steps = {}
    for name in STEPS:
        torch.manual_seed(0)
        images = torch.randn(args.batch, 3, 224, 224)
        # No buffers for DDP to send.
        norm = partial(nn.BatchNorm2d, track_running_stats=False)
        model: nn.Module = resnet18(norm_layer=norm)
        way = averaging(name, model, timeout=args.launch.patience) if name in BY_HAND else None
        if name == f"ddp, {BOUNDED}":
            group = bounded_group()
            model = DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=True
            )
        steps[name] = training_step(model, images, way)
    meet = SharedMemory(0, args.launch.patience).barrier
    spent = time_steps("training step", steps, args.steps, meet=meet)
    return {"seconds": spent, "threads": torch.get_num_threads()}


def joined(starts: list[Any]) -> Any:
    """What several starts found: lists one after the other, of other numbers the median."""
    first = starts[0]
    if isinstance(first, dict):
        return {name: joined([each[name] for each in starts]) for name in first}
    return list(chain(*starts)) if isinstance(first, list) else median(starts)


def times_limit(found: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """By size, the time of a sum in place over that of moving its bytes at memory bandwidth."""
    limits = {}
    for size, bandwidths in found["memory"].items():
        moved = (1 + 1 / ranks) * int(size)
        pairs = zip(found["seconds"][size][IN_PLACE], bandwidths, strict=True)
        limits[size] = round(median(spent * bandwidth / moved for spent, bandwidth in pairs), 3)
    return limits


def main(place: Place, args: Args) -> None:
    """Measure, write the results, show them."""
    result: dict[str, Any] = facts("torch", "torchvision") | {"sizes": {}, "step": None}
    for ranks in args.ranks:
        of = joined([on_ranks(ranks, place, measure_sizes, args) for _ in range(args.starts)])
        of["times_faster_than_torch"] = {
            size: medians(speedups(samples, TORCH)) for size, samples in of["seconds"].items()
        }
        result["sizes"][str(ranks)] = of | {"times_memory_limit": times_limit(of, ranks)}
    if args.steps:
        of = joined([on_ranks(2, place, measure_steps, args) for _ in range(args.starts)])
        faster = medians(speedups(of["seconds"], "ddp"))
        result["step"] = of | {"batch": args.batch, "times_faster_than_ddp": faster}
    save("allreduce", result, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.allreduce:main", ["benchmarks.harness"])
