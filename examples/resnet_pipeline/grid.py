"""P stages x D replicas: which process is which, and the groups in which they talk."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.distributed import World
from common.errors import Lost, UserError


@dataclass(frozen=True)
class Grid:
    """A process's place: rank = replica * stages + stage, so that the stages of a replica are neighbours.

    Attributes:
        stages: processes of one pipeline, P.
        replicas: pipelines that train on different samples, D.
        stage: which stage this process is.
        replica: of which pipeline.
        ranks: global ranks of this pipeline's stages, in order.
        mesh: the processes as a [D, P] mesh with the dimensions `replica` and `stage`.
        channels: groups of the pipeline's processes: for activations and for gradients, and each again for those that
            go from the last process round to the first, or back. nccl runs the messages between two ranks in the order
            of the calls, so in one group the two directions would wait for each other.
        device: this process's device.
        seconds: the timeout of messages.
    """

    stages: int
    replicas: int
    stage: int
    replica: int
    ranks: tuple[int, ...]
    mesh: DeviceMesh
    channels: Mapping[tuple[str, bool], dist.ProcessGroup]
    device: torch.device
    seconds: float

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """The group of the stages of this replica."""
        return self.mesh.get_group("stage")

    def sender(self, kind: str, stage: int) -> tuple[int, dist.ProcessGroup]:
        """Global rank and group from which the input of a stage's forward (F) or backward (B) comes."""
        return self._link(kind, stage, stage - 1 if kind == "F" else stage + 1)

    def receiver(self, kind: str, stage: int) -> tuple[int, dist.ProcessGroup]:
        """Global rank and group to which the result of a stage's forward or backward goes."""
        return self._link(kind, stage, stage + 1 if kind == "F" else stage - 1)

    def _link(self, kind: str, stage: int, other: int) -> tuple[int, dist.ProcessGroup]:
        """Stage s is on process s modulo P."""
        round_the_end = max(stage, other) % self.stages == 0
        return self.ranks[other % self.stages], self.channels[kind, round_the_end]

    def local_batch(self, batch_size: int) -> int:
        """The share of one replica in a global batch.

        Raises:
            UserError: the number of replicas does not divide it.
        """
        if batch_size % self.replicas:
            raise UserError(f"--batch-size {batch_size} (global) cannot be divided by {self.replicas} replicas")
        return batch_size // self.replicas

    def dealt(self, total: int) -> int:
        """How many of `total` samples this replica gets when they are dealt like cards."""
        return len(range(self.replica, total, self.replicas))

    @contextlib.contextmanager
    def watching(self, rank: int, doing: str) -> Generator[None]:
        """Name the stage that is gone when a message fails.

        Raises:
            Lost: with its name.
        """
        try:
            yield
        except RuntimeError as error:
            silent = "imed out" in str(error)
            what = f"was silent for {self.seconds:g} s" if silent else "ended"
            raise Lost(
                f"stage {self.ranks.index(rank)} of {self.stages} (rank {rank}) {what} while stage {self.stage} {doing}"
            ) from None


def make_grid(world: World, stages: int | None) -> Grid:
    """Arrange the processes as P stages x D replicas.

    Args:
        world: this process's world, whose process group exists.
        stages: P; by default all processes are stages of one pipeline.

    Raises:
        UserError: P does not divide the number of processes.
    """
    stages = stages or world.size
    if world.size % stages:
        raise UserError(f"--stages {stages}: it must divide the {world.size} processes (stages x replicas)")
    ranks = torch.arange(world.size).view(-1, stages)  # [D, P]
    same = _groups(ranks.T, world)
    uses = [(kind, round_the_end) for round_the_end in (False, True) for kind in ("F", "B")]
    channels = {use: _groups(ranks, world) for use in uses}
    groups = [same, channels["F", False]]
    mesh = DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=("replica", "stage"))
    replica, stage = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    mine = tuple(ranks[replica].tolist())
    seconds = world.timeout.total_seconds()
    grid = Grid(stages, len(ranks), stage, replica, mine, mesh, channels, world.device, seconds)
    _connect(grid)
    return grid


def _connect(grid: Grid) -> None:
    """Send a number through every channel: with nccl two ranks connect by their first message, and both wait for it."""
    number = torch.zeros(1, device=grid.device)
    last = grid.stages - 1
    for (kind, round_the_end), group in grid.channels.items():
        for first in [last] * (last > 0) if round_the_end else range(last):
            ends = first, (first + 1) % grid.stages
            source, target = ends if kind == "F" else ends[::-1]
            if grid.stage == source:
                dist.send(number, grid.ranks[target], group)
            elif grid.stage == target:
                dist.recv(number, grid.ranks[source], group)


def _groups(ranks: torch.Tensor, world: World) -> dist.ProcessGroup:
    """This process's group of those that a row names; a new group's own timeout would be 30 minutes."""
    mine, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=world.timeout)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def sum_over_replicas(stages: Sequence[nn.Module], grid: Grid) -> None:
    """Add up the gradients of the replicas, and average BatchNorm's running statistics, in one message.

    The loss is already divided by the samples of all replicas.
    """
    if grid.replicas == 1:  # saves a copy of all gradients
        return
    gradients = [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]
    norms = [m for stage in stages for m in stage.modules() if isinstance(m, nn.BatchNorm2d)]
    statistics = [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]
    for tensor in statistics:
        tensor.div_(grid.replicas)
    everything = [*gradients, *statistics]
    flat = torch.cat([tensor.flatten() for tensor in everything])  # in logical order, whatever the memory layout
    dist.all_reduce(flat, group=grid.mesh.get_group("replica"))
    for tensor, part in zip(everything, flat.split([tensor.numel() for tensor in everything]), strict=True):
        tensor.copy_(part.view(tensor.shape))
