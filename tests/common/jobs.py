"""Jobs of several processes that the tests run: `python -m tests.common.jobs NAME [--nproc N]`."""

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tyro.conf import OmitArgPrefixes, Positional

from common.data.idx import digits
from common.data.samplers import GlobalBatchSampler
from common.launch import last_words
from common.launch import rendezvous as rendezvous_module
from common.launch.args import parse, start
from common.launch.cgroup import cores, machine
from common.launch.collectives import assert_same_on_all_ranks, local_rank0_first
from common.launch.errors import Stopped, UserError
from common.launch.flags import Launch
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.launch.who import watcher
from common.train.checkpoint import Checkpoints
from common.train.checks import CheckError, check_replicas, check_seen_once, parameter_hash
from common.train.ddp import warm_up_buckets
from common.train.evaluate import ordered_predictions
from common.train.run import Run
from common.train.seen import Sums
from common.train.stop import Stop
from examples.mnist_ddp_spawn.args import Args as MnistArgs


@dataclass(frozen=True)
class Args:
    """The flags of the jobs."""

    name: Annotated[str, Positional]
    """Which job."""
    folder: Path = Path()
    """Where it may write."""
    warm_up: bool = True
    """Whether to warm up DDP's buckets first."""
    launch: OmitArgPrefixes[Launch] = Launch()


def put(line: object) -> None:
    """Print a line at once: print() writes the end of the line separately, and another rank's may come between."""
    os.write(1, f"{line}\n".encode())


def place_job(args: Args) -> None:
    """Report the place, and what only the operating system knows of it."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() * (dist.get_world_size() + 1) / 2
    put(f"rank {dist.get_rank()}/{dist.get_world_size()} threads {torch.get_num_threads()}")


def ordered(args: Args) -> None:
    """Rows return to dataset order for lengths that the world size does and does not divide, and for none."""
    for total in (0, 1, 2, 3, 5, 8, 13):
        whole = torch.arange(total * 3, dtype=torch.float32).reshape(total, 3)
        mine = whole[dist.get_rank() :: dist.get_world_size()]
        torch.testing.assert_close(ordered_predictions(mine, total), whole, rtol=0, atol=0)


def first(args: Args) -> None:
    """One process per node works while the others wait, and each finds the work done."""
    marker = args.folder / "done"
    with local_rank0_first("work"):
        if os.environ["LOCAL_RANK"] == "0":
            assert not marker.exists()
            time.sleep(0.5)
            with marker.open("x") as file:
                file.write("once")
        assert marker.read_text() == "once"
    if args.name == "first_of_two":
        with local_rank0_first("slow on one node"):
            if os.environ["LOCAL_RANK"] == "0":
                if os.environ["GROUP_RANK"] == "1":
                    time.sleep(1)
                (args.folder / "slow").touch()
            assert (args.folder / "slow").exists(), "the first of the other node does not count"
        dist.barrier()  # the node with the store does not leave earlier
    if args.name == "first_fails":
        with local_rank0_first("failing"):
            assert os.environ["LOCAL_RANK"] == "0", "the others never get here"
            raise UserError("the download failed")


class SlowStore(dist.Store):
    """The store of a rank that reads its peers' addresses when they have long read its own."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        time.sleep(0.3)
        return self.store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.store.wait(keys, timeout or timedelta(minutes=1))


def mistake(args: Args) -> None:
    """All ranks meet a mistake of the user; the last one is still connecting when the others do."""
    store, rank, size = next(rendezvous(JOB, timeout=args.launch.patience))
    store = SlowStore(store) if rank == size - 1 else store
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=args.launch.patience)
    raise UserError("--colour: not a colour")


def signalled_at_its_end(args: Args) -> None:
    """A signal comes when all ranks are already about to end."""
    speaks_first = last_words.speaks_first

    def signalled(busy: bool = False) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return speaks_first(busy)

    last_words.speaks_first = signalled  # ty: ignore[invalid-assignment]
    raise UserError("--colour: not a colour")


def disagree(args: Args) -> None:
    """Ranks that hold different values stop."""
    assert assert_same_on_all_ranks(7, "the answer") == 7
    assert_same_on_all_ranks(dist.get_rank() % 2, "the step to resume from")


def raises(args: Args) -> None:
    """One rank fails while the others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("a bug in one rank")
    dist.barrier()


def says(args: Args) -> None:
    """The backend of one rank says what WORDS has."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise dist.DistBackendError(os.environ["WORDS"])
    dist.barrier()


def greedy(args: Args) -> None:
    """One rank asks for more memory than there is while the others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.empty(1 << 50)
    dist.barrier()


def dies(args: Args) -> None:
    """One rank is killed while the others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def aborts(args: Args) -> None:
    """One rank is ended by an assertion in C++."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os.abort()
    dist.barrier()


def abandoned(args: Args) -> None:
    """One rank waits alone, and is ended as by the watchdog of nccl, which does it in a thread of its own."""
    patient = dist.new_group(timeout=timedelta(seconds=60))  # gloo itself would raise an exception
    assert isinstance(patient, dist.ProcessGroup)
    if dist.get_rank() == dist.get_world_size() - 1:
        work = dist.all_reduce(torch.ones(3), group=patient, async_op=True)
        assert work is not None
        threading.Timer(args.launch.timeout + 0.2, os.abort).start()  # the call has been recorded
        work.wait()
    time.sleep(30)


def quiet(args: Args) -> None:
    """All ranks do nothing after a collective until each has looked for one that has not ended."""
    dist.all_reduce(torch.ones(3))
    assert watcher.watching is not None
    while watcher.watching._active[0] == 0:  # it looks when nothing has happened for a second
        time.sleep(0.1)
    put([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])


def ignores(args: Args) -> None:
    """All ranks sleep, and are stopped before they train."""
    put("sleeping")
    time.sleep(60)


def waits(args: Args) -> None:
    """Rank 0 waits in C++, as for a process that has gone while groups are made; there no handler in Python runs."""
    if dist.get_rank() == 0:
        put("waiting")
        store = rendezvous_module.joined
        assert store is not None
        store.wait(["never"])
    time.sleep(60)


def stops(args: Args) -> None:
    """A signal to one rank stops all ranks after the same step."""
    if dist.get_rank() == dist.get_world_size() - 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with Stop() as stop:
        for step in range(10_000):
            time.sleep(0.002 * (1 + dist.get_rank()))
            if signum := stop.agreed():
                (args.folder / f"stopped-{dist.get_rank()}").write_text(str(step))
                assert_same_on_all_ranks(step, "the step")
                time.sleep(0.2 * dist.get_rank())  # rank 0 may host the store at which the others ask who speaks
                raise Stopped(signum, f"after step {step}")


def deaf(args: Args) -> None:
    """All ranks remember a signal, and come to no end of a step at which they would stop."""
    with Stop():
        put("deaf")
        while True:
            time.sleep(1)


def checks(args: Args) -> None:
    """The checks hold for a true run and fail for false ones."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    assert check_replicas(model) == parameter_hash(model)
    check_seen_once(
        torch.tensor([int(i % dist.get_world_size() == dist.get_rank()) for i in range(7)], dtype=torch.int32)
    )
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.bias[0] += 1e-7
    for check in (
        lambda: check_replicas(model),
        lambda: check_seen_once(torch.zeros(4, dtype=torch.int32)),
        lambda: check_seen_once(torch.ones(4, dtype=torch.int32)),
    ):
        try:
            check()
        except CheckError as error:
            put(error)
        else:
            raise AssertionError("a false run was accepted")


def sums(args: Args) -> None:
    """The proof by sums, of true epochs and of false ones; rank 1 makes the mistakes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(1000)[rank::size]

    def proof(what: str, *parts: torch.Tensor, before: list[int] | None = None) -> None:
        noted = Sums(1000, before or [])
        for part in parts:
            noted.add(part)
        try:
            noted.check(True)
        except CheckError as error:
            put(f"{what}: {error}")
        else:
            put(f"{what}: fine")

    wrong = {
        "none": mine,
        "lost": mine[1:],
        "doubled": torch.cat([mine, mine[:1]]),
        "swapped": torch.cat([mine[1:], mine[1:2]]),
        "several": mine[3:],
        "one too few": torch.cat([mine[2:], mine[2:3]]),
        "foreign": torch.cat([mine[1:], torch.tensor([5000])]),
    }
    for what, samples in wrong.items():
        proof(what, *(samples if rank == 1 else mine).split(64))
    half = Sums(1000)
    half.add(mine[:100])
    half = Sums(1000, half.so_far(True))  # resumed, and stopped again
    half.add(mine[100:200])
    before = half.so_far(rank < size)
    proof("resumed", mine[200:], before=before)
    proof("resumed, one lost", mine[200:][mine[200:] != 999], before=before)


class Net(nn.Module):
    """A net whose gradients become ready in another order than its parameters are registered in, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)
        self.first = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, 10] of rows [N, 32]."""
        return self.last(self.dropout(torch.relu(self.norm(self.first(rows)))))


def resumes(args: Args) -> None:
    """Six steps in one go equal three steps, a checkpoint, and three steps in a new wrapper: bit for bit."""
    config = {"a": 1}

    def prepare() -> tuple[DistributedDataParallel, torch.optim.Optimizer, Checkpoints]:
        torch.manual_seed(5)
        ddp = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
        parts = {"model": ddp.module, "optimizer": optimizer}
        checkpoints = Checkpoints(args.folder / "checkpoints", parts, config)
        if args.warm_up:
            state = {name: value.clone() for name, value in ddp.module.state_dict().items()}
            random = torch.get_rng_state()
            warm_up_buckets(ddp)
            for name, value in ddp.module.state_dict().items():
                torch.testing.assert_close(value, state[name], rtol=0, atol=0)
            assert all(parameter.grad is None for parameter in ddp.parameters())
            assert torch.equal(random, torch.get_rng_state())
        torch.manual_seed(100 + dist.get_rank())
        return ddp, optimizer, checkpoints

    def steps(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
            rows = torch.randn(8, 32, generator=generator)
            optimizer.zero_grad()
            ddp(rows).square().mean().backward()
            optimizer.step()

    ddp, optimizer, _ = prepare()
    steps(ddp, optimizer, range(6))
    expected = check_replicas(ddp.module.first)

    ddp, optimizer, checkpoints = prepare()
    steps(ddp, optimizer, range(3))
    checkpoints.save({"step": 3})
    checkpoints.wait()
    ddp, optimizer, checkpoints = prepare()
    torch.manual_seed(999)  # the checkpoint brings the random state back
    found = checkpoints.load("auto")
    assert found is not None
    assert found.state["progress"] == {"step": 3}
    steps(ddp, optimizer, range(3, 6))
    put("identical" if check_replicas(ddp.module.first) == expected else "different")


def losses_of_an_epoch(args: Args) -> None:
    """An epoch in one go, and stopped after each of its steps: the loss of its line."""
    data = digits()
    sampler = GlobalBatchSampler(len(data.train), 360, 0)
    loader = DataLoader(data.train, batch_sampler=sampler, collate_fn=data.collate)

    def train(out: Path, last: int) -> None:
        flags = ["--out", str(out), "--precision", "fp32", "--resume", "auto", "--batch-size", "360"]
        with Run(parse(MnistArgs, flags), torch.device("cpu"), data) as run:
            run.resume(model=nn.Linear(1, 1))
            run._unchecked = None  # nothing is trained
            run._stop.agreed = lambda: signal.SIGTERM if run.state.step == last else 0
            for _ in run.epochs(1):
                for _ in run.steps(loader):
                    run.log(torch.tensor(float(run.state.step * (dist.get_rank() + 1))))
                run.end_epoch({"accuracy": 0.5})

    for stop in range(len(loader) + 1):
        out = args.folder / f"stop-{stop}"
        if stop:
            with contextlib.suppress(Stopped):
                train(out, stop)
        train(out, 0)


def sockets(args: Args) -> None:
    """Stay long enough for the sockets to be looked at."""
    dist.barrier()
    (args.folder / f"ready-{dist.get_rank()}").touch()
    while not (args.folder / "enough").exists():
        time.sleep(0.05)


def digest(args: Args) -> None:
    """Who shares the machine decides the number of threads."""
    name = hashlib.sha256(machine().encode()).hexdigest()[:8]
    put(f"machine {name} cores {cores()} threads {torch.get_num_threads()}")
    dist.barrier()  # who is ready first must not leave while the other still connects


JOBS = {
    "place": place_job,
    "ordered": ordered,
    "first": first,
    "first_fails": first,
    "first_of_two": first,
    "mistake": mistake,
    "signalled_at_its_end": signalled_at_its_end,
    "disagree": disagree,
    "raises": raises,
    "says": says,
    "greedy": greedy,
    "dies": dies,
    "aborts": aborts,
    "abandoned": abandoned,
    "quiet": quiet,
    "ignores": ignores,
    "waits": waits,
    "stops": stops,
    "deaf": deaf,
    "checks": checks,
    "sums": sums,
    "resumes": resumes,
    "losses_of_an_epoch": losses_of_an_epoch,
    "sockets": sockets,
    "digest": digest,
}


def main(place: Place, args: Args) -> None:
    """Start the processes of a job."""
    launch(early if args.name == "early" else main_worker, place, args)


def early(local_rank: int, place: Place, args: Args) -> None:
    """Fail outside of `record`."""
    raise ValueError("before the frame")


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of a job."""
    place.export(local_rank)
    if args.name != "mistake":
        dist.init_process_group("gloo", init_method=JOB, timeout=args.launch.patience)
    JOBS[args.name](args)
    dist.destroy_process_group()


if __name__ == "__main__":
    start(Args, "tests.common.jobs:main")
