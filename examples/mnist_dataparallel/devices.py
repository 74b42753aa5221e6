"""Which devices a process uses: those that `--devices` names, or all that are there."""

from dataclasses import replace

import torch

from common.launch.errors import UserError
from common.launch.place import Place


def with_cpu_named(place: Place, names: tuple[str, ...]) -> Place:
    """The place; with `--devices cpu,...` on a machine with GPUs, as if `--device cpu` were given.

    So the backend becomes gloo.
    """
    return replace(place, flags=replace(place.flags, device="cpu")) if "cpu" in names else place


def choose_devices(
    names: tuple[str, ...], kind: str, visible: int, place: Place
) -> list[torch.device]:
    """The devices of this process; the first one holds the model.

    Without `--devices`: two replicas on the CPU; all CUDA devices that CUDA_VISIBLE_DEVICES shows,
    divided if a node has several processes.

    Args:
        names: as `device_names` returns them.
        kind: cpu or cuda.
        visible: CUDA devices that torch sees.
        place: this process's place in the job.

    Raises:
        UserError: a device that does not exist, or that two processes would use.
    """
    if kind == "cpu" and any(name != "cpu" for name in names):
        raise UserError(
            f"--devices {','.join(names)}: torch sees no CUDA device; use cpu,cpu, or leave it out"
        )
    if kind == "cpu":
        return [torch.device("cpu")] * (len(names) or 2)
    processes = place.local_world_size
    if names and processes > 1:
        raise UserError(
            f"--devices {','.join(names)} with {processes} processes on this node: all would use "
            f"the same; leave --devices out, and each takes its share, or start one process per "
            f"node"
        )
    if place.flags.gpu is not None:
        numbers = [place.flags.gpu]
    elif names:
        numbers = [int(name.partition(":")[2]) for name in names]
    elif visible < processes:  # the launcher shows each process its own, or gloo lets them share
        numbers = [place.local_rank % visible]
    else:
        numbers = list(range(visible))[place.local_rank :: processes]
    missing = [number for number in numbers if number >= visible]
    if missing:
        raise UserError(
            f"--devices {','.join(names)}: there is no cuda:{missing[0]}; torch sees {visible} "
            f"CUDA device(s), numbered from 0 within CUDA_VISIBLE_DEVICES"
        )
    return [torch.device("cuda", number) for number in numbers]
