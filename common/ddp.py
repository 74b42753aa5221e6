"""Helpers for DistributedDataParallel."""

import hashlib
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def warm_up_buckets(ddp: DistributedDataParallel) -> None:
    """Make DDP arrange its buckets before the first step. Every rank calls this.

    After its first backward pass, DDP rearranges its buckets in the order in which gradients became
    ready. With 3 or more ranks, the arrangement determines the order of additions. The first step
    after resuming would then differ in the last bits from the same step of an uninterrupted run.
    This call runs a backward pass from the sum of the parameters; it does not call the model.

    Models with sparse gradients, a static graph or parameter hooks (they would run) are skipped:
    after resuming, their last bits may differ. Register communication hooks after this call.
    """
    module = ddp.module
    sparse = any(getattr(m, "sparse", False) is True for m in module.modules())  # embeddings
    hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())
    if ddp.static_graph or sparse or hooked:
        return
    trained = [p for p in module.parameters() if p.requires_grad]
    device = trained[0].device  # a model can be spread over several devices
    loss = cast("Tensor", sum(p.real.sum().to(device) for p in trained))
    ddp.reducer.prepare_for_backward([loss])  # as DDP does at the end of its forward pass
    loss.backward()
    ddp.zero_grad(set_to_none=True)


def unwrapped(model: Any) -> Any:
    """Return the model without its DistributedDataParallel and torch.compile wrappers."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(model, "_orig_mod", model)


def parameter_hash(model: Any) -> str:
    """Return the SHA-256 of all parameters and buffers, sorted by name."""
    digest = hashlib.sha256()
    for name, value in sorted(unwrapped(model).state_dict().items()):
        if isinstance(value, Tensor):  # a module's extra state may be anything
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(name.encode() + data.numpy().tobytes())
    return digest.hexdigest()


def check_replicas(model: nn.Module) -> str:
    """Check that all ranks have equal parameters, and return their hash. Every rank calls this."""
    broadcast_buffers(model)  # BatchNorm's statistics differ by rank
    hashes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, parameter_hash(model))
    different = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
    assert not different, f"the parameters of rank(s) {different} differ from rank 0's"
    return hashes[0]


@torch.no_grad()
def broadcast_buffers(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Copy the buffers of a group's first rank to its other ranks. Every rank calls this."""
    for buffer in unwrapped(model).buffers():
        data = buffer.contiguous()  # a copy if the buffer is a non-contiguous view
        dist.broadcast(data, group=group, group_src=0)
        if 0 in buffer.stride():  # expanded: its elements share memory, so copy_ would raise
            buffer.set_(data)
        elif data is not buffer:
            buffer.copy_(data)


@torch.no_grad()
def all_reduce_mean(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace tensors with their means over ranks, in one all_reduce. Every rank calls this."""
    tensors = list(tensors)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    means = flat.split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view(tensor.shape))
