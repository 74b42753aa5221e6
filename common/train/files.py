"""Files that are written whole or not at all."""

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from common.launch.errors import UserError

# What a run leaves in its folder, beside checkpoints.
RESULTS = (
    *("result.json", "metrics.jsonl", "curves.png", "predictions.csv", "best.safetensors"),
    "model.safetensors",
    *("tensorboard", "trace.json", "timeline.png", "samples", "samples.png", "model"),
    *("trace", "trace.json.gz", "profile.png"),
)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that after a crash at any moment it is whole, or as it was before.

    Raises:
        UserError: it cannot be written; nothing is left of the attempt.
    """

    def write(file: BinaryIO) -> Path:
        file.write(content)
        return path

    written_whole(path, write, len(content))


def written_whole(path: Path, write: Callable[[BinaryIO], Path], needed: int) -> None:
    """Let a file be written beside its place, and give it its name when it is on the disk.

    Args:
        path: its name, or another one in its folder if only its content tells the name.
        write: called with the open file; returns its name.
        needed: its size in bytes, or nearly so, for the message when the disk is full.

    Raises:
        UserError: it cannot be written; nothing is left of the attempt.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            name = write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(name)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, is on the disk only now
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritable(path, error.strerror, needed) from None


@contextlib.contextmanager
def writing(path: Path, needed: int = 0) -> Generator[None]:
    """Say in one line what the disk does not take.

    Args:
        path: the file.
        needed: bytes to be written.

    Raises:
        UserError: the body met an OSError.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error.strerror, needed) from None


def unwritable(path: Path, reason: str | None, needed: int) -> UserError:
    """The error for a file that the disk does not take."""
    folder = next((folder for folder in path.parents if folder.exists()), Path())
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    return UserError(f"{path} cannot be written ({reason}): {needed:,} bytes needed, {free:,} free")


def set_aside(out: Path) -> Path | None:
    """Move the results of an earlier run out of the way of a new one in the same folder.

    Returns:
        The folder that they are in now; None if there were none.
    """
    found = [out / name for name in RESULTS if (out / name).exists()]
    if not any(
        path.name in ("result.json", "metrics.jsonl") and path.stat().st_size for path in found
    ):
        return None
    number = 1
    while (aside := out / f"results.{number}").exists():
        number += 1
    with writing(aside):
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
    return aside


def check_writable(folder: Path, flag: str) -> None:
    """Make a folder, and see that files can be written in it.

    Raises:
        UserError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{flag} {folder} cannot be written ({error.strerror}): choose another folder"
        ) from None
