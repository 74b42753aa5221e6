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
| ring, `--compress top-k`, `powersgd` | compress.py: of a part of them | after backward |
| local-sgd, diloco | local.py: the models, not the gradients | every H steps |
"""

from datetime import timedelta

import torch
from torch import nn
from torch.optim import Optimizer

from common.launch.errors import UserError
from examples.manual_allreduce_sgd.allreduce import backend, recursive_doubling, ring
from examples.manual_allreduce_sgd.args import Args
from examples.manual_allreduce_sgd.averaging import Averaging, Ddp, PerParameter
from examples.manual_allreduce_sgd.buckets import Bucketed
from examples.manual_allreduce_sgd.compress import PowerSgd, TopK
from examples.manual_allreduce_sgd.fast_ring import FastRing
from examples.manual_allreduce_sgd.flat import Flat, Shared
from examples.manual_allreduce_sgd.local import DiLoCo, LocalSgd

TIMEOUT = timedelta(minutes=2)
WIRE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def chosen(
    args: Args, model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler
) -> Averaging:
    """What the flags name. Every rank calls this.

    Args:
        args: the flags.
        model: the same on all ranks, parameters included.
        optimizer: of its parameters.
        scaler: of the loss.

    Raises:
        UserError: as `averaging`; or scaled losses would spoil what is remembered or shared.
    """
    remembers = args.compress in ("top-k", "powersgd") or args.algorithm in ("local-sgd", "diloco")
    if scaler.is_enabled() and remembers:
        raise UserError(
            "--precision fp16: gradients that overflow would stay in what top-k, powersgd, "
            "local-sgd and diloco remember; use --precision fp32 or bf16"
        )
    if scaler.is_enabled() and (args.algorithm, args.compress) == ("shared-memory", "no"):
        raise UserError(
            "--precision fp16: each rank would take the scale off the gradients that the ranks "
            "share in memory; use --precision fp32 or bf16, or --compress fp16, which copies them"
        )
    match args.algorithm, args.compress:
        case "local-sgd", _:
            return LocalSgd(model, optimizer, args.every)
        case "diloco", _:
            return DiLoCo(model, optimizer, args.every, args.outer_lr, args.outer_momentum)
        case _, "top-k":
            return TopK(model, args.share)
        case _, "powersgd":
            return PowerSgd(model, args.matrix_rank)
        case algorithm, wire:
            patience = args.launch.patience
            return averaging(algorithm, model, WIRE[wire], args.bucket_mb, patience)


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
        wire: the dtype in which flat, bucketed, and the algorithms by hand send or add gradients.
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
            return Shared(model, wire, timeout)
        case "ddp":
            return Ddp(model)
        case _:
            by_name = {"flat": backend, "ring": ring, "recursive-doubling": recursive_doubling}
            return Flat(model, wire, by_name[algorithm])
