"""Small datasets that the tests make."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw


def write_idx(folder: Path, train: int, test: int, size: int, classes: int, packed: bool = True) -> None:
    """Write a learnable dataset in MNIST's format: the class is where the bright row lies."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % classes
        pixels = random.integers(0, 100, (count, size, size))
        pixels[np.arange(count), labels % size] += 120
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            content = header + array.astype(np.uint8).tobytes()
            name = f"{prefix}-{kind}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


def draw_folder(folder: Path, train: int, val: int, size: int, classes: int = 3) -> None:
    """Draw an ImageFolder of JPEGs: the class is how many bars there are, and of which colour."""
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for number in range(count):
            label = number % classes
            height, width = random.integers(size * 3 // 4, size * 5 // 4, 2).tolist()
            picture = Image.fromarray(random.integers(0, 80, (height // 4, width // 4, 3), np.uint8)).resize(
                (width, height)
            )
            colour = tuple(255 if channel == label % 3 else 60 for channel in range(3))
            for bar in range(label + 1):
                ImageDraw.Draw(picture).rectangle((0, 12 * bar, width, 12 * bar + 5), colour)
            path = folder / part / f"class{label}" / f"{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path, quality=85)
