"""Decoded pixels on the disk: built once by all processes together, checked, shared between runs.

A cache is a folder of chunks of 64 images. A chunk is one file: a table of where each image lies,
its height and width and a checksum of its pixels, then the pixels, read through a memory map. The
folder's name is a digest of the names, sizes and times of the image files, so changed images get
another cache.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from common.images.decode import Pixels
from common.launch.errors import UserError

CHUNK = 64  # images; about 35 MB of ImageNet
MAGIC = b"pixels03"
COLUMNS = 4  # of the table: offset, height, width, checksum
MOST_MAPS = 16_384  # at a time: Linux allows a process 65,530; ImageNet-21k has 200,000 chunks

Table = NDArray[np.uint64]
Decode = Callable[[int], Pixels | None]


@dataclass(frozen=True)
class PixelCache:
    """The decoded images of a dataset.

    Args:
        folder: where the chunks lie.
        count: number of images.
    """

    folder: Path
    count: int
    _maps: dict[int, tuple[Table, NDArray[np.uint8]]] = field(default_factory=dict, repr=False)
    _checked: bytearray = field(default_factory=bytearray, repr=False)

    def pixels(self, index: int) -> Pixels | None:
        """An image, [H, W, 3], as a view of the file, or None if it was broken.

        Its checksum is checked when this process reads it for the first time.

        Raises:
            UserError: it is not what was written.
        """
        chunk, row = divmod(index, CHUNK)
        if chunk not in self._maps:
            opened = _open(self.folder / _name(chunk))
            if opened is None:
                raise self._damaged(chunk)
            if len(self._maps) >= MOST_MAPS:
                del self._maps[next(iter(self._maps))]  # images of it that are in use keep it
            self._maps[chunk] = opened
        table, content = self._maps[chunk]
        offset, height, width, checksum = (int(value) for value in table[row])
        if height == 0:
            return None
        flat = content[offset : offset + 3 * height * width]
        if not self._checked:
            self._checked.extend(bytes(self.count))
        if not self._checked[index]:
            if xxhash.xxh3_64_intdigest(flat.data) != checksum:
                raise self._damaged(chunk, f" (image {index})")
            self._checked[index] = 1
        return flat.reshape(height, width, 3)

    def _damaged(self, chunk: int, where: str = "") -> UserError:
        path = self.folder / _name(chunk)
        return UserError(f"{path} is damaged{where}: delete it, and the next run makes it anew")


def pixel_cache(
    directory: Path,
    root: Path,
    names: Sequence[str],
    decode: Decode,
    threads: int,
    announce: Callable[[int], object] = int,
) -> tuple[PixelCache, int]:
    """Open the cache of some image files; all processes that ask at the same time decode the rest.

    A process locks the chunk that it makes; the lock ends with the process, so nothing is left when
    it is killed.

    Args:
        directory: holds caches.
        root: the folder of the images; it may be elsewhere when the cache is used again.
        names: the images, relative to it.
        decode: gives the pixels of an image by its number, [H, W, 3], or None to leave out one that
            is broken.
        threads: how many to decode with.
        announce: is told how many images are missing, before the first of them is decoded.

    Returns:
        The cache, and how many images this process decoded.

    Raises:
        UserError: an image is broken, or the disk is full.
    """
    folder = directory / _digest(root, names)
    missing, decoded, asked = list(range(-(-len(names) // CHUNK))), 0, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(threads) as pool:
            while missing := [n for n in missing if _read_table(folder / _name(n)) is None]:
                if not asked:
                    announce(min(len(names), len(missing) * CHUNK))
                asked = True
                # Each process begins elsewhere, so that two rarely meet at the same chunk.
                begin = os.getpid() % len(missing)
                jobs = [
                    pool.submit(_make, folder, n, min(CHUNK, len(names) - n * CHUNK), decode)
                    for n in missing[begin:] + missing[:begin]
                ]
                try:
                    made = sum(job.result() for job in jobs)
                finally:
                    for job in jobs:  # after an error: the rest would be decoded for nothing
                        job.cancel()
                decoded += made
                if made == 0:
                    time.sleep(0.05)  # others are at work on what is missing
    except OSError as error:
        raise UserError(
            f"--cache {directory} cannot be written ({error.strerror}); {_space(directory)}"
        ) from None
    return PixelCache(folder, len(names)), decoded


def _make(folder: Path, chunk: int, count: int, decode: Decode) -> int:
    """Make a chunk, unless it is there or another process makes it.

    Returns:
        The number of images decoded.
    """
    path = folder / _name(chunk)
    with (folder / f".{path.name}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        missing = _read_table(path) is None
        if missing:
            temporary = folder / f".{path.name}.tmp"  # ours: we have the lock
            try:
                with temporary.open("wb") as file:
                    _write(file, chunk * CHUNK, count, decode)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        # a process that has opened the lock already finds the chunk, and does not write
        Path(lock.name).unlink(missing_ok=True)
    return count * missing


def _write(file: BinaryIO, first: int, count: int, decode: Decode) -> None:
    table = np.zeros((count, COLUMNS), np.uint64)
    offset = len(MAGIC) + 16 + table.nbytes
    file.seek(offset)
    for row in range(count):
        pixels = decode(first + row)
        if pixels is not None:
            flat = np.ascontiguousarray(pixels)
            table[row] = offset, *pixels.shape[:2], xxhash.xxh3_64_intdigest(flat.data)
            file.write(flat.data)
            offset += flat.nbytes
    file.seek(0)
    header = np.array([count, xxhash.xxh3_64_intdigest(table.data)], np.uint64)
    file.write(MAGIC + header.tobytes() + table.tobytes())
    file.flush()
    os.fsync(file.fileno())


def _read_table(path: Path) -> Table | None:
    """The table of a chunk; None if the file is missing, or not as it was written.

    Read, not mapped: a cache of a million images has 20,000 chunks, and each rank looks at all of
    them when it starts.
    """
    start, row = len(MAGIC) + 16, 8 * COLUMNS
    try:
        with path.open("rb", buffering=0) as file:
            head, length = file.read(start + row * CHUNK), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    if len(head) < start or head[: len(MAGIC)] != MAGIC:
        return None
    count, checksum = (int(value) for value in np.frombuffer(head, np.uint64, 2, len(MAGIC)))
    content = head[start : start + row * count]
    if len(content) < row * count or xxhash.xxh3_64_intdigest(content) != checksum:
        return None
    table = np.frombuffer(content, np.uint64).reshape(count, COLUMNS)
    size = 3 * int((table[:, 1] * table[:, 2]).sum())
    return table if length == start + row * count + size else None


def _open(path: Path) -> tuple[Table, NDArray[np.uint8]] | None:
    """The table and the whole file as a memory map; None as `_read_table`."""
    table = _read_table(path)
    if table is None:
        return None
    # Not np.memmap: it keeps a file open per map. A process may have a thousand open files, and a
    # cache has 20,000 chunks.
    size = path.stat().st_size
    return table, torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()


def _name(chunk: int) -> str:
    return f"chunk-{chunk:06d}.pixels"


def _digest(root: Path, names: Sequence[str]) -> str:
    digest, base = hashlib.sha256(MAGIC), str(root)
    for name in names:
        try:
            status = os.stat(os.path.join(base, name))  # noqa: PTH116, PTH118 - faster than Path
            entry = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0"
        except OSError:  # a link to nothing: it is named, or skipped, when it is decoded
            entry = f"{name}\0\0\0"
        digest.update(entry.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _space(directory: Path) -> str:
    if not directory.exists():
        return "choose another folder"
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    return f"{free:,} bytes are free; decoded images take about six times their files"
