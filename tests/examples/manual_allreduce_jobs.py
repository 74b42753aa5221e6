"""Jobs of several processes for test_manual_allreduce_sgd.py: `python -m tests.examples.manual_allreduce_jobs NAME`.

Starting processes takes seconds, and so each job does all that its processes can: every case, every algorithm.
"""

import contextlib
import importlib
import os
import socket
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional

from common.flags import begin
from common.launcher import Launch, Place
from common.precision import Precision


@dataclass(frozen=True)
class Args:
    """The flags of the jobs."""

    name: Annotated[str, Positional]
    """Which job."""
    folder: Path = Path()
    """Where it may write."""
    dataset: Path = Path()
    """What it trains on."""
    launch: OmitArgPrefixes[Launch] = Launch()


if __name__ == "__main__":
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import World, launch, taking_part
from common.report import Report
from examples.manual_allreduce_sgd import allreduce, gradients, shared_memory, train
from examples.manual_allreduce_sgd.allreduce import Circle
from examples.manual_allreduce_sgd.shared_memory import SharedMemory

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "int64": torch.int64}


@dataclass(frozen=True)
class Case:
    """One all-reduce, as every process computes it from the same few numbers."""

    ranks: tuple[int, ...]
    length: int
    dtype: str
    layout: str
    seed: int
    piece: int

    def tensor(self, rank: int) -> Tensor:
        """What a rank brings, in any layout."""
        generator = torch.Generator().manual_seed(self.seed * 100 + rank)
        values = torch.randint(-1000, 1000, (self.length, 2), generator=generator)
        dtype = DTYPES[self.dtype]
        whole = values if dtype == torch.int64 else (values / 64).to(dtype)
        layouts = {"flat": whole[:, 0].clone(), "column": whole[:, 0], "matrix": whole.clone(), "transposed": whole.t()}
        return layouts[self.layout]


class Checker:
    """All-reduces by hand against torch's, in one group of processes of which each case uses some."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.groups: dict[tuple[int, ...], Any] = {}
        self.circles: dict[tuple[int, ...], Circle] = {}  # used again, with other lengths and dtypes
        self.memories: dict[tuple[int, int], SharedMemory] = {}
        sizes = range(1, world.size + 1)
        for nodes, local in [(nodes, local) for nodes in sizes for local in sizes if nodes * local <= world.size]:
            if world.rank < nodes * local:  # as on `nodes` machines with `local` processes each
                size, node, local_rank = nodes * local, world.rank // local, world.rank % local
                place = replace(world.place, local_size=local, nodes=nodes, size=size)
                here = replace(world, size=size, nodes=nodes, node=node, local_rank=local_rank, place=place)
                SharedMemory._made = 100 * nodes + 10 * local  # the processes do not all make the same ones
                self.memories[nodes, local] = SharedMemory(here, capacity=640)
            else:
                Circle.of(world, range(0, nodes * local, local))  # all ranks take part in making a group

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Torch's group of the same ranks."""
        members = tuple(sorted(ranks))
        if members not in self.groups:
            self.groups[members] = dist.new_group(list(members))
        return self.groups[members]

    def circle(self, case: Case) -> Circle:
        """The circle of a case: all ranks make it, as a job's do."""
        if case.ranks not in self.circles:
            self.circles[case.ranks] = Circle.of(self.world, case.ranks)
        self.circles[case.ranks].in_order = case.seed % 2 == 1  # sends and receives handed over in pairs, as for nccl
        return self.circles[case.ranks]

    def check(self, case: Case, module: types.ModuleType = allreduce) -> list[str]:
        """What is wrong on this rank: every algorithm against dist.all_reduce, and the bytes that it sent."""
        vars(module)["PIECE"] = vars(shared_memory)["CHUNK"] = case.piece
        group, circle = self.group(case.ranks), self.circle(case)
        wrong: list[str] = []
        if self.world.rank not in case.ranks:
            return wrong
        expected = case.tensor(self.world.rank).contiguous()
        dist.all_reduce(expected, group=group)
        exact = torch.stack([case.tensor(rank).double() for rank in case.ranks]).sum(dim=0)
        size, bits = len(case.ranks), torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        magnitude = torch.stack([case.tensor(rank).double().abs() for rank in case.ranks]).sum(dim=0)
        algorithms: dict[str, Callable[[Tensor, Circle], None]] = {
            "ring": module.ring,
            "recursive_doubling": module.recursive_doubling,
        }
        if size == self.world.size:
            algorithms["backend"] = module.backend
        if case.ranks == tuple(range(size)):
            for (nodes, local), memory in self.memories.items():
                if nodes * local == size:
                    algorithms[f"shared memory {nodes}x{local}"] = memory.all_reduce
        for name, algorithm in algorithms.items():
            circle.bytes = circle.messages = 0
            found = case.tensor(self.world.rank)
            where = found.data_ptr()
            module.all_reduce(found, circle, algorithm)
            assert found.data_ptr() == where, "in place"
            if not ((found.double() - exact).abs() <= size * bits * magnitude).all():
                wrong.append(f"{name}: {found.tolist()}, exact {exact.tolist()}")
            if expected.dtype == torch.int64 and not torch.equal(found, expected):
                wrong.append(f"{name}: {found.tolist()}, torch {expected.tolist()}")
            everybody: list[Any] = [None] * size
            dist.all_gather_object(everybody, found.double().tolist(), group=group)
            if any(other != everybody[0] for other in everybody):
                wrong.append(f"{name}: the ranks hold different sums")
            total = found.nbytes
            if name == "ring" and found.numel() % size == 0 and circle.bytes != 2 * (size - 1) * total // size:
                wrong.append(f"ring: {circle.bytes} bytes sent, {total} summed")
            if name == "recursive_doubling" and size & (size - 1) == 0:
                steps = size.bit_length() - 1
                if circle.bytes != steps * total or circle.messages != (steps if total else 0):
                    wrong.append(f"recursive doubling: {circle.messages} messages, {circle.bytes} bytes")
        return wrong


def together(world: World, wrong: list[str]) -> list[str]:
    """What is wrong on any rank."""
    everybody: list[list[str]] = [[] for _ in range(world.size)]
    dist.all_gather_object(everybody, wrong)
    return [f"rank {rank}: {line}" for rank, lines in enumerate(everybody) for line in lines]


def properties(world: World, args: Args) -> None:
    """Hypothesis thinks out cases on rank 0, and all ranks compute them."""
    checker = Checker(world)
    if world.rank > 0:
        while True:
            shared: list[Any] = [None]
            dist.broadcast_object_list(shared)
            if shared[0] is None:
                return
            together(world, checker.check(shared[0]))

    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    sizes: set[int] = set()

    def ranks(size: int) -> Any:
        first = st.just(tuple(range(size)))
        return first | st.permutations(range(world.size)).map(lambda order: tuple(order[:size]))

    cases = st.builds(
        Case,
        ranks=st.integers(1, world.size).flatmap(ranks),
        length=st.integers(0, 9) | st.integers(0, 500),
        dtype=st.sampled_from(sorted(DTYPES)),
        layout=st.sampled_from(["flat", "column", "matrix", "transposed"]),
        seed=st.integers(0, 10**6),
        piece=st.sampled_from([8, 64, 1 << 22]),
    )

    @settings(max_examples=50, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases)
    def holds(case: Case) -> None:
        sizes.add(len(case.ranks))
        dist.broadcast_object_list([case])
        assert together(world, checker.check(case)) == []

    try:
        holds()
        assert sizes == set(range(1, world.size + 1))
        put(f"holds for {sorted(sizes)} ranks")
    finally:
        dist.broadcast_object_list([None])


# (name, module, before, after): each breaks one thing, and the check that must see it
MUTATIONS = [
    ("one chunk is skipped", "allreduce", "if number < adding:", "if pieces <= number < adding:"),
    ("a step is left out", "allreduce", "range(2 * (size - 1))]", "range(2 * (size - 1) - 1)]"),
    ("the wrong neighbour", "allreduce", "right, left = (me + 1) % size, (me - 1) % size",
     "right, left = (me - 1) % size, (me + 1) % size"),
    ("received, not added", "allreduce", "torch.add(piece, into[number], out=", "torch.mul(into[number], 1, out="),
    ("added in the second half, too", "allreduce", "if number < adding:", "if True:"),
    ("sent on without this rank's own", "allreduce", "            send(number + pieces, piece)",
     "            send(number + pieces, into[number])"),
    ("one partner is left out", "allreduce", "while distance < power:", "while distance * 2 < power:"),
    ("extra ranks are forgotten", "allreduce", "exchange(me + power, send=False, into=received)",
     "exchange(me + power, send=False, into=torch.empty_like(tensor))"),
    ("send buffers are not bounded", "allreduce", "[:1] == connection", "[:1] != connection"),
    ("a view is not copied back", "allreduce", "tensor.copy_(flat.view(tensor.shape))", "pass"),
    ("no division", "gradients", "parameter.grad /= self.world.size", "pass"),
    ("no division in the hook", "gradients", "1 / self.world.size", "1"),
    ("averages nothing", "gradients", "for parameter in self.parameters:\n            if",
     "for parameter in (p for p in self.parameters if type(p) is torch.Tensor):\n            if"),
    ("no division of the output's gradient", "gradients", "gradient / self.world.size", "gradient"),
    ("a bucket is one element short", "gradients", "all_reduce(message,", "all_reduce(message[:-1],"),
    ("buckets wait for the end", "gradients", "{parameter: number for", "{parameter: 0 for"),
    ("unused parameters keep old gradients", "gradients", "self._views[parameter].zero_()", "pass"),
]  # fmt: skip


def altered(name: str, old: str, new: str) -> types.ModuleType:
    """A module of the example in which one thing is changed."""
    original = importlib.import_module(f"examples.manual_allreduce_sgd.{name}")
    source = Path(str(original.__file__)).read_text()
    assert old in source, old
    module = types.ModuleType(original.__name__)
    exec(compile(source.replace(old, new), f"{name} altered", "exec"), module.__dict__)
    return module


class Net(nn.Module):
    """A net of which some parts are used by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def forward(self, rows: Tensor, used: int) -> Tensor:
        """Rows [N, 7] through the first layers."""
        for layer in self.layers[:used]:
            rows = layer(rows).tanh()
        return rows.square().sum()


def check_connections(world: World, module: types.ModuleType) -> list[str]:
    """The send buffers of a circle's connections are bounded; those of other groups are as they were."""

    def limits() -> list[int]:
        """Of the send buffers of all connections of this process."""
        found = []
        for name in (path.name for path in Path("/proc/self/fd").iterdir() if path.is_socket()):
            with socket.socket(fileno=os.dup(int(name))) as connection, contextlib.suppress(OSError):
                connection.getpeername()  # a socket that listens has no peer
                found.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        return found

    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, module.SEND_BUFFER // 2)
        bound = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)  # the system may allow less
    before = limits()
    module.Circle.of(world)
    made = limits().count(bound) - before.count(bound)
    return [] if made == 2 * (world.size - 1) else [f"{made} new connections have send buffers of {bound} bytes"]


def check_gradients(world: World, module: types.ModuleType, name: str) -> list[str]:
    """Two steps of a net against the gradients of all ranks' data in one process."""
    wrong: list[str] = []
    torch.manual_seed(3)
    net, alone = Net(), Net()
    alone.load_state_dict(net.state_dict())
    wire = torch.float32
    way = module.averaging(name, net, world, wire, 1e-4, torch.zeros(1))
    under_way: list[int] = []
    next(net.parameters()).register_hook(lambda _: under_way.append(len(getattr(way, "_works", []))))
    for step in range(2):
        rows = [torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world.size)]
        # Layer 3 is used in the first step only, layer 2 not by the last rank.
        used = [(4 - step) if rank < world.size - 1 else 2 for rank in range(world.size)]
        net.zero_grad()
        way.model(rows[world.rank], used[world.rank]).backward()
        if name == "bucketed" and used[world.rank] == 4 and under_way[-1] < 3:
            wrong.append(f"{under_way[-1]} buckets are under way before the last gradient is there")
        way.average()
        alone.zero_grad()
        sum(alone(one, layers) for one, layers in zip(rows, used, strict=True)).div(world.size).backward()
        for (key, mine), theirs in zip(net.named_parameters(), alone.parameters(), strict=True):
            reference = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            if mine.grad is None or not torch.allclose(mine.grad, reference, rtol=1e-5, atol=1e-6):
                wrong.append(f"{name}, step {step}: the gradient of {key} is wrong")
    return wrong


def mutations(world: World, args: Args) -> None:
    """Every mutation is seen, and nothing is seen in the code as it is."""
    checker = Checker(world)
    everyone = tuple(range(world.size))
    cases = [Case(everyone, 24, "float64", layout, 1, 16) for layout in ("flat", "column")]
    ways = ("per-parameter", "flat", "bucketed", "ring", "recursive-doubling", "shared-memory")

    def wrong(name: str, module: types.ModuleType) -> list[str]:
        found: list[str] = []
        try:
            if name == "allreduce":
                found += check_connections(world, module)
                for case in cases:
                    found += checker.check(case, module)
            else:
                for way in ways:
                    found += check_gradients(world, module, way)
        except AssertionError as error:
            found.append(f"assertion {error}")
        return together(world, found)

    for name, module in (("allreduce", allreduce), ("gradients", gradients)):
        assert wrong(name, module) == [], wrong(name, module)
    for title, name, old, new in MUTATIONS:
        seen = wrong(name, altered(name, old, new))
        if world.is_main:
            put(f"{'red' if seen else 'GREEN'}: {title}")


def options(args: Args, algorithm: Any, **others: Any) -> Any:
    """The flags of a small training."""
    defaults = train.Args(
        algorithm, dataset=str(args.dataset), epochs=3, batch_size=24, lr=0.1, bucket_mb=0.02, checkpoint_every=4,
        out=args.folder / algorithm, numbers=Precision("fp32"),
    )  # fmt: skip
    return replace(defaults, **others)


WAYS = ("per-parameter", "flat", "bucketed", "ring", "recursive-doubling", "shared-memory", "ddp")


def trainings(world: World, args: Args) -> None:
    """The same training by every algorithm, one after the other."""
    for way in WAYS:
        train.train(options(args, way), world)
    train.train(options(args, "ring", compress="bf16", out=args.folder / "bf16"), world)


class CutOff(Exception):  # noqa: N818
    """The run is cut off."""


def resumes(world: World, args: Args) -> None:
    """Each algorithm: undisturbed, and cut off in the middle of an epoch and resumed."""
    original = Report.loss
    for way in WAYS:
        train.train(options(args, way), world)

        def cut(self: Report, step: int, loss: Tensor, samples: int) -> None:
            original(self, step, loss, samples)
            if step == 15:
                raise CutOff

        Report.loss = cut  # type: ignore[method-assign]
        out = args.folder / f"{way}-resumed"
        with contextlib.suppress(CutOff):
            train.train(options(args, way, out=out), world)
        Report.loss = original  # type: ignore[method-assign]
        dist.barrier()
        train.train(options(args, way, out=out, resume="auto"), world)


def put(line: object) -> None:
    """Print a line at once."""
    os.write(1, f"{line}\n".encode())


# Shown by every example and tested there: half a second for each of these many runs.
for slow in ("_draw", "_write_events"):
    setattr(Report, slow, lambda _: None)

JOBS = {"properties": properties, "mutations": mutations, "trainings": trainings, "resumes": resumes}


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of a job."""
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        JOBS[args.name](world, args)


if __name__ == "__main__":
    sys.exit(launch(main_worker, place, args))
