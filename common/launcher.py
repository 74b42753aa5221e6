"""Every launcher, translated into one vocabulary before the program starts.

The question "which place in the job is mine, and do I have to start others?" is answered by one pure function,
`resolve(flags, environment)`. It imports no torch, so that mistakes are found before the heavy imports.

| launcher | who starts processes | what decides |
|---|---|---|
| plain | nobody | nothing is set: a world of one |
| spawn | this program | `--nproc`, `--multiprocessing-distributed`, `--world-size`, `--rank`, `--dist-url`; `PET_*` |
| torchrun | torchrun | `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` |
| slurm | srun | `SLURM_PROCID`, `SLURM_LOCALID`, `SLURM_NTASKS`, `SLURM_JOB_NODELIST` |
"""

import gc
import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, resource_tracker
from typing import Annotated, Literal
from urllib.parse import urlparse

from tyro.conf import arg

from common.errors import UserError

# Importing torch and scikit-learn makes a million objects and no garbage: looking for it costs 0.7 of 3 seconds.
gc.set_threshold(100_000, 50, 50)

STARTED = time.time()  # close enough to the start of the process: nothing heavy has been imported yet
DEFAULT_PORT = 29500  # torchrun's
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Launch:
    """Processes: who starts them, and how they find each other."""

    nproc: Annotated[int | None, arg(metavar="N")] = None
    """Processes to start on this machine (default: 1)."""
    multiprocessing_distributed: bool = False
    """Start one process per device of this machine (on a CPU: one)."""
    world_size: Annotated[int, arg(metavar="NODES")] = -1
    """Nodes in the job, each started by hand with the same --dist-url (-1: from WORLD_SIZE, else 1)."""
    rank: Annotated[int, arg(metavar="NODE")] = -1
    """Number of this node, from 0 (-1: from RANK, else 0)."""
    dist_url: Annotated[str | None, arg(metavar="URL")] = None
    """Where the nodes meet: tcp://HOST:PORT of node 0, or env:// for MASTER_ADDR and MASTER_PORT."""
    dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of the collectives; auto is nccl on CUDA devices and gloo on the CPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto is CUDA when there is a device."""
    gpu: Annotated[int | None, arg(metavar="N")] = None
    """The one CUDA device to use, for a single process (default: that of the local rank)."""
    no_accel: bool = False
    """The same as --device cpu."""
    timeout: Annotated[float, arg(metavar="SECONDS")] = 120.0
    """Longest wait for another process, in seconds, before the run ends with an error."""
    threads: Annotated[int, arg(metavar="N")] = 0
    """CPU threads per process; 0 shares the cores of a machine among the processes on it."""

    def __post_init__(self) -> None:
        if self.nproc is not None and self.nproc < 1:
            raise UserError(f"--nproc {self.nproc}: at least 1 process is needed")
        if self.world_size != -1 and self.world_size < 1:
            raise UserError(f"--world-size {self.world_size}: the number of nodes is at least 1")
        if self.rank < -1:
            raise UserError(f"--rank {self.rank}: nodes are numbered from 0")
        if self.no_accel and (self.device == "cuda" or self.gpu is not None):
            raise UserError("--no-accel contradicts --device cuda and --gpu: leave one out")
        if self.gpu is not None and ((self.nproc or 1) > 1 or self.multiprocessing_distributed):
            raise UserError(
                f"--gpu {self.gpu} is for a single process; CUDA_VISIBLE_DEVICES chooses devices for several"
            )
        if self.timeout <= 0:
            raise UserError(f"--timeout {self.timeout:g}: give a positive number of seconds")
        if self.threads < 0:
            raise UserError(f"--threads {self.threads}: give a positive number, or 0 to share the cores")
        if self.dist_backend == "nccl" and (self.device == "cpu" or self.no_accel):
            raise UserError("--dist-backend nccl --device cpu: nccl moves CUDA tensors only; use gloo on the CPU")


@dataclass(frozen=True)
class Place:
    """A process's place in the job; for a program that starts its own workers, the place of its node."""

    launcher: Literal["plain", "spawn", "torchrun", "slurm"]
    nodes: int
    node: int
    local_size: int
    """Processes on this node."""
    size: int
    """Processes in the job: the world size."""
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
    """Whether somebody else than rank 0 hosts the store: the spawning parent, or torchrun's agent."""
    attempt: int = 0
    """How often torchrun has restarted the workers."""
    started: float = field(default=STARTED, compare=False)
    """Seconds since the epoch at which the command was started."""

    @property
    def spawns(self) -> bool:
        """Whether this program has to start the workers of its node."""
        return self.launcher == "spawn"

    @property
    def loopback(self) -> bool:
        """Whether all processes are on one machine, so that no socket has to listen outside of it."""
        return self.nodes == 1 or self.host in LOOPBACK

    def worker(self, local_rank: int) -> "Place":
        """The place of the worker with this local rank."""
        if not self.spawns:
            assert local_rank == self.local_rank, "a launcher has fixed the place already"
            return self
        return replace(self, local_rank=local_rank, rank=self.node * self.local_size + local_rank)


def resolve(flags: Launch, env: Mapping[str, str], devices: Callable[[], int]) -> Place:
    """Decide the place in the job.

    Args:
        flags: the command line's part.
        env: the environment's part.
        devices: counts the CUDA devices of this machine; called only for --multiprocessing-distributed.

    Raises:
        UserError: flags or variables that contradict each other or are incomplete.
    """
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= env.keys():
        return _torchrun(flags, env)
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    if tasks > 1 and {"SLURM_PROCID", "SLURM_LOCALID"} <= env.keys():
        return _slurm(flags, env)
    if "PET_NNODES" in env or "PET_NPROC_PER_NODE" in env:
        flags = _from_pet(flags, env, devices)
    return _spawn(flags, env, devices)


def _torchrun(flags: Launch, env: Mapping[str, str]) -> Place:
    rank, size, local = (_number(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = _number(env, "LOCAL_WORLD_SIZE", 1)
    nodes = _number(env, "GROUP_WORLD_SIZE", -(-size // local_size))
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} with WORLD_SIZE={size}: ranks go from 0 to {size - 1}")
    return Place(
        launcher="torchrun",
        nodes=nodes,
        node=_number(env, "GROUP_RANK", rank // local_size),
        local_size=local_size,
        size=size,
        rank=rank,
        local_rank=local,
        host=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(env, "MASTER_PORT", DEFAULT_PORT),
        flags=flags,
        warnings=_ignored(flags, "torchrun"),
        store_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _slurm(flags: Launch, env: Mapping[str, str]) -> Place:
    # srun's step may use a part of the allocation: its own variables come first.
    size, rank = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 0)), _number(env, "SLURM_PROCID")
    nodes = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1))
    host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    if nodes > 1 and not host:
        raise UserError("SLURM_JOB_NODELIST is empty: set MASTER_ADDR to the host of rank 0")
    # Two jobs of one user on one node must not meet at one port: the job number tells them apart.
    port = 20_000 + _number(env, "SLURM_JOB_ID", 0) % 10_000
    return Place(
        launcher="slurm",
        nodes=nodes,
        node=_number(env, "SLURM_NODEID", 0),
        local_size=_tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")), env)
        or -(-size // nodes),
        size=size,
        rank=rank,
        local_rank=_number(env, "SLURM_LOCALID"),
        host="127.0.0.1" if nodes == 1 else host,
        port=_number(env, "MASTER_PORT", port),
        flags=flags,
        warnings=_ignored(flags, "srun"),
    )


def _from_pet(flags: Launch, env: Mapping[str, str], devices: Callable[[], int]) -> Launch:
    """`PET_*` variables configure torchrun; a program started without torchrun obeys the same five."""
    nodes, nproc = env.get("PET_NNODES", "1"), env.get("PET_NPROC_PER_NODE", "1")
    if ":" in nodes and len(set(nodes.split(":"))) > 1:
        raise UserError(f"PET_NNODES={nodes} is elastic, which needs torchrun: start with `torchrun -m MODULE`")
    if nproc in ("gpu", "auto", "cpu"):
        nproc = str(1 if nproc == "cpu" else max(1, devices()))
    count = {"PET_NNODES": nodes.split(":")[0], "PET_NPROC_PER_NODE": nproc}
    url = f"tcp://{env.get('PET_MASTER_ADDR', '127.0.0.1')}:{env.get('PET_MASTER_PORT', DEFAULT_PORT)}"
    several = _number(count, "PET_NNODES") > 1
    return replace(
        flags,
        nproc=flags.nproc or _number(count, "PET_NPROC_PER_NODE"),
        world_size=_number(count, "PET_NNODES") if flags.world_size == -1 else flags.world_size,
        rank=_number(env, "PET_NODE_RANK", 0) if flags.rank == -1 else flags.rank,
        dist_url=flags.dist_url or (url if several or "PET_MASTER_ADDR" in env else None),
    )


def _spawn(flags: Launch, env: Mapping[str, str], devices: Callable[[], int]) -> Place:
    from_env = flags.dist_url == "env://" or (flags.dist_url is None and "WORLD_SIZE" in env)
    nodes = flags.world_size if flags.world_size != -1 else (_number(env, "WORLD_SIZE", 1) if from_env else 1)
    node = flags.rank if flags.rank != -1 else (_number(env, "RANK", 0) if from_env else 0)
    if node >= nodes:
        raise UserError(f"--rank {node} with --world-size {nodes}: nodes are numbered from 0 to {nodes - 1}")
    if nodes > 1 and flags.rank == -1 and not ("RANK" in env and from_env):
        raise UserError(f"--world-size {nodes} needs --rank: which of the {nodes} nodes is this one?")
    if flags.dist_url and flags.dist_url != "env://":
        host, port = _address(flags.dist_url)
        if nodes > 1 and port == 0:
            raise UserError(f"--dist-url {flags.dist_url}: several nodes need a port that they all know, not 0")
    elif from_env or nodes > 1:
        if nodes > 1 and "MASTER_ADDR" not in env:
            raise UserError(f"--world-size {nodes} needs --dist-url tcp://HOST:PORT of node 0 (or MASTER_ADDR)")
        host, port = env.get("MASTER_ADDR", "127.0.0.1"), _number(env, "MASTER_PORT", DEFAULT_PORT)
    else:
        host, port = "127.0.0.1", 0
    several = flags.nproc is not None or flags.multiprocessing_distributed or nodes > 1 or flags.dist_url
    local_size = flags.nproc or (max(1, devices()) if flags.multiprocessing_distributed else 1)
    return Place(
        launcher="spawn" if several else "plain",
        nodes=nodes,
        node=node,
        local_size=local_size,
        size=nodes * local_size,
        rank=node * local_size,
        local_rank=0,
        host=host if several else "",
        port=port,
        flags=flags,
        store_hosted=True,
    )


def _address(url: str) -> tuple[str, int]:
    parts = urlparse(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise UserError(f"--dist-url {url}: expected tcp://HOST:PORT (PORT 0 to 65535) or env://")
    return parts.hostname, port


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `gpu[03-05,9],login` gives `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    return "".join(part or "" for part in match.groups()) if match else ""


def _tasks_on_node(counts: str, env: Mapping[str, str]) -> int:
    """Tasks on this node from SLURM's list, in which `2(x3),1` means 2, 2, 2, 1."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(times or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return tasks[node] if node < len(tasks) else 0


def _ignored(flags: Launch, launcher: str) -> tuple[str, ...]:
    """Warnings for the flags that mean nothing because the launcher fixes the place."""
    given = {
        "--nproc": flags.nproc is not None,
        "--multiprocessing-distributed": flags.multiprocessing_distributed,
        "--world-size": flags.world_size != -1,
        "--rank": flags.rank != -1,
        "--dist-url": flags.dist_url not in (None, "env://"),
    }
    return tuple(f"{name} is ignored: {launcher} decides it" for name, present in given.items() if present)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"{name}={text!r} in the environment is not a number") from None


def cuda_devices() -> int:
    """The CUDA devices of this machine (costs the import of torch)."""
    import torch

    return torch.cuda.device_count()


def preload(place: Place, also: Sequence[str] = ()) -> None:
    """Start the server from which workers are forked, so that it imports torch while this process does.

    Costs one process; saves every worker the seconds of `import torch`. Importing does not initialise CUDA, so
    workers may use it; a fork after its initialisation could not.
    """
    if place.spawns:
        # DistributedDataParallel imports torch._dynamo, another second, when it wraps a model.
        modules = ("launcher", "data", "metrics", "report")
        multiprocessing.set_forkserver_preload([*(f"common.{name}" for name in modules), "torch._dynamo", *also])
        resource_tracker.ensure_running()  # here, because it opens the signal mask
        # Ctrl-C, `timeout` and SLURM signal all processes: we and the ranks react, the server is needed to the end.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
