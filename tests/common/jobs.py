"""Jobs of several processes that the tests run: `python -m tests.common.jobs NAME [--nproc N]`."""

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

from tyro.conf import OmitArgPrefixes, Positional

from common.flags import begin
from common.launcher import Launch, Place


@dataclass(frozen=True)
class Args:
    """The flags of the jobs."""

    name: Annotated[str, Positional]
    """Which job."""
    folder: Path = Path()
    """Where it may write."""
    settle: bool = True
    """Whether to settle DDP's buckets first."""
    launch: OmitArgPrefixes[Launch] = Launch()


if __name__ == "__main__":
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import distributed
from common.checkpoint import Checkpoints
from common.distributed import Stop, World, agree, launch, main_first, settle, taking_part
from common.errors import Stopped, UserError
from common.metrics import ordered_predictions
from common.proof import ProofError, parameter_hash, prove_replicas_agree, prove_seen_once


def put(line: object) -> None:
    """Print a line at once: print() writes the end of the line separately, and another rank's may come between."""
    os.write(1, f"{line}\n".encode())


def place_job(world: World, args: Args) -> None:
    """Report the place, and what only the operating system knows of it."""
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == world.size * (world.size + 1) / 2
    put(f"rank {world.rank}/{world.size} threads {torch.get_num_threads()}")


def ordered(world: World, args: Args) -> None:
    """Rows return to dataset order for lengths that the world size does and does not divide, and for none."""
    for total in (0, 1, 2, 3, 5, 8, 13):
        whole = torch.arange(total * 3, dtype=torch.float32).reshape(total, 3)
        mine = whole[world.rank :: world.size]
        torch.testing.assert_close(ordered_predictions(mine, total, world), whole, rtol=0, atol=0)


def first(world: World, args: Args) -> None:
    """One process per node works while the others wait, and each finds the work done."""
    marker = args.folder / "done"
    with main_first(world, "work"):
        if world.local_rank == 0:
            assert not marker.exists()
            time.sleep(0.5)
            with marker.open("x") as file:
                file.write("once")
        assert marker.read_text() == "once"
    if args.name == "first_fails":
        with main_first(world, "failing"):
            assert world.local_rank == 0, "the others never get here"
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


def mistake(world: World, args: Args) -> None:
    """All ranks meet a mistake of the user; the last one is still connecting when the others do."""
    store = SlowStore(world.store) if world.rank == world.size - 1 else world.store
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    raise UserError("--colour: not a colour")


def signalled_at_its_end(world: World, args: Args) -> None:
    """A signal comes when all ranks are already about to end."""
    speaks_first = distributed._speaks_first

    def signalled(world: World | None, place: Place, busy: bool = False) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return speaks_first(world, place, busy)

    distributed._speaks_first = signalled  # ty: ignore[invalid-assignment]
    raise UserError("--colour: not a colour")


def disagree(world: World, args: Args) -> None:
    """Ranks that hold different values stop."""
    assert agree(world, 7, "the answer") == 7
    agree(world, world.rank % 2, "the step to resume from")


def raises(world: World, args: Args) -> None:
    """One rank fails while the others wait for it."""
    if world.rank == world.size - 1:
        raise ValueError("a bug in one rank")
    dist.barrier()


def greedy(world: World, args: Args) -> None:
    """One rank asks for more memory than there is while the others wait for it."""
    if world.rank == world.size - 1:
        torch.empty(1 << 50)
    dist.barrier()


def dies(world: World, args: Args) -> None:
    """One rank is killed while the others wait for it."""
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def ignores(world: World, args: Args) -> None:
    """All ranks sleep, and are stopped before they train."""
    put("sleeping")
    time.sleep(60)


def waits(world: World, args: Args) -> None:
    """Rank 0 waits in C++, as for a process that has gone while groups are made; there no handler in Python runs."""
    if world.is_main:
        put("waiting")
        world.store.wait(["never"])
    time.sleep(60)


def stops(world: World, args: Args) -> None:
    """A signal to one rank stops all ranks after the same step."""
    if world.rank == world.size - 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with Stop() as stop:
        for step in range(10_000):
            time.sleep(0.002 * (1 + world.rank))
            if signum := stop.agreed():
                (args.folder / f"stopped-{world.rank}").write_text(str(step))
                agree(world, step, "the step")
                time.sleep(0.2 * world.rank)  # rank 0 may host the store at which the others ask who speaks
                raise Stopped(signum, f"after step {step}")


def proofs(world: World, args: Args) -> None:
    """The proofs hold for a true run and fail for false ones."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    assert prove_replicas_agree(model, world) == parameter_hash(model)
    prove_seen_once(torch.tensor([int(i % world.size == world.rank) for i in range(7)], dtype=torch.int32))
    if world.rank == 1:
        with torch.no_grad():
            model.bias[0] += 1e-7
    for check in (
        lambda: prove_replicas_agree(model, world),
        lambda: prove_seen_once(torch.zeros(4, dtype=torch.int32)),
        lambda: prove_seen_once(torch.ones(4, dtype=torch.int32)),
    ):
        try:
            check()
        except ProofError as error:
            put(error)
        else:
            raise AssertionError("a false run was accepted")


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


def resumes(world: World, args: Args) -> None:
    """Six steps in one go equal three steps, a checkpoint, and three steps in a new wrapper: bit by bit."""
    config = {"a": 1}

    def prepare() -> tuple[DistributedDataParallel, torch.optim.Optimizer, Checkpoints]:
        torch.manual_seed(5)
        ddp = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
        parts = {"model": ddp.module, "optimizer": optimizer}
        checkpoints = Checkpoints(args.folder / "checkpoints", parts, config, world)
        if args.settle:
            state = {name: value.clone() for name, value in ddp.module.state_dict().items()}
            random = torch.get_rng_state()
            settle(ddp, torch.zeros(4, 32))
            for name, value in ddp.module.state_dict().items():
                torch.testing.assert_close(value, state[name], rtol=0, atol=0)
            assert all(parameter.grad is None for parameter in ddp.parameters())
            assert torch.equal(random, torch.get_rng_state())
        torch.manual_seed(100 + world.rank)
        return ddp, optimizer, checkpoints

    def steps(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            generator = torch.Generator().manual_seed(step * world.size + world.rank)
            rows = torch.randn(8, 32, generator=generator)
            optimizer.zero_grad()
            ddp(rows).square().mean().backward()
            optimizer.step()

    ddp, optimizer, _ = prepare()
    steps(ddp, optimizer, range(6))
    expected = prove_replicas_agree(ddp.module.first, world)

    ddp, optimizer, checkpoints = prepare()
    steps(ddp, optimizer, range(3))
    checkpoints.save({"step": 3})
    checkpoints.wait()
    ddp, optimizer, checkpoints = prepare()
    torch.manual_seed(999)  # the checkpoint brings the random state back
    found = checkpoints.load("auto")
    assert found is not None
    assert found.progress == {"step": 3}
    steps(ddp, optimizer, range(3, 6))
    put("identical" if prove_replicas_agree(ddp.module.first, world) == expected else "different")


def sockets(world: World, args: Args) -> None:
    """Stay long enough for the sockets to be looked at."""
    dist.barrier()
    (args.folder / f"ready-{world.rank}").touch()
    while not (args.folder / "enough").exists():
        time.sleep(0.05)


def digest(world: World, args: Args) -> None:
    """Who shares the machine decides the number of threads."""
    name = hashlib.sha256(distributed.machine().encode()).hexdigest()[:8]
    put(f"machine {name} cores {distributed.cores()} threads {torch.get_num_threads()}")


JOBS = {
    "place": place_job,
    "ordered": ordered,
    "first": first,
    "first_fails": first,
    "mistake": mistake,
    "signalled_at_its_end": signalled_at_its_end,
    "disagree": disagree,
    "raises": raises,
    "greedy": greedy,
    "dies": dies,
    "ignores": ignores,
    "waits": waits,
    "stops": stops,
    "proofs": proofs,
    "resumes": resumes,
    "sockets": sockets,
    "digest": digest,
}


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of a job."""
    if args.name == "early":
        raise ValueError("before the frame")
    with taking_part(place, local_rank) as world:
        if args.name != "mistake":
            dist.init_process_group(
                world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
            )
        JOBS[args.name](world, args)


if __name__ == "__main__":
    sys.exit(launch(main_worker, place, args))
