"""How gradients become their means over all ranks: what DistributedDataParallel does, by hand.

| `--algorithm` | who adds | when |
|---|---|---|
| per-parameter | the backend, one blocking call for each parameter | after backward |
| flat | the backend, one call for all gradients side by side | after backward |
| bucketed | the backend, one call for each bucket | while backward computes the rest |
| ring, recursive-doubling | allreduce.py | after backward |
| fast-ring | fast_ring.py | after backward |
| shared-memory | shared_memory.py | after backward |
| ddp | torch's DistributedDataParallel | while backward computes the rest |
"""

from datetime import timedelta

import torch
from torch import nn

from common.launch.errors import UserError
from examples.manual_allreduce_sgd.allreduce import backend, recursive_doubling, ring
from examples.manual_allreduce_sgd.averaging import Averaging, Ddp, PerParameter
from examples.manual_allreduce_sgd.buckets import Bucketed
from examples.manual_allreduce_sgd.fast_ring import FastRing
from examples.manual_allreduce_sgd.flat import Flat, Shared

TIMEOUT = timedelta(minutes=2)


def averaging(
    algorithm: str,
    model: nn.Module,
    wire: torch.dtype = torch.float32,
    megabytes: float = 4.0,
    timeout: timedelta = TIMEOUT,
) -> Averaging:
    """The class that `--algorithm` names, for a model. Every rank calls this.

    Args:
        algorithm: the flag.
        model: the same on all ranks, parameters included.
        wire: the dtype in which flat, bucketed, and the algorithms by hand send gradients.
        megabytes: size of a bucket of `bucketed`, in MB.
        timeout: the longest wait of fast-ring and shared-memory for another rank.

    Raises:
        UserError: an algorithm for the CPU, and a model on a CUDA device.
    """
    match algorithm:
        case "per-parameter":
            return PerParameter(model)
        case "bucketed":
            return Bucketed(model, wire, megabytes)
        case "fast-ring":
            if next(model.parameters()).is_cuda:
                raise UserError("--algorithm fast-ring is for the CPU: use ring on GPUs")
            return Flat(model, wire, FastRing(timeout=timeout))
        case "shared-memory":
            return Shared(model, timeout)
        case "ddp":
            return Ddp(model)
        case _:
            by_name = {"flat": backend, "ring": ring, "recursive-doubling": recursive_doubling}
            return Flat(model, wire, by_name[algorithm])
