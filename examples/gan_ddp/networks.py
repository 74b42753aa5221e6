"""A small generator and discriminator for grey images. They do not know about ranks."""

from typing import Literal

from torch import nn

from common.launch.errors import UserError


class Generator(nn.Sequential):
    """Noise [N, latent] to images [N, 1, size, size], from -1 to 1.

    After Radford et al., 2016 (https://arxiv.org/abs/1511.06434), with GroupNorm: it treats each
    sample separately, so neither the number of ranks matters, nor whether real and generated images
    come together.

    Raises:
        UserError: the size is not a multiple of 4.
    """

    def __init__(self, size: int, latent: int) -> None:
        if size % 4:
            raise UserError(
                f"images of {size}x{size} pixels: this generator makes sizes that 4 divides"
            )
        side = size // 4
        super().__init__(
            nn.Linear(latent, 64 * side * side),
            nn.Unflatten(1, (64, side, side)),
            nn.GroupNorm(1, 64),
            nn.GELU(),
            nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, bias=False),  # [N, 32, size/2, ...]
            nn.GroupNorm(1, 32),
            nn.GELU(),
            nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),  # [N, 1, size, size]
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Images [N, 1, size, size] to logits [N]: above 0 for "real".

    With BatchNorm, what a rank computes depends on which images come together, and DDP has buffers
    to send.
    """

    def __init__(self, size: int, norm: Literal["group", "batch"] = "group") -> None:
        side = size // 4
        super().__init__(
            nn.Conv2d(1, 32, 4, stride=2, padding=1),  # [N, 32, size/2, size/2]
            nn.GELU(),
            nn.Conv2d(32, 64, 4, stride=2, padding=1, bias=False),  # [N, 64, side, side]
            nn.BatchNorm2d(64) if norm == "batch" else nn.GroupNorm(1, 64),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64 * side * side, 1),
            nn.Flatten(0),
        )
