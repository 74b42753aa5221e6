"""Which devices a process uses: words of a flag first, checked without torch, then devices that are there."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import UserError
from common.launcher import Launch, Place

if TYPE_CHECKING:
    import torch

    from common.distributed import World


def read(text: str, flags: Launch) -> tuple[str, ...]:
    """The devices that `--devices` names, in its order: `0,2` means cuda:0 and cuda:2; none for `auto`.

    Raises:
        UserError: no device, CPU and CUDA mixed, or a contradiction to another flag.
    """
    if text == "auto":
        return ()
    words = [word.strip() for word in text.split(",")]
    names = tuple(f"cuda:{word}" if word.isdigit() else word for word in words)
    wrong = [name for name in names if not re.fullmatch(r"cpu|cuda:\d+", name)]
    if wrong:
        raise UserError(f"--devices {text}: {wrong[0]!r} is no device; give auto, 0,1 (of CUDA) or cpu,cpu")
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1:
        raise UserError(f"--devices {text}: replicas on the CPU and on CUDA devices do not go together; give one kind")
    against = {
        "--no-accel": flags.no_accel and kinds != {"cpu"},
        f"--device {flags.device}": flags.device not in ("auto", *kinds),
        f"--gpu {flags.gpu}": flags.gpu is not None,
        "--dist-backend nccl": flags.dist_backend == "nccl" and kinds == {"cpu"},
    }
    for flag in (name for name, contradicts in against.items() if contradicts):
        raise UserError(f"--devices {text} contradicts {flag}: leave one out")
    return names


def placed(place: Place, names: tuple[str, ...]) -> Place:
    """The place; with `--devices cpu,...` on a machine with GPUs it is one on the CPU, and so is the backend."""
    return replace(place, flags=replace(place.flags, device="cpu")) if "cpu" in names else place


def choose(names: tuple[str, ...], kind: str, visible: int, place: Place) -> list[torch.device]:
    """The devices of this process; the first one holds the model.

    Without `--devices`: two replicas on the CPU; all CUDA devices that CUDA_VISIBLE_DEVICES shows, dealt out if a node
    has several processes.

    Args:
        names: as `read` returns them.
        kind: cpu or cuda.
        visible: CUDA devices that torch sees.
        place: this process's place in the job.

    Raises:
        UserError: a device that is not there, or that two processes would use.
    """
    import torch

    if kind == "cpu" and any(name != "cpu" for name in names):
        raise UserError(f"--devices {','.join(names)}: torch sees no CUDA device; use cpu,cpu, or leave it out")
    if kind == "cpu":
        return [torch.device("cpu")] * (len(names) or 2)
    several = place.local_size > 1
    if names and several:
        raise UserError(
            f"--devices {','.join(names)} with {place.local_size} processes on this node: all would use the same; "
            f"leave --devices out, and each takes its share, or start one process per node"
        )
    if place.flags.gpu is not None:
        numbers = [place.flags.gpu]
    elif names:
        numbers = [int(name.partition(":")[2]) for name in names]
    elif visible < place.local_size:  # the launcher shows each process its own, or gloo lets them share
        numbers = [place.local_rank % visible]
    else:
        numbers = list(range(visible))[place.local_rank :: place.local_size]
    missing = [number for number in numbers if number >= visible]
    if missing:
        raise UserError(
            f"--devices {','.join(names)}: there is no cuda:{missing[0]}; torch sees {visible} CUDA device(s), "
            f"numbered from 0 within CUDA_VISIBLE_DEVICES"
        )
    return [torch.device("cuda", number) for number in numbers]


def on_first(world: World, devices: list[torch.device]) -> World:
    """The world, with the device that holds the model."""
    import torch

    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])  # collectives and allocations without an explicit device go there
    return replace(world, device=devices[0])
