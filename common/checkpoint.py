"""Checkpoints that survive being interrupted at any moment, and that prove what they hold.

A checkpoint is one file `step-00000120-<digest>.pt`, made by `torch.save`; the digest in its name is the start of
the SHA-256 of its content (torch.load, safetensors and distributed checkpoints read a flipped bit without a word).
It is written beside its place, flushed to the disk and renamed: it is there completely or not at all.
"""

import contextlib
import hashlib
import io
import os
import pickle
import re
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from common.distributed import World, agree
from common.errors import UserError
from common.seed import random_state, restore_random_state

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")


class Stateful(Protocol):
    """What a checkpoint holds the state of: models, optimizers, schedules."""

    def state_dict(self) -> Any:
        """The state, as tensors and plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Set the state."""


@dataclass(frozen=True)
class Checkpoint:
    """What was read: the state, and where it came from."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def progress(self) -> dict[str, Any]:
        """The plain values that the program keeps about its progress."""
        return dict(self.state["progress"])


@dataclass
class Checkpoints:
    """The checkpoints of a run, written by a thread while training goes on.

    Use as a context manager around the training loop: leaving it waits until the last one is on the disk.

    Args:
        folder: where they lie.
        parts: what they hold the state of, by name. The random states of all ranks are added.
        config: the settings that must be the same when the run is resumed.
        world: this process's world.
        keep: how many stay.
    """

    folder: Path
    parts: Mapping[str, Stateful]
    config: Mapping[str, Any]
    world: World
    keep: int = 2
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"), repr=False)
    _pending: "Future[None] | None" = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            UserError: it could not be written: the disk is full, for example. The previous checkpoints stay.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(self, progress: Mapping[str, Any]) -> None:
        """Write a checkpoint; every rank calls this, the main rank writes.

        Training waits for the copy of the state in memory only, and for the checkpoint before this one if that is
        still being written.

        Args:
            progress: plain values; `step` counts the optimizer steps done so far.

        Raises:
            UserError: the one before could not be written.
        """
        random: list[Any] = [None] * self.world.size
        dist.all_gather_object(random, random_state())
        if not self.world.is_main:
            return
        self.wait()
        state = {name: _copied(part.state_dict()) for name, part in self.parts.items()}
        common = {"progress": dict(progress), "config": dict(self.config), "world_size": self.world.size}
        self._pending = self._thread.submit(self._write, progress["step"], state | common | {"random": random})

    def _write(self, step: int, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getbuffer()
        name = f"step-{step:08d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
        write_atomically(self.folder / name, content)
        for path in _files(self.folder)[self.keep :]:
            path.unlink(missing_ok=True)  # the newest is the one just written: `load` moved newer ones aside

    def load(self, resume: str) -> Checkpoint | None:
        """Find the checkpoint from which all ranks resume together, and set the parts and random states from it.

        Args:
            resume: `auto` for the newest valid one of the folder, `no` to start afresh, or a path. Workers that
                torchrun restarted go on in any case.

        Returns:
            The checkpoint, or None to start from the beginning.

        Raises:
            UserError: damaged, made with other settings, or not the same on all ranks.
        """
        world, config = self.world, self.config
        for leftover in self.folder.glob(".*.tmp") if world.is_main else ():  # of a process killed while it wrote
            leftover.unlink(missing_ok=True)
        if resume == "no" and world.place.attempt == 0:
            _start_afresh(self.folder, world)
            return None
        found = None if resume in ("auto", "no") else read(Path(resume))
        if found is None or world.place.attempt > 0:  # restarted workers have gone on from it, and saved
            newest = latest(self.folder, world)
            found = newest if found is None or (newest and newest.step > found.step) else found
        agree(world, found.step if found else 0, "the step to resume from")
        if found is None:
            if world.is_main:
                print(f"no checkpoint in {self.folder} yet: starting from the beginning", flush=True)
            return None
        made_with = found.state["config"]
        others = [
            f"{name} = {made_with.get(name)}, this run has {config.get(name)}"
            for name in sorted(config.keys() | made_with.keys())
            if made_with.get(name) != config.get(name)
        ]
        if others:
            raise UserError(
                f"checkpoint {found.path} was made with {'; '.join(others)}: "
                f"give the same flags, or start afresh with another --out"
            )
        _set_aside([path for path in _files(self.folder) if _step(path) > found.step], world)
        for name, part in self.parts.items():
            part.load_state_dict(found.state[name])
        made_by = found.state["world_size"]
        if made_by == world.size:
            restore_random_state(found.state["random"][world.rank])
        announce_world(made_by, world)
        return found


def announce_world(before: int, world: World) -> None:
    """Say what it means that a run goes on with another number of processes.

    Args:
        before: how many made the checkpoint.
        world: this process's world.
    """
    if before != world.size and world.is_main:
        _warn(
            f"continuing with {world.nodes} node(s), world {before} -> {world.size}: the same samples follow in "
            f"the same order, but sums are rounded differently and random numbers start anew"
        )


def load_model(resume: str, out: Path, model: nn.Module, world: World) -> str:
    """Set a model's weights from a file, to use the model without training on.

    Args:
        resume: `auto` for the newest valid checkpoint of the run, or the path of a checkpoint or .safetensors file;
            `no` leaves the weights as they are.
        out: the run's folder, with its `checkpoints`.
        model: gets the weights.
        world: this process's world.

    Returns:
        What was loaded, in words.

    Raises:
        UserError: there is none, it is damaged, or it is another model's.
    """
    if resume == "no":
        return "pretrained weights"
    path = Path(resume)
    if path.suffix == ".safetensors":
        try:
            weights = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error})") from None
    else:
        found = latest(out / "checkpoints", world) if resume == "auto" else read(path)
        if found is None:
            raise UserError(f"{out} holds no checkpoint to evaluate: give the path of one by --resume")
        path, weights = found.path, found.state["model"]
        if "ema" in found.state:  # what was evaluated during training
            average = {name: value for name, value in found.state["ema"].items() if name != "n_averaged"}
            weights = {name.removeprefix("module."): value for name, value in average.items()}
    agree(world, path.name, "the weights to evaluate")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path} holds the weights of another model: {str(error).splitlines()[-1].strip()}") from None
    return str(path)


def _copied(state: Any) -> Any:
    """A copy in the host's memory, which training does not change while it is written."""
    if isinstance(state, Tensor):
        return state.detach().clone() if state.device.type == "cpu" else state.detach().cpu()
    if isinstance(state, Mapping):
        return {name: _copied(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)([_copied(value) for value in state])
    return state


def write_atomically(path: Path, content: bytes | memoryview) -> None:
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
        raise unwritable(path, error.strerror, len(content)) from None


def unwritable(path: Path, reason: str | None, needed: int) -> UserError:
    """The error for a file that the disk does not take.

    Args:
        path: the file.
        reason: what the operating system says.
        needed: bytes to be written.
    """
    folder = next((folder for folder in path.parents if folder.exists()), Path())
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    return UserError(f"{path} cannot be written ({reason}): {needed:,} bytes needed, {free:,} free")


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and check its digest. No code in it is executed (`weights_only`).

    Raises:
        UserError: the file is missing, damaged, or no checkpoint of this project.
    """
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist")
    match = NAME.fullmatch(path.name)
    if not match:
        raise UserError(f"{path} is no checkpoint of this program: the name must be step-NUMBER-DIGEST.pt, as written")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"checkpoint {path} cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest()[:16] != match[2]:
        raise UserError(f"checkpoint {path} is damaged (truncated or altered): its content does not match its name")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise UserError(f"{path} is no checkpoint of this program: it holds something else than tensors") from None
    return Checkpoint(path, int(match[1]), state)


def latest(folder: Path, world: World) -> Checkpoint | None:
    """The newest checkpoint of a folder that is undamaged; damaged ones are named and passed over."""
    for path in _files(folder):
        try:
            return read(path)
        except UserError as error:
            if world.is_main:
                _warn(f"{error}; trying the one before it")
    return None


def _start_afresh(folder: Path, world: World) -> None:
    """Move the checkpoints of an earlier run aside: mixed with new ones, they would be resumed by mistake."""
    if world.is_main and _files(folder):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        print(f"checkpoints of an earlier run were moved to {aside}", flush=True)
    dist.barrier()


def _set_aside(newer: list[Path], world: World) -> None:
    """Rename damaged or abandoned checkpoints that are newer than the resumed one: they would win the next time."""
    for path in newer if world.is_main else []:
        path.rename(path.with_name(f"{path.name}.aside"))
        _warn(f"{path} is newer than the checkpoint resumed from; it was renamed to {path.name}.aside")


def _files(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    found = []
    for path in folder.glob("step-*.pt"):
        if NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # the main rank has just deleted it, or moved it aside
                found.append((_step(path), path.stat().st_mtime_ns, path))
    return [path for *_, path in sorted(found, reverse=True)]


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)
