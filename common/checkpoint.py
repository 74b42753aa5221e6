"""Checkpoints that survive being interrupted at any moment, and that prove what they hold.

A checkpoint is one file `step-00000120-<digest>.pt`, made by `torch.save`; the digest in its name is the start of
the SHA-256 of its content (torch.load, safetensors and distributed checkpoints read a flipped bit without a word).
It is written beside its place, flushed to the disk and renamed: it is there completely or not at all.
"""

import contextlib
import hashlib
import io
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from common.distributed import World, agree
from common.errors import UserError
from common.seed import random_state, restore_random_state

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")
Resume = Literal["auto", "no"] | Path


@dataclass(frozen=True)
class Checkpoint:
    """What was read: the state, and where it came from."""

    path: Path
    step: int
    state: dict[str, Any]


def save(
    folder: Path, step: int, state: Mapping[str, Any], config: Mapping[str, Any], world: World, keep: int = 2
) -> None:
    """Write a checkpoint; every rank calls this, the main rank writes.

    Args:
        folder: where checkpoints lie.
        step: optimizer steps done so far.
        state: what training needs to go on: `state_dict`s and plain values. The random states of all ranks are added.
        config: the settings that must be the same when the run is resumed.
        world: this process's world.
        keep: how many checkpoints stay.

    Raises:
        UserError: the disk is full or the folder cannot be written. The previous checkpoints stay.
    """
    random: list[Any] = [None] * world.size
    dist.all_gather_object(random, random_state())
    if not world.is_main:
        return
    buffer = io.BytesIO()
    complete = {**state, "step": step, "config": dict(config), "world_size": world.size, "random": random}
    torch.save(complete, buffer)
    content = buffer.getvalue()
    name = f"step-{step:08d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    write_atomically(folder / name, content)
    for path in _files(folder)[keep:]:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash at any moment it is there completely, or as it was before.

    Raises:
        UserError: it cannot be written; nothing is left of the attempt.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, is on the disk only now
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize if path.parent.exists() else 0
        raise UserError(
            f"{path} cannot be written ({error.strerror}): {len(content):,} bytes needed, {free:,} free"
        ) from None


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and check its digest. No code in it is executed (`weights_only`).

    Raises:
        UserError: the file is missing, damaged, or no checkpoint of this project.
    """
    match = NAME.fullmatch(path.name)
    if not match:
        raise UserError(f"{path} is no checkpoint of this program: the name must be step-NUMBER-DIGEST.pt, as written")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"checkpoint {path} cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest()[:16] != match[2]:
        raise UserError(f"checkpoint {path} is damaged (truncated or altered): its content does not match its name")
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return Checkpoint(path, int(match[1]), state)


def latest(folder: Path, world: World) -> Checkpoint | None:
    """The newest checkpoint of a folder that is undamaged; damaged ones are named and passed over."""
    for path in _files(folder):
        try:
            return read(path)
        except UserError as error:
            if world.is_main:
                print(f"warning: {error}; trying the one before it", file=sys.stderr, flush=True)
    return None


def load(folder: Path, resume: str, config: Mapping[str, Any], world: World) -> Checkpoint | None:
    """Find the checkpoint from which all ranks resume together, and restore this rank's random state from it.

    Args:
        folder: where checkpoints lie.
        resume: `auto` for the newest valid one of the folder, `no` to start afresh, or a path.
        config: this run's settings; they must equal those of the checkpoint.
        world: this process's world.

    Returns:
        The checkpoint, or None to start from the beginning.

    Raises:
        UserError: damaged, made with other settings, or not the same on all ranks.
    """
    if resume == "no" and world.place.attempt == 0:
        _start_afresh(folder, world)
        return None
    automatic = resume in ("auto", "no")  # workers that torchrun restarted go on, whatever the flag says
    found = latest(folder, world) if automatic else read(Path(resume))
    agree(world, found.step if found else 0, "the step to resume from")
    if found is None:
        return None
    for name in sorted(config.keys() | found.state["config"].keys()):
        before, now = found.state["config"].get(name), config.get(name)
        if before != now:
            raise UserError(
                f"checkpoint {found.path} was made with {name} = {before}, this run has {now}: "
                f"give the same flags, or start afresh with another --out"
            )
    if found.state["world_size"] == world.size:
        restore_random_state(found.state["random"][world.rank])
    elif world.is_main:
        print(
            f"warning: the checkpoint was made by {found.state['world_size']} ranks, this run has {world.size}: the same "
            f"samples follow in the same order, but sums are rounded differently and random numbers start anew",
            file=sys.stderr,
            flush=True,
        )
    return found


def _start_afresh(folder: Path, world: World) -> None:
    """Move the checkpoints of an earlier run aside: mixed with new ones, they would be resumed by mistake."""
    if world.is_main:
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        if _files(folder):
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            folder.rename(aside)
            print(f"checkpoints of an earlier run were moved to {aside}", flush=True)
    dist.barrier()


def _files(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted((path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)), reverse=True)
