"""Which region of an image is used, and how it gets its final size.

The distribution is that of torchvision's `RandomResizedCrop` + `RandomHorizontalFlip` for training
and of `Resize` + `CenterCrop` for evaluation.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from common.images.decode import Box, Pixels

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # RandomResizedCrop's: share of the area, width / height
KEPT = 224 / 256  # what CenterCrop(224) keeps of the shorter side after Resize(256)


def random_crop(seed: int, epoch: int, index: int, height: int, width: int) -> tuple[Box, bool]:
    """The random crop and flip of a sample, distributed as those of `RandomResizedCrop`.

    Drawn by a counter-based generator: the numbers of a sample are found without drawing those of
    the samples before it (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405).

    Args:
        seed: of the run.
        epoch: from 0.
        index: of the sample.
        height: of the image, in pixels.
        width: of the image, in pixels.

    Returns:
        The box, and whether to flip.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, index, 0, 0]))
    draws = generator.random(23).tolist()
    vertical, horizontal, flip = draws[20:]
    low, high = map(math.log, RATIO)
    for share, shape in zip(draws[0:20:2], draws[1:20:2], strict=True):
        area = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * share)
        ratio = math.exp(low + (high - low) * shape)
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < rows <= height and 0 < columns <= width:
            top, left = int(vertical * (height - rows + 1)), int(horizontal * (width - columns + 1))
            return (top, left, rows, columns), flip < 0.5
    # No crop of these shapes fits into a very long image: as much of the middle as a permitted
    # shape holds.
    rows, columns = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    box = (height - rows) // 2, (width - columns) // 2, max(1, rows), max(1, columns)
    return box, flip < 0.5


def middle(height: int, width: int) -> Box:
    """The square that `Resize(256)` and `CenterCrop(224)` keep, in pixels of the original."""
    side = max(1, round(KEPT * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side


def resize(region: Pixels, size: int, flip: bool = False) -> Pixels:
    """Resize [H, W, 3] to [size, size, 3], bilinear with antialiasing: as Pillow, but faster."""
    owned = np.require(region, requirements=["C", "W"])  # a cached image is read-only
    # [1, 3, H, W], channels last: the fast way
    image = torch.from_numpy(owned).unsqueeze(0).permute(0, 3, 1, 2)
    small = F.interpolate(image, (size, size), mode="bilinear", antialias=True)[
        0
    ]  # [3, size, size]
    small = small.flip(2) if flip else small  # ten times as fast as NumPy's flip
    return small.permute(1, 2, 0).numpy()
