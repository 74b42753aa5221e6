"""The device and the backend of a rank, and its share of the machine's cores."""

import os

import torch
import torch.distributed as dist
from torch.cuda import nccl

from common.launch.cgroup import cores
from common.launch.errors import UserError
from common.launch.flags import Launch
from common.launch.place import Place, current

chosen = ""
"""The backend that this process has chosen: nccl or gloo."""
_share: int | None = None
SHARING_NCCL = (2, 30)
"""The first version of nccl in which ranks may share a device, with NCCL_MULTI_RANK_GPU_ENABLE."""


def choose_device(flags: Launch, local_rank: int) -> tuple[torch.device, str]:
    """The device of this rank, and the backend for it.

    Args:
        flags: `--device`, `--gpu`, `--dist-backend`.
        local_rank: the rank's number on its machine; it takes the CUDA device of that number,
            modulo the number of devices.

    Returns:
        The device, and the first argument of `init_process_group`: `cpu:gloo,cuda:nccl`, or
        `gloo`. (With nccl, collectives on CPU tensors still go through gloo: nccl cannot move
        them.) Ranks that share a device use nccl if it can do that, else gloo.

    Raises:
        UserError: a device or backend that this machine does not have.
    """
    global chosen
    asked = flags.device == "cuda" or flags.gpu is not None
    available = torch.cuda.is_available()
    cuda = asked or (flags.device == "auto" and not flags.no_accel and available)
    if asked and not available:
        flag = "--device cuda" if flags.gpu is None else f"--gpu {flags.gpu}"
        raise UserError(
            f"{flag}: this machine has no CUDA device that torch can use; try --device cpu"
        )
    if flags.dist_backend == "nccl" and not cuda:
        raise UserError(
            "--dist-backend nccl needs CUDA devices, and torch sees none; use --dist-backend gloo"
        )
    chosen = _cuda_backend(flags) if cuda else "gloo"
    if not cuda:
        return torch.device("cpu"), "gloo"
    devices = torch.cuda.device_count()
    if flags.gpu is not None and flags.gpu >= devices:
        raise UserError(f"--gpu {flags.gpu}: this machine has CUDA devices 0 to {devices - 1}")
    device = torch.device("cuda", local_rank % devices if flags.gpu is None else flags.gpu)
    torch.cuda.set_device(device)  # collectives and allocations that name no device go there
    return device, "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen


def ranks_share_devices() -> bool:
    """Whether this node has more ranks than the CUDA devices that they take.

    Under SLURM they may not be: srun can show each process a device of its own.
    """
    own = current().launcher == "slurm" and torch.cuda.device_count() == 1
    return 0 < used_devices() < current().local_world_size and not own


def used_devices() -> int:
    """The CUDA devices among which the ranks of this node divide themselves: `--gpu` names one."""
    devices = torch.cuda.device_count()
    return devices if current().flags.gpu is None else min(1, devices)


def _cuda_backend(flags: Launch) -> str:
    """nccl, or gloo; sets the variables that let nccl share a device.

    Raises:
        UserError: nccl was asked for by name, and this version cannot share devices.
    """
    if flags.dist_backend == "gloo" or not ranks_share_devices():
        return "gloo" if flags.dist_backend == "gloo" else "nccl"
    version = nccl.version() if dist.is_nccl_available() else (0,)
    if version >= SHARING_NCCL:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        os.environ.setdefault("NCCL_MAX_CTAS", "4")  # leaves room for the other ranks' kernels
        return "nccl"
    if flags.dist_backend == "auto":
        return "gloo"
    ranks, devices = current().local_world_size, used_devices()
    raise UserError(
        f"--dist-backend nccl: {ranks} processes share {devices} CUDA device(s), and this nccl "
        f"({'.'.join(map(str, version))}) cannot do that before "
        f"{'.'.join(map(str, SHARING_NCCL))}; leave the flag out, and they use gloo"
    )


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
