"""The device and the backend of a rank, and its share of the machine's cores."""

import os

import torch

from common.launch.cgroup import cores
from common.launch.errors import UserError
from common.launch.flags import Launch
from common.launch.place import Place, current

_share: int | None = None


def choose_device(flags: Launch, local_rank: int) -> tuple[torch.device, str]:
    """The device of this rank, and the backend for it.

    Args:
        flags: `--device`, `--gpu`, `--dist-backend`.
        local_rank: the rank's number on its machine; it takes the CUDA device of that number.

    Returns:
        The device, and the first argument of `init_process_group`: `cpu:gloo,cuda:nccl`, or
        `gloo`. (With nccl, collectives on CPU tensors still go through gloo: nccl cannot move
        them.)

    Raises:
        UserError: a device or backend that this machine does not have.
    """
    asked = flags.device == "cuda" or flags.gpu is not None
    available = torch.cuda.is_available()
    cuda = asked or (flags.device == "auto" and not flags.no_accel and available)
    if asked and not available:
        flag = "--device cuda" if flags.gpu is None else f"--gpu {flags.gpu}"
        raise UserError(
            f"{flag}: this machine has no CUDA device that torch can use; try --device cpu"
        )
    backend = flags.dist_backend
    if backend == "auto":
        backend = "nccl" if cuda else "gloo"
    if backend == "nccl" and not cuda:
        raise UserError(
            "--dist-backend nccl needs CUDA devices, and torch sees none; use --dist-backend gloo"
        )
    if not cuda:
        return torch.device("cpu"), backend
    devices, place = torch.cuda.device_count(), current()
    # A launcher may show one device to each process; those that we spawn see all of them.
    if backend == "nccl" and not place.launched and place.local_world_size > devices:
        raise UserError(
            f"{place.local_world_size} processes on {devices} CUDA device(s): nccl needs a device "
            f"for each; use --nproc {devices}, or --dist-backend gloo to share them"
        )
    if flags.gpu is not None and flags.gpu >= devices:
        raise UserError(f"--gpu {flags.gpu}: this machine has CUDA devices 0 to {devices - 1}")
    device = torch.device("cuda", local_rank % devices if flags.gpu is None else flags.gpu)
    torch.cuda.set_device(device)  # collectives and allocations that name no device go there
    return device, "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def share_cores(place: Place, neighbours: int) -> None:
    """Give this process its share of the machine's cores, as threads.

    Two processes with a thread per core each are slower than one thread each, and the number of
    threads changes the last bits of a sum: so it follows from who shares the machine, not from the
    launcher.

    Args:
        place: of this process, with its flags.
        neighbours: processes of the job that share this process's cores, itself included.
    """
    global _share
    _share = max(1, cores() // neighbours)
    torch.set_num_threads(place.flags.threads or _chosen_threads(place) or _share)


def core_share() -> int:
    """CPU cores of this process: its share of the machine's."""
    return _share or cores()


def _chosen_threads(place: Place) -> int:
    """The user's OMP_NUM_THREADS, or 0; torchrun sets it to 1, which is nobody's choice."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and (place.launcher, text) != ("torchrun", "1") else 0
