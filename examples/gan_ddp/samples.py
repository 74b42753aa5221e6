"""Noise in, images out: how far generated images are from real ones, and a picture of them."""

import io
import math
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from torch import Tensor, nn

from common.train.files import write_atomically


def noise(samples: int, latent: int, *seeds: int) -> Tensor:
    """Noise [samples, latent] that follows from the seeds alone: the same for any world size."""
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
    """Distance of two sets of images [N, 1, H, W] as Gaussians of their pixels; 0 for equal sets.

    NaN if a pixel is not a number, as after a training that diverged.

    The formula of Heusel et al., 2017 (https://arxiv.org/abs/1706.08500), on pixels instead of a
    network's features.
    """
    x, y = (images.flatten(1).double() for images in (one, other))
    if not (x.isfinite().all() and y.isfinite().all()):
        return math.nan
    gap = x.mean(0) - y.mean(0)
    first, second = torch.cov(x.T), torch.cov(y.T)
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    both = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float(gap @ gap + first.trace() + second.trace() - 2 * both)


def picture(out: Path, epoch: int) -> Path:
    """The file with images generated after an epoch, which are counted from 1."""
    return out / "samples" / f"epoch-{epoch:03}.png"


def side_by_side(out: Path, epochs: int) -> None:
    """Write samples.png: the pictures after the first epoch, one on the way, and the last.

    Args:
        out: the run's folder.
        epochs: of the run.

    Raises:
        UserError: the file cannot be written.
    """
    on_the_way = 10 if epochs > 20 else (epochs + 1) // 2
    chosen = sorted({1, on_the_way, epochs})
    files = {epoch: picture(out, epoch) for epoch in chosen if picture(out, epoch).exists()}
    if not files or dist.get_rank() != 0:
        return
    pictures = [Image.open(path).convert("L") for path in files.values()]
    width, height, gap = pictures[0].width, pictures[0].height, 24
    joined = Image.new("L", (len(pictures) * (width + gap) - gap, height + gap), 255)
    for number, (epoch, each) in enumerate(zip(files, pictures, strict=True)):
        joined.paste(each, (number * (width + gap), gap))
        place = number * (width + gap), gap // 4
        ImageDraw.Draw(joined).text(place, f"after epoch {epoch}", fill=0)
    file = io.BytesIO()
    joined.save(file, "PNG")
    write_atomically(out / "samples.png", file.getbuffer())


def draw(images: Tensor, path: Path, columns: int = 10) -> None:
    """Write a grid of images [N, 1, H, W] as a PNG, each pixel drawn with 4 x 4.

    Raises:
        UserError: the file cannot be written.
    """
    whole_rows = images[: len(images) // columns * columns].squeeze(1)
    rows = whole_rows.unflatten(0, (-1, columns))  # [rows, columns, H, W]
    rows = nn.functional.pad(rows, (1, 1, 1, 1), value=1.0)
    grid = rows.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)  # [rows * H, columns * W]
    grey = grid.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    picture, file = Image.fromarray(grey.numpy()), io.BytesIO()
    size = 4 * picture.width, 4 * picture.height
    picture.resize(size, Image.Resampling.NEAREST).save(file, "PNG")
    write_atomically(path, file.getbuffer())
