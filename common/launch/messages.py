"""Point-to-point messages of tensors that are not on the CPU."""

import torch
import torch.distributed as dist


def message_device(device: torch.device) -> torch.device:
    """Where a tensor must lie that one rank sends to another by `send`, `isend` or `P2POp`.

    That is `device`, but for CUDA tensors under gloo, which moves those in collectives only: they
    go through the memory of the host.
    """
    gloo = "nccl" not in str(dist.get_backend_config())
    return torch.device("cpu") if gloo else device
