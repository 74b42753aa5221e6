"""Checkpoints that survive being interrupted at any moment, with a checksum of what they hold.

A checkpoint is written beside its place, flushed to the disk and renamed: it is there completely or
not at all. Its name holds a digest of its content (`checkpoint_files`).
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.launch.attempts import go_on
from common.launch.collectives import assert_same_on_all_ranks, print0
from common.launch.console import warn
from common.launch.errors import UserError
from common.launch.place import current
from common.train.checkpoint_files import (
    Checkpoint,
    files,
    latest,
    read,
    step_of,
    values,
    write,
)
from common.train.seed import random_state, restore_random_state


class Stateful(Protocol):
    """What a checkpoint holds the state of: models, optimizers, schedules."""

    def state_dict(self) -> Any:
        """The state, as tensors and plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Set the state."""


@dataclass
class Checkpoints:
    """The checkpoints of a run, written by a thread while training goes on.

    Use as a context manager around the loop: leaving it waits until the last one is on the disk.

    Args:
        folder: where they lie.
        parts: what they hold the state of, by name. The random states of all ranks are added.
        config: the settings that must be the same when the run is resumed.
        keep: how many stay.
    """

    folder: Path
    parts: Mapping[str, Stateful]
    config: Mapping[str, Any]
    keep: int = 2
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"), repr=False
    )
    _pending: "Future[None] | None" = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            UserError: it could not be written, because the disk is full, for example. The one
                before stays.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(self, progress: Mapping[str, Any], wait: bool = False) -> None:
        """Write a checkpoint. Every rank calls this; rank 0 writes.

        Training waits for the copy of the state in memory only, and for the checkpoint before this
        one if that is still being written.

        Args:
            progress: plain values; `step` counts the optimizer steps done so far.
            wait: whether all ranks wait until this one is on the disk, as before its step is named.

        Raises:
            UserError: the one before could not be written, or this one, if it is waited for.
        """
        random: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(random, random_state())
        if dist.get_rank() == 0:
            self._start_to_write(progress, random)
        if wait:
            self.wait()
            dist.barrier()

    def _start_to_write(self, progress: Mapping[str, Any], random: list[Any]) -> None:
        self.wait()
        state = {name: _copied(part.state_dict()) for name, part in self.parts.items()}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # once, for all copies
        state |= {"progress": dict(progress), "config": dict(self.config)}
        state |= {"world_size": dist.get_world_size(), "random": random}
        state |= {"threads": torch.get_num_threads()}
        self._pending = self._thread.submit(self._write, progress["step"], state)

    def _write(self, step: int, state: dict[str, Any]) -> None:
        write(self.folder, step, state)
        # The newest is the one just written: `load` has moved newer ones aside.
        for path in files(self.folder)[self.keep :]:
            path.unlink(missing_ok=True)

    def load(self, resume: str) -> Checkpoint | None:
        """Set parts and random states from the checkpoint to resume from. Every rank calls this.

        Args:
            resume: `auto` for the newest valid one of the folder, `no` to start afresh, or a path.
                Workers that torchrun has restarted go on from the job's own in any case.

        Returns:
            The checkpoint, or None to start from the beginning.

        Raises:
            UserError: damaged, made with other settings, or not the same on all ranks; or a part is
                sharded, so that a checkpoint would hold rank 0's shard only; or one does not fit.
        """
        for name, part in self.parts.items():
            # by name: importing the class takes half a second
            if any(type(value).__name__ == "DTensor" for value in values(part.state_dict())):
                raise UserError(
                    f"part {name!r} of the checkpoints is sharded (DTensor): give one whose "
                    f"state_dict holds whole tensors on rank 0, gathered in before_save"
                )
        restarted = go_on()
        if dist.get_rank() == 0:
            for leftover in self.folder.glob(".*.tmp"):  # of a process killed while it wrote
                leftover.unlink(missing_ok=True)
        if resume == "no" and not restarted:
            _start_afresh(self.folder)
            return None
        found = None if resume in ("auto", "no") else read(Path(resume))
        if found is None or restarted:  # restarted workers have gone on from it, and saved
            newest = latest(self.folder)
            if found is None or (newest and newest.step > found.step):
                found = newest
        assert_same_on_all_ranks(found.step if found else 0, "the step to resume from")
        if found is None:
            print0(f"no checkpoint in {self.folder} yet: starting from the beginning")
            return None
        self._compare(found)
        _set_aside([path for path in files(self.folder) if step_of(path) > found.step])
        for name, part in self.parts.items():
            try:
                state = found.state[name]
                # A module copies what it is given. An optimizer may keep it, and it would be pages
                # of the file, which disappears in time.
                part.load_state_dict(state if isinstance(part, nn.Module) else _copied(state))
            except (KeyError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[-1].strip()
                raise UserError(
                    f"{found.path} does not fit {name!r} of this run ({reason}): resume with the "
                    f"program that wrote it, or choose another --out"
                ) from None
        if found.state["world_size"] == dist.get_world_size():
            restore_random_state(found.state["random"][dist.get_rank()])
        announce_world(found.state)
        return found

    def _compare(self, found: Checkpoint) -> None:
        config, made_with = self.config, found.state["config"]
        others = [
            f"{name} = {made_with.get(name)}, this run has {config.get(name)}"
            for name in sorted(config.keys() | made_with.keys())
            if made_with.get(name) != config.get(name)
        ]
        if others:
            longer = made_with.get("epochs") != config.get("epochs")
            raise UserError(
                f"checkpoint {found.path} was made with {'; '.join(others)}: "
                f"give the same flags, or start afresh with another --out"
                + " (to train longer: from these weights, by --init)"
                * longer
            )


def announce_world(before: Mapping[str, Any]) -> None:
    """Say what it means that a run continues with another number of ranks than before.

    Args:
        before: `world_size`, and `threads` of each rank, which older checkpoints do not hold.
    """
    world, threads, now = before["world_size"], before.get("threads"), torch.get_num_threads()
    if dist.get_rank() != 0:
        return
    if world != dist.get_world_size():
        warn(
            f"continuing with {current().num_nodes} node(s), world {world} -> "
            f"{dist.get_world_size()}: the same samples follow in the same order, but sums are "
            f"rounded differently and random numbers start anew"
        )
    elif threads not in (None, now):
        warn(
            f"continuing with {now} thread(s) per rank, not {threads}: sums are rounded "
            f"differently; --threads {threads} gives the same bits as before"
        )


def _copied(state: Any) -> Any:
    """A copy in the host's memory, which training does not change while it is written.

    Those of CUDA tensors are complete when the device has done its work so far.
    """
    if isinstance(state, Tensor) and state.is_cuda:
        # Into pinned memory, which torch keeps for the next checkpoint: no copy waits for another.
        pinned = torch.empty_like(state, device="cpu", pin_memory=True)
        return pinned.copy_(state.detach(), non_blocking=True)
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {name: _copied(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)([_copied(value) for value in state])
    return state


def _start_afresh(folder: Path) -> None:
    """Move an earlier run's checkpoints aside: among new ones, they would be resumed by mistake."""
    if dist.get_rank() == 0 and files(folder):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        print0(f"checkpoints of an earlier run were moved to {aside}")
    dist.barrier()


def _set_aside(newer: list[Path]) -> None:
    """Rename checkpoints newer than the resumed one, which would win the next time."""
    for path in newer if dist.get_rank() == 0 else []:
        path.rename(path.with_name(f"{path.name}.aside"))
        warn(
            f"{path} is newer than the checkpoint resumed from; it was renamed to {path.name}.aside"
        )
