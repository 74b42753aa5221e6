"""A small generator and a small discriminator, without distributed code.

GroupNorm normalizes each image separately. The result therefore does not depend on how a batch is
split over ranks, or on whether real and generated images are in one batch.
"""

from torch import nn

LATENT = 32  # length of the noise vector from which an image is generated


def make_generator(size: int) -> nn.Module:
    """Return a network that maps noise [N, LATENT] to images [N, 1, size, size] in [-1, 1].

    The size must be a multiple of 4.
    """
    side = size // 4
    return nn.Sequential(
        nn.Linear(LATENT, 64 * side * side),
        nn.Unflatten(1, (64, side, side)),
        nn.GroupNorm(1, 64),
        nn.GELU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, bias=False),  # [N, 32, size/2, size/2]
        nn.GroupNorm(1, 32),
        nn.GELU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),  # [N, 1, size, size]
        nn.Tanh(),
    )


def make_discriminator(size: int, norm: nn.Module | None = None) -> nn.Module:
    """Return a network that maps images [N, 1, size, size] to logits [N], positive if real."""
    side = size // 4
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),  # [N, 32, size/2, size/2]
        nn.GELU(),
        nn.Conv2d(32, 64, 4, stride=2, padding=1, bias=False),  # [N, 64, side, side]
        norm or nn.GroupNorm(1, 64),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64 * side * side, 1),
        nn.Flatten(0),
    )
