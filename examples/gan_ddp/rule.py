"""The discriminator's iteration: the rule, and the ways to break it.

DDP prepares the averaging of gradients in a forward and completes it in the backward that follows.
So a wrapped network does one forward and one backward per iteration, on everything that it has to
see.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gan_ddp.args import Violation


def loss_sum(real: Tensor, fake: Tensor) -> Tensor:
    """The sum of the discriminator's losses, a scalar.

    Args:
        real: its logits for real images, [N].
        fake: its logits for generated images, [M].
    """
    return F.softplus(-real).sum() + F.softplus(fake).sum()


def discriminator_backward(
    violation: Violation,
    discriminator_ddp: nn.Module,
    autocast: Callable[[], AbstractContextManager[object]],
    reals: Tensor,
    fakes: Tensor,
    scale: float,
) -> Tensor:
    """Compute the discriminator's gradients. Every rank calls this.

    Args:
        violation: `no` follows the rule. The others break it:
            two-forwards, then one backward of both losses: DDP writes the buffers, if there are
            any (BatchNorm's), before each forward. Autograd took that for an in-place change, an
            error, until torch's pull request 175851;
            two-passes, each a forward and a backward: correct, but all gradients are sent twice;
            two-backwards after two forwards: the gradients of the second are not averaged, and
            DDP does not report it.
        discriminator_ddp: the discriminator in DDP.
        autocast: makes the context of mixed precision, for forwards only.
        reals: [N, 1, H, W], from -1 to 1.
        fakes: [M, 1, H, W], without gradient.
        scale: factor of the sum of the losses.

    Returns:
        `scale` times the sum of the losses, a scalar without gradient.
    """

    def judge(images: Tensor) -> Tensor:  # [B, 1, H, W] to logits [B]
        with autocast():
            return discriminator_ddp(images).float()

    if violation == "no":
        logits = judge(torch.cat([reals, fakes]))  # [N + M]
        real, fake = logits.split([len(reals), len(fakes)])
        loss = loss_sum(real, fake) * scale
        loss.backward()
        return loss.detach()
    none = reals.new_zeros(0)
    if violation == "two-passes":
        first = loss_sum(judge(reals), none) * scale
        first.backward()
        second = loss_sum(none, judge(fakes)) * scale
        second.backward()
        return (first + second).detach()
    real, fake = judge(reals), judge(fakes)
    first, second = loss_sum(real, none) * scale, loss_sum(none, fake) * scale
    if violation == "two-forwards":
        (first + second).backward()
    else:
        first.backward()
        second.backward()
    return (first + second).detach()
