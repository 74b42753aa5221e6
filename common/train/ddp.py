"""DistributedDataParallel: its buckets, and the module inside it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.launch.errors import UserError
from common.train.seed import random_state, restore_random_state


def warm_up_buckets(ddp: DistributedDataParallel) -> None:
    """Let DDP lay out its buckets before the first step. Every rank calls this.

    After its first step DDP lays its buckets out anew, in the order in which gradients became
    ready, and with 3 or more ranks the layout decides the order of additions. A resumed run would
    differ in the last bits of its first step from an uninterrupted one. This backward comes before
    the first step of both. The model's forward is not called: each parameter's gradient comes from
    its sum, the last parameter's first. Parameters, buffers and random numbers stay as they are.
    """
    module, own = ddp.module, "forward" in vars(ddp.module)  # a compiled module has its own
    forward = module.forward

    def sum_of_parameters(_: Tensor) -> Tensor:
        return cast("Tensor", sum(p.sum() for p in module.parameters() if p.requires_grad))

    module.forward = sum_of_parameters  # type: ignore[method-assign]
    try:
        for _ in range(2 if ddp.static_graph else 1):  # DDP only counts in a static graph's first
            # On a GPU, DDP moves the inputs there, and fails if there are none.
            ddp(torch.empty(0)).backward()
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward
    ddp.zero_grad(set_to_none=True)


def check_gradients(model: nn.Module) -> None:
    """Check after a backward that it reached every parameter that is to be trained.

    DDP would wait in the next step for the gradients that do not come.

    Raises:
        UserError: parameters without gradient; they are named, or none has one.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unused = [name for name, p in trained if p.grad is None]
    if unused and not getattr(model, "find_unused_parameters", True):
        if len(unused) == len(trained):
            raise UserError(
                "no parameter has a gradient after the first step: call loss.backward(), and "
                "optimizer.zero_grad() before it, not after the step, which hides what is missing"
            )
        names = ", ".join(name.removeprefix("module.") for name in unused[:5])
        raise UserError(
            f"no gradient reaches {names}: use them in forward, freeze them, or give "
            f"--find-unused-parameters"
        )


def check_smallest_batch(
    model: nn.Module, autocast: Callable[[], AbstractContextManager[object]], *inputs: Tensor
) -> None:
    """Check, by one forward, that a model can be trained on the smallest batch of an epoch.

    BatchNorm refuses to normalise over one value. Buffers and random numbers stay as they are.

    Args:
        model: not wrapped by DDP, which would communicate.
        autocast: makes the context of mixed precision.
        inputs: as many samples as the smallest batch brings to a rank at once.

    Raises:
        UserError: the batch is too small.
    """
    random, buffers = random_state(), [buffer.clone() for buffer in model.buffers()]
    try:
        with torch.no_grad(), autocast():
            model(*inputs)
    except ValueError as error:
        raise UserError(
            f"the last batch of an epoch brings a rank {len(inputs[0])} sample(s) at once, too few "
            f"for this model ({error}): change --batch-size"
        ) from None
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    restore_random_state(random)


def bare(model: Any) -> Any:
    """The model inside the wrappers of DistributedDataParallel and torch.compile; others as is."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return cast("nn.Module", getattr(model, "_orig_mod", model))
