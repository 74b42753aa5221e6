"""Generate samples, save them as a picture, and measure their distance from real images."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.utils import save_image

from .networks import LATENT


@torch.no_grad()
def generate(generator: nn.Module, count: int, seed: int) -> Tensor:
    """Return images [count, 1, S, S] on the CPU; the noise depends only on `count` and `seed`."""
    noise = torch.randn(count, LATENT, generator=torch.Generator().manual_seed(seed))
    return generator(noise.to(next(generator.parameters()).device)).float().cpu()


def save_samples(images: Tensor, path: Path) -> None:
    """Save images [N, 1, S, S] in [-1, 1] as a picture with ten columns, enlarged 4 times."""
    path.parent.mkdir(exist_ok=True)
    large = F.interpolate(images, scale_factor=4)
    save_image(large, path, nrow=10, normalize=True, value_range=(-1, 1), pad_value=1)


def frechet_distance(x: Tensor, y: Tensor) -> float:
    """Return the Frechet distance between two sets of images [N, 1, S, S].

    This is the FID's formula (https://arxiv.org/abs/1706.08500), with Gaussians fitted to the
    pixels instead of a network's features.
    """
    x, y = x.flatten(1).double(), y.flatten(1).double()
    gap, first, second = x.mean(0) - y.mean(0), x.T.cov(), y.T.cov()
    root = torch.linalg.eigvals(first @ second).real.clamp(min=0).sqrt().sum()
    return (gap @ gap + first.trace() + second.trace() - 2 * root).item()
