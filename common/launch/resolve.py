"""Every launcher, translated into torch's vocabulary before the program starts. No torch here.

One pure function answers "which place in the job is mine, and do I have to start others?".

| launcher | who starts processes | what decides |
|---|---|---|
| plain | nobody | nothing is set: a world of one |
| spawn | this program | `--nproc`, `--multiprocessing-distributed`, `--world-size`, `--rank`, \
`--dist-url`; `PET_*` |
| torchrun | torchrun | its variables |
| slurm | srun | `SLURM_PROCID`, `SLURM_LOCALID`, `SLURM_NTASKS`, `SLURM_JOB_NODELIST` |
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from urllib.parse import urlparse

from common.launch.errors import UserError
from common.launch.flags import Launch
from common.launch.place import Place, address

DEFAULT_PORT = 29500  # torchrun's


def resolve(flags: Launch, env: Mapping[str, str], devices: Callable[[], int]) -> Place:
    """Decide the place in the job.

    Args:
        flags: the command line's part.
        env: the environment's part.
        devices: counts the CUDA devices; called only for --multiprocessing-distributed.

    Raises:
        UserError: flags or variables that contradict each other or are incomplete.
    """
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= env.keys():
        return _torchrun(flags, env)
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    # A batch script has a SLURM_PROCID, too; only what srun starts is part of a step.
    of_srun = bool({"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & env.keys())
    if tasks > 1 and of_srun and {"SLURM_PROCID", "SLURM_LOCALID"} <= env.keys():
        return _slurm(flags, env, tasks)
    if "PET_NNODES" in env or "PET_NPROC_PER_NODE" in env:
        flags = _from_pet(flags, env, devices)
    place = _spawn(flags, env, devices)
    if tasks > 1 and not of_srun and place.launcher == "plain":
        told = f"SLURM_NTASKS={tasks}, but srun has not started this: it trains in one process"
        return replace(place, warnings=(*place.warnings, told))
    return place


def _torchrun(flags: Launch, env: Mapping[str, str]) -> Place:
    rank, size, local = (_number(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = _number(env, "LOCAL_WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} with WORLD_SIZE={size}: ranks go from 0 to {size - 1}")
    return Place(
        launcher="torchrun",
        num_nodes=_number(env, "GROUP_WORLD_SIZE", -(-size // local_size)),
        node_rank=_number(env, "GROUP_RANK", rank // local_size),
        local_world_size=local_size,
        world_size=size,
        rank=rank,
        local_rank=local,
        host=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_port(env, "MASTER_PORT"),
        flags=flags,
        warnings=_ignored(flags, "torchrun"),
        store_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _slurm(flags: Launch, env: Mapping[str, str], size: int) -> Place:
    # srun's step may use a part of the allocation: its own variables come first.
    nodes = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1))
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    host = env.get("MASTER_ADDR") or first_host(hosts)
    if nodes > 1 and not host:
        raise UserError("SLURM_JOB_NODELIST is empty: set MASTER_ADDR to the host of rank 0")
    # Two jobs of one user on one node must not meet at one port, nor two steps of one job.
    job, step = _number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID", 0)
    port = 20_000 + (job + 1009 * step) % 10_000
    node_rank = _number(env, "SLURM_NODEID", 0)
    counts = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    return Place(
        launcher="slurm",
        num_nodes=nodes,
        node_rank=node_rank,
        local_world_size=_tasks_on_node(counts, node_rank) or -(-size // nodes),
        world_size=size,
        rank=_number(env, "SLURM_PROCID"),
        local_rank=_number(env, "SLURM_LOCALID"),
        host="127.0.0.1" if nodes == 1 else host,
        port=_port(env, "MASTER_PORT", port),
        flags=flags,
        warnings=_ignored(flags, "srun"),
    )


def _from_pet(flags: Launch, env: Mapping[str, str], devices: Callable[[], int]) -> Launch:
    """`PET_*` configures torchrun; a program started without torchrun obeys the same five."""
    nodes, nproc, typed = env.get("PET_NNODES", "1"), flags.nproc, flags.world_size != -1
    if not typed and ":" in nodes and len(set(nodes.split(":"))) > 1:
        raise UserError(
            f"PET_NNODES={nodes} is elastic, which needs torchrun: start with `torchrun -m MODULE`"
        )
    if nproc is None and "PET_NPROC_PER_NODE" in env:
        nproc = _processes(env, devices)
    if nproc is None and not flags.multiprocessing_distributed:  # which counts the devices
        nproc = 1
    rank, count = flags.rank, {"PET_NNODES": nodes.split(":")[0]}
    world_size = flags.world_size if typed else _number(count, "PET_NNODES")
    alone = world_size == 1  # no other node has to know a port
    if rank == -1 and not (typed and alone):
        rank = _number(env, "PET_NODE_RANK", 0)
    host, port = env.get("PET_MASTER_ADDR", "127.0.0.1"), _port(env, "PET_MASTER_PORT")
    meeting = None if alone else f"tcp://{address(host, port)}"
    return replace(
        flags,
        nproc=nproc,
        world_size=world_size,
        rank=rank,
        dist_url=flags.dist_url or meeting,
    )


def _processes(env: Mapping[str, str], devices: Callable[[], int]) -> int:
    """PET_NPROC_PER_NODE: a number or, as torchrun has it, a word."""
    if env["PET_NPROC_PER_NODE"] in ("gpu", "auto"):
        return max(1, devices())
    return 1 if env["PET_NPROC_PER_NODE"] == "cpu" else _number(env, "PET_NPROC_PER_NODE")


def _spawn(flags: Launch, env: Mapping[str, str], devices: Callable[[], int]) -> Place:
    from_env = flags.dist_url == "env://" or (flags.dist_url is None and "WORLD_SIZE" in env)
    nodes, node_rank = flags.world_size, flags.rank
    if nodes == -1:
        nodes = _number(env, "WORLD_SIZE", 1) if from_env else 1
    if node_rank == -1:
        node_rank = _number(env, "RANK", 0) if from_env else 0
    if node_rank >= nodes:
        raise UserError(
            f"--rank {node_rank} with --world-size {nodes}: "
            f"nodes are numbered from 0 to {nodes - 1}"
        )
    if nodes > 1 and flags.rank == -1 and not ("RANK" in env and from_env):
        raise UserError(
            f"--world-size {nodes} needs --rank: which of the {nodes} nodes is this one?"
        )
    host, port = _meeting_point(flags, env, nodes, from_env)
    named = flags.nproc is not None or flags.multiprocessing_distributed
    several = named or nodes > 1 or flags.dist_url is not None
    per_device = flags.multiprocessing_distributed and flags.device != "cpu" and not flags.no_accel
    local_size = flags.nproc or (max(1, devices()) if per_device else 1)
    return Place(
        launcher="spawn" if several else "plain",
        num_nodes=nodes,
        node_rank=node_rank,
        local_world_size=local_size,
        world_size=nodes * local_size,
        rank=node_rank * local_size,
        local_rank=0,
        host=host if several else "",
        port=port,
        flags=flags,
        store_hosted=several,
    )


def _meeting_point(
    flags: Launch, env: Mapping[str, str], nodes: int, from_env: bool
) -> tuple[str, int]:
    """Host and port of the store."""
    if flags.dist_url and flags.dist_url != "env://":
        host, port = _address(flags.dist_url)
        if nodes > 1 and port == 0:
            raise UserError(
                f"--dist-url {flags.dist_url}: several nodes need a port that they all know, not 0"
            )
        return host, port
    if not from_env and nodes == 1:
        return "127.0.0.1", 0
    if nodes > 1 and "MASTER_ADDR" not in env:
        raise UserError(
            f"--world-size {nodes} needs --dist-url tcp://HOST:PORT of node 0 (or MASTER_ADDR)"
        )
    return env.get("MASTER_ADDR", "127.0.0.1"), _port(env, "MASTER_PORT")


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


def _tasks_on_node(counts: str, node_rank: int) -> int:
    """Tasks on this node from SLURM's list, in which `2(x3),1` means 2, 2, 2, 1; 0: unknown."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(times or 1)
    return tasks[node_rank] if node_rank < len(tasks) else 0


def _ignored(flags: Launch, launcher: str) -> tuple[str, ...]:
    """Warnings for the flags that mean nothing because the launcher fixes the place."""
    given = {
        "--nproc": flags.nproc is not None,
        "--multiprocessing-distributed": flags.multiprocessing_distributed,
        "--world-size": flags.world_size != -1,
        "--rank": flags.rank != -1,
        "--dist-url": flags.dist_url not in (None, "env://"),
    }
    ignored = (name for name, present in given.items() if present)
    return tuple(f"{name} is ignored: {launcher} decides it" for name in ignored)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"{name}={text!r} in the environment is not a number") from None


def _port(env: Mapping[str, str], name: str, default: int = DEFAULT_PORT) -> int:
    port = _number(env, name, default)
    if not 0 <= port < 1 << 16:
        raise UserError(f"{name}={port} in the environment: ports go from 0 to 65535")
    return port
