"""The discriminator's iteration: the rule, and the ways to break it.

DDP prepares its reduction of gradients in a forward, and ends it in the backward after that. So a wrapped network does
one forward and one backward per iteration, on everything that it has to see.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Way = Literal["no", "two-forwards", "two-passes", "two-backwards"]


def losses(real: Tensor, fake: Tensor) -> Tensor:
    """The sum of the discriminator's losses, from its logits for real and for generated images."""
    return F.softplus(-real).sum() + F.softplus(fake).sum()


def discriminator_backward(way: Way, wrapped: nn.Module, reals: Tensor, fakes: Tensor, scale: float) -> Tensor:
    """Compute the discriminator's gradients.

    Args:
        way: `no` follows the rule. The others break it:
            two-forwards, then one backward of both losses: DDP writes the buffers, if there are any (BatchNorm's),
            before each forward; for autograd that was a change in place, an error, until torch's pull request 175851;
            two-passes, each a forward and a backward: right, but all gradients are sent twice;
            two-backwards after two forwards: the second one's gradients are not averaged, and nothing says so.
        wrapped: the discriminator in DDP.
        reals: [N, 1, H, W].
        fakes: [N, 1, H, W], without gradient.
        scale: of the sum of the losses.

    Returns:
        `scale` times the sum of the losses, without gradient.
    """
    if way == "no":
        real, fake = wrapped(torch.cat([reals, fakes])).float().split([len(reals), len(fakes)])
        loss = losses(real, fake) * scale
        loss.backward()
        return loss.detach()
    nothing = reals.new_zeros(0)
    if way == "two-passes":
        first = losses(wrapped(reals).float(), nothing) * scale
        first.backward()
        second = losses(nothing, wrapped(fakes).float()) * scale
        second.backward()
        return (first + second).detach()
    real, fake = wrapped(reals).float(), wrapped(fakes).float()
    first, second = losses(real, nothing) * scale, losses(nothing, fake) * scale
    if way == "two-forwards":
        (first + second).backward()
    else:
        first.backward()
        second.backward()
    return (first + second).detach()
