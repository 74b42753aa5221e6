"""A process's place in the job, in torch's vocabulary. No torch here.

`Place.export` sets the variables that torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. `common.launch.resolve` decides the place.
"""

import os
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Literal

from common.launch.flags import Launch

STARTED = time.time()  # close enough to the start of the process: torch is not imported yet
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Place:
    """A process's place in the job; for a program that starts its own workers, its node's place."""

    launcher: Literal["plain", "spawn", "torchrun", "slurm"]
    num_nodes: int
    node_rank: int
    local_world_size: int
    """Processes on this node."""
    world_size: int
    """Processes in the job."""
    rank: int
    """Global rank of this process, or of the first worker that it starts."""
    local_rank: int
    host: str
    """Host of the store at which the processes meet; empty for a world of one."""
    port: int
    """Port of the store; 0 lets the operating system choose a free one."""
    flags: Launch
    warnings: tuple[str, ...] = ()
    store_hosted: bool = False
    """Whether a process other than rank 0 hosts the store: the parent, or torchrun's agent."""
    attempt: int = 0
    """How often torchrun has restarted the workers."""
    started: float = field(default=STARTED, compare=False)
    """Seconds since the epoch at which the command was started."""

    @property
    def launched(self) -> bool:
        """Whether the processes of this node run already; otherwise this program starts them."""
        return self.launcher != "spawn"

    @property
    def loopback(self) -> bool:
        """Whether all processes are on one machine: no socket has to listen outside of it."""
        return self.num_nodes == 1 or self.host in LOOPBACK

    def worker(self, local_rank: int) -> "Place":
        """The place of the worker with this local rank: rank = node * processes per node + it."""
        if self.launched:
            assert local_rank == self.local_rank, "a launcher has fixed the place already"
            return self
        rank = self.node_rank * self.local_world_size + local_rank
        return replace(self, local_rank=local_rank, rank=rank)

    def export(self, local_rank: int) -> None:
        """Set the variables of one worker, in its own process, as torchrun does."""
        global _current
        place = _current = self.worker(local_rank)
        if place.loopback:  # gloo would take the host name's interface, which others can reach
            for library in ("GLOO", "NCCL"):
                lo = "lo" if sys.platform == "linux" else "lo0"
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", lo)
        if place.launcher == "torchrun":
            return
        values = {
            "RANK": place.rank,
            "LOCAL_RANK": place.local_rank,
            "WORLD_SIZE": place.world_size,
            "LOCAL_WORLD_SIZE": place.local_world_size,
            "GROUP_RANK": place.node_rank,
            "GROUP_WORLD_SIZE": place.num_nodes,
            "MASTER_ADDR": "127.0.0.1" if place.loopback else place.host,
            "MASTER_PORT": place.port,
            # torch's own switch for "all ranks are clients of a store that is there already"
            "TORCHELASTIC_USE_AGENT_STORE": place.store_hosted,
        }
        os.environ.update({name: str(value) for name, value in values.items()})


def address(host: str, port: int) -> str:
    """`host:port`, or `[host]:port` for a number of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_current: Place | None = None


def current() -> Place:
    """The place that this process has exported; before that, a world of one."""
    return _current or Place("plain", 1, 0, 1, 1, 0, 0, "", 0, Launch())
