"""What the jobs of manual_allreduce_jobs.py check: all-reduces and gradients, and code that is broken on purpose."""

import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.manual_allreduce_sgd import allreduce, fast_ring, gradients, shared_memory
from examples.manual_allreduce_sgd.shared_memory import SharedMemory

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "int64": torch.int64}
TIMEOUT = timedelta(seconds=60)


class Traffic:
    """Messages that this process sends to another, as torch counts them: below everything that an example calls."""

    def __init__(self) -> None:
        self.bytes = self.messages = 0
        original = dist.ProcessGroup.send

        def send(group: dist.ProcessGroup, tensors: list[Tensor], *others: Any) -> dist.Work:
            self.bytes += sum(tensor.nbytes for tensor in tensors)
            self.messages += len(tensors)
            return original(group, tensors, *others)

        setattr(dist.ProcessGroup, "send", send)  # noqa: B010 - not its type


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

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.traffic = Traffic()
        self.groups: dict[tuple[int, ...], Any] = {}
        self.rings: dict[
            tuple[types.ModuleType, tuple[int, ...]], Any
        ] = {}  # used again, with other lengths and dtypes
        self.memories: dict[tuple[int, int], SharedMemory] = {}
        sizes = range(1, self.world_size + 1)
        for nodes, local in [(nodes, local) for nodes in sizes for local in sizes if nodes * local <= self.world_size]:
            ranks = [list(range(local * node, local * (node + 1))) for node in range(nodes)]  # as on `nodes` machines
            self.memories[nodes, local] = SharedMemory(640, TIMEOUT, ranks)

    def algorithms(self, case: Case, textbook: types.ModuleType, fast: types.ModuleType) -> dict[str, Any]:
        """Every algorithm for the ranks of a case: all ranks make the groups, as a job's do."""
        if case.ranks not in self.groups:
            self.groups[case.ranks] = dist.new_group(list(case.ranks))
        if (fast, case.ranks) not in self.rings:
            self.rings[fast, case.ranks] = fast.FastRing(case.ranks, TIMEOUT)
        group, size = self.groups[case.ranks], len(case.ranks)
        found: dict[str, Callable[[Tensor], int]] = {
            name: partial(vars(textbook)[name], group=group) for name in ("ring", "recursive_doubling", "backend")
        }
        found["fast ring"] = self.rings[fast, case.ranks]
        if case.ranks == tuple(range(size)):
            for (nodes, local), memory in self.memories.items():
                if nodes * local == size:
                    found[f"shared memory {nodes}x{local}"] = memory.all_reduce
        return found

    def check(
        self, case: Case, textbook: types.ModuleType = allreduce, fast: types.ModuleType = fast_ring
    ) -> list[str]:
        """What is wrong on this rank: every algorithm against dist.all_reduce, and the bytes that it sent."""
        vars(fast)["PIECE"] = vars(shared_memory)["CHUNK"] = case.piece
        algorithms = self.algorithms(case, textbook, fast)
        if self.rank not in case.ranks:
            return []
        group, wrong, results = self.groups[case.ranks], [], {}
        expected = case.tensor(self.rank).contiguous()
        dist.all_reduce(expected, group=group)
        tensors = torch.stack([case.tensor(rank).double() for rank in case.ranks])
        exact, magnitude = tensors.sum(dim=0), tensors.abs().sum(dim=0)
        size, bits = len(case.ranks), torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        for name, algorithm in algorithms.items():
            self.traffic.bytes = self.traffic.messages = 0
            found = results[name] = case.tensor(self.rank)
            where = found.data_ptr()
            sent = textbook.all_reduce(found, algorithm)
            assert found.data_ptr() == where, "in place"
            if sent != self.traffic.bytes:
                wrong.append(f"{name}: {sent} bytes sent, it says; {self.traffic.bytes}, says torch")
            if not ((found.double() - exact).abs() <= size * bits * magnitude).all():
                wrong.append(f"{name}: {found.tolist()}, exact {exact.tolist()}")
            if expected.dtype == torch.int64 and not torch.equal(found, expected):
                wrong.append(f"{name}: {found.tolist()}, torch {expected.tolist()}")
            everybody: list[Any] = [None] * size
            dist.all_gather_object(everybody, found.double().tolist(), group=group)
            if any(other != everybody[0] for other in everybody):
                wrong.append(f"{name}: the ranks hold different sums")
            wrong += self.traffic_of(name, found, case)
        if not torch.equal(results["ring"], results["fast ring"]):
            wrong.append("the fast ring and the textbook's hold different bits")
        return wrong

    def traffic_of(self, name: str, summed: Tensor, case: Case) -> list[str]:
        """What is wrong with the bytes and messages that were sent to sum a tensor."""
        size, place, total = len(case.ranks), case.ranks.index(self.rank), summed.nbytes
        bytes_sent, messages = self.traffic.bytes, self.traffic.messages
        wrong = f"{name}: {messages} messages, {bytes_sent} bytes sent, {total} summed"
        if name in ("ring", "fast ring"):
            chunks = [len(chunk) * summed.itemsize for chunk in torch.zeros(summed.numel()).tensor_split(size)]
            skipped = chunks[(place + 1) % size] + chunks[(place + 2) % size]  # one in each half
            least = 2 * (size - 1)
            few = messages == least if name == "ring" else messages >= least
            return [] if bytes_sent == (2 * total - skipped if size > 1 else 0) and few else [wrong]
        if name == "recursive_doubling" and size & (size - 1) == 0:
            steps = size.bit_length() - 1
            return [] if (bytes_sent, messages) == (steps * total, steps) else [wrong]
        return []


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


def check_gradients(module: types.ModuleType, name: str) -> list[str]:
    """Two steps of a net against the gradients of all ranks' data in one process."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    torch.manual_seed(3)
    net, alone = Net(), Net()
    alone.load_state_dict(net.state_dict())
    with patch.dict(vars(gradients), {key: vars(module)[key] for key in vars(gradients) if key in vars(module)}):
        way = gradients.averaging(name, net, megabytes=1e-4, timeout=TIMEOUT)
    under_way: list[int] = []
    next(net.parameters()).register_hook(lambda _: under_way.append(len(getattr(way, "_works", []))))
    for step in range(2):
        rows = [torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(size)]
        # Layer 3 is used in the first step only, layer 2 not by the last rank.
        used = [(4 - step) if other < size - 1 else 2 for other in range(size)]
        net.zero_grad()
        way.model(rows[rank], used[rank]).backward()
        if name == "bucketed" and used[rank] == 4 and under_way[-1] < 3:
            wrong.append(f"{under_way[-1]} buckets are under way before the last gradient is there")
        way.average()
        alone.zero_grad()
        sum(alone(one, layers) for one, layers in zip(rows, used, strict=True)).div(size).backward()
        for (key, mine), theirs in zip(net.named_parameters(), alone.parameters(), strict=True):
            reference = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            if mine.grad is None or not torch.allclose(mine.grad, reference, rtol=1e-5, atol=1e-6):
                wrong.append(f"{name}, step {step}: the gradient of {key} is wrong")
    return wrong


def altered(name: str, old: str, new: str) -> types.ModuleType:
    """A module of the example in which one thing is changed."""
    original = importlib.import_module(f"examples.manual_allreduce_sgd.{name}")
    source = Path(str(original.__file__)).read_text()
    assert old in source, old
    module = types.ModuleType(original.__name__)
    exec(compile(source.replace(old, new), f"{name} altered", "exec"), module.__dict__)
    return module


RIGHT, LEFT = "(rank + 1) % world_size", "(rank - 1) % world_size"
NEIGHBOURS = (f"right, left = {RIGHT}, {LEFT}", f"right, left = {LEFT}, {RIGHT}")
# (name, module, before, after): each breaks one thing, and a check must see it
MUTATIONS = [
    ("one chunk is skipped", "allreduce", "mine += incoming", "mine += incoming * (step > 0)"),
    ("a step is left out", "allreduce", "range(world_size - 1):  # all", "range(world_size - 2):  # all"),
    ("the wrong neighbour", "allreduce", *NEIGHBOURS),
    ("received, not added", "allreduce", "mine += incoming", "mine.copy_(incoming)"),
    ("added in the second half, too", "allreduce", "into, left, group)", "into, left, group) + 0 * len(into.mul_(2))"),
    ("one partner is left out", "allreduce", "while distance < power:", "while distance * 2 < power:"),
    ("extra ranks are forgotten", "allreduce", "tensor += buffer\n    distance", "tensor += 0\n    distance"),
    ("a view is not copied back", "allreduce", "tensor.copy_(flat.view(tensor.shape))", "pass"),
    ("bytes are not counted", "allreduce", "sent += exchange(tensor", "exchange(tensor"),
    ("fast: one chunk is skipped", "fast_ring", "if number < complete:", "if pieces <= number < complete:"),
    ("fast: a step is left out", "fast_ring", "(2 * (world_size - 1))]", "(2 * (world_size - 1) - 1)]"),
    ("fast: the wrong neighbour", "fast_ring", *NEIGHBOURS),
    ("fast: received, not added", "fast_ring", "torch.add(piece, buffer, out=", "torch.mul(buffer, 1, out="),
    ("fast: added in the second half, too", "fast_ring", "if number < complete:", "if True:"),
    ("fast: sent on without this rank's own", "fast_ring", "append(dist.isend(piece", "append(dist.isend(buffer"),
    ("no division", "averaging", "parameter.grad /= self.world_size", "pass"),
    (
        "averages nothing",
        "averaging",
        "for parameter in self.parameters:\n            if",
        "for parameter in (p for p in self.parameters if type(p) is torch.Tensor):\n            if",
    ),
    ("no division in the hook", "flat", "1 / self.world_size", "1"),
    ("unused parameters keep old gradients", "flat", "self._views[parameter].zero_()", "pass"),
    ("no division of the output's gradient", "buckets", "gradient / self.world_size", "gradient"),
    ("a bucket is one element short", "buckets", "all_reduce(message,", "all_reduce(message[:-1],"),
    ("buckets wait for the end", "buckets", "parameter: number for number", "parameter: 0 for number"),
]
