"""The files of checkpoints: their names, and what they hold.

A checkpoint is one file `step-00000120-<digest>.pt`, made by `torch.save`; the digest in its name
is the start of the SHA-256 of its content (torch.load, safetensors and distributed checkpoints read
a flipped bit without a word).
"""

import contextlib
import hashlib
import io
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist

from common.launch.console import warn
from common.launch.errors import UserError
from common.train.files import written_whole

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")


@dataclass(frozen=True)
class Checkpoint:
    """What was read: the state, and where it came from."""

    path: Path
    step: int
    state: dict[str, Any]


def file_name(step: int, digest: str) -> str:
    """The name of a checkpoint's file; of the digest in hexadecimal digits, the first 16 count."""
    return f"step-{step:08d}-{digest[:16]}.pt"


class _Hashed(io.RawIOBase):
    """A file that `torch.save` writes to, and the digest of all that was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.failed: OSError | None = None

    def write(self, part: Any) -> int:
        """Write bytes. An error is kept: `torch.save` makes a RuntimeError of it."""
        self.digest.update(part)
        try:
            return self.file.write(part)
        except OSError as error:
            self.failed = error
            raise


def write(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write a checkpoint, straight to the disk: a copy of it in memory would be as large again.

    Raises:
        UserError: it cannot be written; nothing is left of the attempt.
    """

    def save(file: BinaryIO) -> Path:
        hashed = _Hashed(file)
        try:
            torch.save(state, cast(BinaryIO, hashed))
        except RuntimeError:
            if hashed.failed is None:
                raise
            raise hashed.failed from None
        return folder / file_name(step, hashed.digest.hexdigest())

    size = sum(v.nbytes for v in values(state) if isinstance(v, torch.Tensor))
    written_whole(folder / f"step-{step:08d}.pt", save, size)


def values(state: Any) -> Iterator[Any]:
    """The values inside a state."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for value in state:
            yield from values(value)
    else:
        yield state


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and check its digest. No code in it is executed (`weights_only`).

    Its tensors lie in the mapped file, which the processes of a machine share: copy what is to
    stay, or to be changed.

    Raises:
        UserError: the file is missing or damaged, or another program's.
    """
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist")
    match = NAME.fullmatch(path.name)
    if not match:
        raise UserError(
            f"{path} is not a checkpoint of this program: the name must be step-NUMBER-DIGEST.pt, "
            f"as written"
        )
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"checkpoint {path} cannot be read ({error.strerror})") from None
    if digest[:16] != match[2]:
        raise UserError(
            f"checkpoint {path} is damaged (truncated or altered): "
            f"its content does not match its name"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise UserError(
            f"{path} is not a checkpoint of this program: it holds something else than tensors"
        ) from None
    return Checkpoint(path, int(match[1]), state)


def latest(folder: Path) -> Checkpoint | None:
    """The newest undamaged checkpoint of a folder; damaged ones are named and passed over."""
    for path in files(folder):
        try:
            return read(path)
        except UserError as error:
            if dist.get_rank() == 0:
                warn(f"{error}; trying the one before it")
    return None


def files(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    found = []
    for path in folder.glob("step-*.pt"):
        if NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # rank 0 has just deleted it, or moved it
                found.append((step_of(path), path.stat().st_mtime_ns, path))
    return [path for *_, path in sorted(found, reverse=True)]


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells."""
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])
