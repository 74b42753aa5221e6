"""Small datasets that the tests make."""

import gzip
import struct
from pathlib import Path

import numpy as np


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
