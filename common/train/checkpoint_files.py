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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.launch.console import warn
from common.launch.errors import UserError

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")


@dataclass(frozen=True)
class Checkpoint:
    """What was read: the state, and where it came from."""

    path: Path
    step: int
    state: dict[str, Any]


def file_name(step: int, content: bytes | memoryview) -> str:
    """The name of a checkpoint's file."""
    return f"step-{step:08d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and check its digest. No code in it is executed (`weights_only`).

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
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"checkpoint {path} cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest()[:16] != match[2]:
        raise UserError(
            f"checkpoint {path} is damaged (truncated or altered): "
            f"its content does not match its name"
        )
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
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
