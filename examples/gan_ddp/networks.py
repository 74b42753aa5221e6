"""A small generator and discriminator for grey images, and how far what they make is from what is real."""

import io
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from common.checkpoint import write_atomically
from common.errors import UserError


class Generator(nn.Sequential):
    """Noise [N, latent] to images [N, 1, size, size], from -1 to 1.

    After Radford et al., 2016 (https://arxiv.org/abs/1511.06434), with GroupNorm: it treats each sample by itself, so
    that neither the number of ranks matters, nor whether real and generated images come together.

    Raises:
        UserError: 4 does not divide the size.
    """

    def __init__(self, size: int, latent: int) -> None:
        if size % 4:
            raise UserError(f"images of {size}x{size} pixels: this generator makes sizes that 4 divides")
        side = size // 4
        super().__init__(
            nn.Linear(latent, 64 * side * side),
            nn.Unflatten(1, (64, side, side)),
            nn.GroupNorm(1, 64),
            nn.GELU(),
            nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, bias=False),  # [N, 32, size / 2, size / 2]
            nn.GroupNorm(1, 32),
            nn.GELU(),
            nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Images [N, 1, size, size] to logits [N]: above 0 for "real".

    With BatchNorm, what a rank computes depends on which of its images come together, and DDP has buffers to send.
    """

    def __init__(self, size: int, norm: Literal["group", "batch"] = "group") -> None:
        side = size // 4
        super().__init__(
            nn.Conv2d(1, 32, 4, stride=2, padding=1),  # [N, 32, size / 2, size / 2]
            nn.GELU(),
            nn.Conv2d(32, 64, 4, stride=2, padding=1, bias=False),  # [N, 64, size / 4, size / 4]
            nn.BatchNorm2d(64) if norm == "batch" else nn.GroupNorm(1, 64),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64 * side * side, 1),
            nn.Flatten(0),
        )


def noise(samples: int, latent: int, *seeds: int) -> Tensor:
    """Noise [samples, latent] that follows from the seeds alone: the same for any number of ranks."""
    seed = 0
    for each in seeds:
        seed = (seed * 1_000_003 + each) % 2**63
    return torch.randn(samples, latent, generator=torch.Generator().manual_seed(seed))


def scaled(pixels: Tensor) -> Tensor:
    """Bytes [N, 1, H, W] to -1 .. 1."""
    return pixels.float().div_(127.5).sub_(1)


@torch.no_grad()
def generate(generator: nn.Module, latent: Tensor) -> Tensor:
    """Images [N, 1, H, W] on the CPU, from noise [N, latent]."""
    return generator(latent.to(next(generator.parameters()).device)).float().cpu()


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """Distance of two sets of images [N, 1, H, W], seen as Gaussians of their pixels; 0 for equal sets.

    The formula of Heusel et al., 2017 (arXiv:1706.08500), on pixels in place of a network's features.
    """
    x, y = (images.flatten(1).double() for images in (one, other))
    gap = x.mean(0) - y.mean(0)
    first, second = torch.cov(x.T), torch.cov(y.T)
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    both = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float(gap @ gap + first.trace() + second.trace() - 2 * both)


def draw(images: Tensor, path: Path, columns: int = 10) -> None:
    """A grid of images [N, 1, H, W] as a PNG, each pixel drawn with 4 x 4.

    Raises:
        UserError: the file cannot be written.
    """
    from PIL import Image

    rows = images[: len(images) // columns * columns].squeeze(1).unflatten(0, (-1, columns))  # [rows, columns, H, W]
    rows = nn.functional.pad(rows, (1, 1, 1, 1), value=1.0)
    grid = rows.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)  # [rows * H, columns * W]
    grey = grid.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    picture, file = Image.fromarray(grey.numpy()), io.BytesIO()
    picture.resize((4 * picture.width, 4 * picture.height), Image.Resampling.NEAREST).save(file, "PNG")
    write_atomically(path, file.getbuffer())
