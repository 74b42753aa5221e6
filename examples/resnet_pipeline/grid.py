"""P processes per pipeline x D replicas: which process is which, and the groups they talk in."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.launch.collectives import all_reduce_mean
from common.launch.errors import Lost, UserError
from common.launch.messages import message_device


@dataclass(frozen=True)
class Grid:
    """A process's place: rank = dp_rank * pp_size + pp_rank, so a pipeline has neighbouring ranks.

    Attributes:
        pp_size: processes of one pipeline, P. Each holds one stage or two.
        dp_size: replicas of the pipeline, which train on different samples, D.
        pp_rank: this process's number in its pipeline.
        dp_rank: the number of its pipeline.
        ranks: global ranks of this pipeline's processes, in order.
        mesh: the processes as a [D, P] mesh with the dimensions `dp` and `pp`.
        channels: groups of the pipeline's processes, by (kind, back): one for activations (F), one
            for gradients (B), and each again for stages whose next stage is on a process before
            theirs: round the end, or the second half of a V. nccl runs the messages between two
            ranks in the order of the calls, so in one group the directions would wait for each
            other.
        device: this process's device.
        timeout: the longest wait for a message.
    """

    pp_size: int
    dp_size: int
    pp_rank: int
    dp_rank: int
    ranks: tuple[int, ...]
    mesh: DeviceMesh
    channels: Mapping[tuple[str, bool], dist.ProcessGroup]
    device: torch.device
    timeout: timedelta

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """The group of this pipeline's processes."""
        return self.mesh.get_group("pp")

    def link(self, kind: str, first: int, second: int) -> tuple[int, dist.ProcessGroup]:
        """Global rank of the process at the other end, and the group for messages to or from it.

        Args:
            kind: F for activations, B for gradients.
            first: number of the process of a stage; this or the other is this process.
            second: of the process of the next stage.
        """
        other = second if first == self.pp_rank else first
        return self.ranks[other], self.channels[kind, second < first]

    @contextlib.contextmanager
    def watching(self, rank: int, doing: str) -> Generator[None]:
        """Name the process that is gone when a message of the body fails.

        Args:
            rank: global rank of the process at the other end.
            doing: what this process does, for the error: "waits for ...".

        Raises:
            Lost: the process ended, or was silent for longer than the timeout.
        """
        try:
            yield
        except RuntimeError as error:
            silent = "imed out" in str(error)
            what = f"was silent for {self.timeout.total_seconds():g} s" if silent else "ended"
            raise Lost(
                f"pipeline rank {self.ranks.index(rank)} of {self.pp_size} (rank {rank}) {what} "
                f"while pipeline rank {self.pp_rank} {doing}"
            ) from None


def make_grid(pp_size: int | None, device: torch.device, timeout: timedelta) -> Grid:
    """Arrange the processes as D replicas x P processes, and connect them. Every rank calls this.

    Args:
        pp_size: P; by default all processes belong to one pipeline.
        device: this process's device.
        timeout: the longest wait for a message; a new group's own would be 30 minutes.

    Raises:
        UserError: P does not divide the number of processes.
    """
    world_size = dist.get_world_size()
    pp_size = pp_size or world_size
    if world_size % pp_size:
        raise UserError(
            f"--stages {pp_size}: it must divide the {world_size} processes (stages x replicas)"
        )
    ranks = torch.arange(world_size).view(-1, pp_size)  # [D, P]
    replicas = _own_group(ranks.T, timeout)
    channels = {
        (kind, back): _own_group(ranks, timeout) for back in (False, True) for kind in ("F", "B")
    }
    mesh = DeviceMesh.from_group(
        [replicas, channels["F", False]], device.type, ranks, mesh_dim_names=("dp", "pp")
    )
    pp_rank, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    own = tuple(ranks[dp_rank].tolist())
    grid = Grid(pp_size, len(ranks), pp_rank, dp_rank, own, mesh, channels, device, timeout)
    _connect(grid)
    return grid


def _own_group(ranks: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group of each row of ranks, and return the one that this process belongs to."""
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    assert isinstance(own, dist.ProcessGroup)
    return own


def _connect(grid: Grid) -> None:
    """Send a number through every channel.

    With nccl two ranks connect by their first message, and both wait for it.
    """
    number = torch.zeros(1, device=message_device(grid.device))
    last = grid.pp_size - 1
    for (kind, back), group in grid.channels.items():
        ends = [(first, first + 1) for first in range(last)]
        if back:
            ends = [*(pair[::-1] for pair in ends), *[(last, 0)] * (last > 1)]
        for first, second in ends:
            source, target = (first, second) if kind == "F" else (second, first)
            if grid.pp_rank == source:
                dist.send(number, grid.ranks[target], group)
            elif grid.pp_rank == target:
                dist.recv(number, grid.ranks[source], group)


def average_over_replicas(stages: Sequence[nn.Module], grid: Grid) -> None:
    """Average gradients and BatchNorm's running statistics over the replicas, in one message.

    Every rank calls this after backward. DDP averages gradients, too, but takes the statistics of
    one rank.

    Args:
        stages: this process's stages.
        grid: this process's place; its group are the replicas of these stages.
    """
    if grid.dp_size == 1:  # saves a copy of all gradients
        return
    gradients = [p.grad for stage in stages for p in stage.parameters()]
    norms = [m for stage in stages for m in stage.modules() if isinstance(m, nn.BatchNorm2d)]
    statistics = [s for norm in norms for s in (norm.running_mean, norm.running_var)]
    all_reduce_mean([*gradients, *statistics], grid.mesh.get_group("dp"))
