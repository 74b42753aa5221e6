"""Measure costs that grow with the job: startup, rendezvous, `Run` in a step, and checkpoints.

    python -m benchmarks.scale

All ranks run on this machine. They are forked from this process, so they do not import torch, and
join via a TCP port, like under torchrun. The time of the rendezvous begins when the last rank has
started. The time of the process group begins with the start of the first rank, and ends with a sum
over all ranks. A loop with `Run` is compared with the loop alone in the same processes, in
processor time of all threads, with steps of 5 ms.
"""

import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch warns about each client without a host name
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Claim, Measurement, Result, Table, compare, on_ranks, ratio, timed
from common import checkpoint
from common.launch import Place, RunArgs
from common.rank import wait_for_ranks
from common.run import Run

STEP = 0.005  # seconds of processor time
LIMITS = {2: 2.0, 8: 4.0}  # percent of a step that `Run` may add, by number of ranks
ALONE, OURS = "loop alone", "with Run"
RENDEZVOUS = 5.0  # maximum seconds for 64 ranks
CHECKPOINT = 1.5  # maximum time relative to writing the same number of bytes


def start(ranks: int) -> float:
    """Return the seconds from the command to the end of a run with 11 steps."""
    with tempfile.TemporaryDirectory() as out:
        words = ("--nproc", ranks, "--epochs", 1, "--device", "cpu", "--out", out)
        began = time.perf_counter()
        harness.run(("python", "-m", "examples.mnist_ddp_spawn", *words))
        return time.perf_counter() - began


def join(
    rank: int, ranks: int, group: bool, began: float, port: int, ready: Barrier, result: Connection
) -> None:
    """Join the rendezvous as one rank, and the process group if `group`; send the seconds."""
    # torch looks up the host name of each connection, and an unreachable name server costs 5 s.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # gloo opens three files per rank
    here = Place(rank, rank, ranks, ranks, f"tcp://127.0.0.1:{port}")
    ready.wait()
    began = began if group else time.perf_counter()
    store = wait_for_ranks(here, 120.0)
    if group:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        dist.all_reduce(torch.ones(1))
    result.send(time.perf_counter() - began)
    ready.wait()  # wait for all ranks, because rank 0 hosts the store


def rendezvous(ranks: int, group: bool = False) -> float:
    """Return the seconds of the rendezvous, or from the first rank's start to the first sum."""
    context = mp.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    ready = context.Barrier(ranks)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    args = (ranks, group, time.perf_counter(), port, ready, send)
    mp.start_processes(join, args, ranks, start_method="fork")
    return max(receive.recv() for _ in range(ranks))


class Batches:
    """A loader that takes almost no time."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.steps))


def added_time(batches: Iterable[int], steps: int, log: Callable[[Tensor], object]) -> float:
    """Return the slowest rank's overhead per step, in milliseconds. Every rank calls this."""
    loss, model, inputs = torch.tensor(1.0), nn.Linear(64, 64), torch.randn(16, 64)
    skipped, began, computed = steps // 4, 0.0, 0.0
    for number, _ in enumerate(batches):
        if number == skipped:  # `Run` has chosen how often to exchange signals
            began, computed = time.process_time(), 0.0
        start = time.thread_time()
        while time.thread_time() - start < STEP:
            model(inputs).square().mean().backward()
        computed += time.thread_time() - start
        log(loss)
    added = torch.tensor((time.process_time() - began - computed) / (steps - skipped))
    dist.all_reduce(added, dist.ReduceOp.MAX)
    return 1e3 * added.item()


def compare_loops(out: Path, steps: int, rounds: int) -> dict[str, list[float]]:
    """Time a loop alone and with `Run`, in milliseconds per step. Every rank calls this."""
    batch_size = dist.get_world_size()
    args = RunArgs(device="cpu", batch_size=batch_size, checkpoint_every=1 << 40, out=out)
    run = Run(args, torch.device("cpu"), "no data", model=nn.Linear(1, 1))

    def with_run() -> float:
        run.batch = 0
        return added_time(run.steps(Batches(steps)), steps, run.log)

    alone = partial(added_time, Batches(steps), steps, id)
    return compare({ALONE: alone, OURS: with_run}, rounds, "ms per step")


def compare_checkpoints(megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds for saving a model, and for writing the same number of bytes."""
    state = {"parts": {"model": {"weight": torch.rand(megabytes, 1 << 18)}}}
    data = state["parts"]["model"]["weight"].numpy().data
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder, "step-00000001.pt")

        def write() -> None:
            with Path(folder, "bytes").open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        steps: dict[str, Callable[[], object]] = {
            "write and flush": write,
            "save": partial(checkpoint.save, path, state),
        }
        checkpoint.save(path, state)
        steps["load and check"] = partial(checkpoint.load, path)
        programs = {name: partial(timed, step, 1, 0) for name, step in steps.items()}
        return compare(programs, rounds)


def measure(args: Measurement) -> Result:
    """Measure all costs; the largest numbers of ranks are skipped with --quick."""
    rounds = 1 if args.quick else args.rounds
    sizes, starts, steps, megabytes = (8, 32, 64, 128, 512), (1, 8), 400, 1024
    if args.quick:
        sizes, starts, steps, megabytes = (8, 64), (2,), 80, 64
    joined = compare({f"{n} ranks": partial(rendezvous, n) for n in sizes}, rounds)
    grouped = compare({f"{n} ranks": partial(rendezvous, n, True) for n in sizes[:4]}, rounds)
    if not args.quick:  # gloo connects every pair: 7 GiB and 270,000 open files
        grouped |= compare({"512 ranks": partial(rendezvous, 512, True)}, 1)
    started = compare({f"{n} ranks": partial(start, n) for n in starts}, rounds)
    tables = {
        "Rendezvous": Table("s", joined),
        "Start, rendezvous, process group and first sum": Table("s", grouped),
        "A run of 11 steps": Table("s", started),
    }
    medians = harness.medians(joined)
    claims = [Claim("rendezvous of 64 ranks", medians["64 ranks"], RENDEZVOUS, "s", at_most=True)]
    for ranks, limit in LIMITS.items():
        with tempfile.TemporaryDirectory() as out:
            samples = on_ranks(ranks, compare_loops, Path(out), steps, rounds)
        tables[f"Processor time beyond 5 ms per step, {ranks} ranks"] = Table("ms", samples)
        middle = harness.medians(samples)
        percent = (middle[OURS] - middle[ALONE]) / (10 * STEP)
        claims.append(
            Claim(f"`Run` adds to a step of 5 ms, {ranks} ranks", percent, limit, "%", True)
        )
    samples = compare_checkpoints(megabytes, rounds)
    tables[f"Checkpoint of {megabytes} MB"] = Table("s", samples)
    text = f"saving {megabytes} MB, relative to a write of the bytes"
    claims.append(Claim(text, ratio(samples, "save", "write and flush"), CHECKPOINT, at_most=True))
    return Result({"steps of each loop": steps}, tables, claims)


if __name__ == "__main__":
    harness.main("scale", measure)
