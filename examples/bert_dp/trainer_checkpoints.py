"""The Trainer's checkpoint folders, made safe to resume from: sealed when complete, then checked.

The Trainer writes the files of a checkpoint in place, one after the other. A seal, which is written
last, holds their digests: a folder without it was interrupted, and a file that does not match it
has changed.
"""

import contextlib
import errno
import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from common.launch.attempts import go_on
from common.launch.collectives import assert_same_on_all_ranks, broadcast_object, print0
from common.launch.console import warn
from common.launch.errors import UserError
from common.train.checkpoint import Checkpoint, announce_world
from common.train.files import unwritable, write_atomically

SEAL = "seal.json"
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
# torch.save's RuntimeErrors do not name a file.
TORCH_WRITES = "StreamWriter|inline_container|iostream|Parent directory"


def seal(folder: Path, config: dict[str, Any], ranks: dict[str, int]) -> None:
    """Write the digests of a checkpoint's files, the settings, and which `ranks` made it.

    Rank 0 calls this.
    """
    digests = {file.name: _digest(file) for file in sorted(folder.iterdir()) if file.name != SEAL}
    content = {"config": config, **ranks, "digests": digests}
    sealed = content | {"digest": _own_digest(content)}
    write_atomically(folder / SEAL, json.dumps(sealed, indent=2).encode())


def choose(folder: Path, resume: str, config: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint to resume from, or None to start afresh. Every rank calls this.

    Args:
        folder: where the Trainer writes them.
        resume: `auto` for the newest complete one, a path, or `no`. Workers that torchrun has
            restarted go on from the job's own in any case.
        config: the settings that must be the same.

    Raises:
        UserError: damaged, made with other settings, or not the same on all ranks.
    """
    restarted = go_on()
    if resume == "no" and not restarted:
        broadcast_object(lambda: _move_aside(folder))
        return None
    found = None if resume in ("auto", "no") else Path(resume)
    if found and (damage := damage_of(found) or _misnamed(found)):
        raise UserError(
            f"checkpoint {found} is damaged ({damage}), or not a checkpoint of this program"
        )
    if found is None or restarted:  # restarted workers have gone on from it, and saved
        found = _newest(folder, found)
    assert_same_on_all_ranks(step(found) if found else 0, "the step to resume from")
    if found is None:
        return None
    before = json.loads((found / SEAL).read_text())
    # As JSON keeps them: a tuple comes back as a list.
    now = json.loads(json.dumps(config))
    for name in sorted(now.keys() | before["config"].keys()):
        if before["config"].get(name) != now.get(name):
            raise UserError(
                f"checkpoint {found} was made with {name} = {before['config'].get(name)}, this run "
                f"has {now.get(name)}: give the same flags, or start afresh with another --out"
            )
    broadcast_object(lambda: _set_newer_aside(folder, found))
    announce_world(before)
    return Checkpoint(found, step(found), {})


def _newest(folder: Path, at_least: Path | None) -> Path | None:
    """The newest undamaged checkpoint, or the given one if no newer one is undamaged."""
    for path in _newest_first(folder):
        if at_least and step(path) <= step(at_least):
            break
        if not (damage := damage_of(path)):
            return path
        print0(f"warning: checkpoint {path} is damaged ({damage}); trying the one before it")
    return at_least


def _misnamed(folder: Path) -> str:
    return "" if step(folder) >= 0 else "its name is not checkpoint-STEP"


@contextlib.contextmanager
def errors_in_one_line(folder: Path, start: Checkpoint | None, model: nn.Module) -> Generator[None]:
    """Say in one line why the Trainer cannot write a checkpoint, or does not read one.

    Args:
        folder: where the Trainer writes them.
        start: the one that it resumes from.
        model: what is trained; a checkpoint holds its parameters, and two moments of each.

    Raises:
        UserError: the disk is full, for example. Nothing is left of the attempt, and the
            checkpoints before it stay.
    """
    needed = 3 * sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    try:
        yield
    except UserError:  # of files that this project writes: metrics.jsonl, the seal
        _remove_unfinished(folder)
        raise
    except pickle.UnpicklingError:  # the Trainer reads by `weights_only`
        name = start.path if start else folder
        raise UserError(
            f"{name} is not a checkpoint of this program: it holds something else than tensors"
        ) from None
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = getattr(error, "strerror", None)
        reason = reason or (str(error) or type(error).__name__).splitlines()[0]
        of_python = isinstance(error, OSError) and error.errno not in DISK
        of_torch = isinstance(error, RuntimeError) and not re.search(TORCH_WRITES, reason)
        if of_python or of_torch:
            raise
        _remove_unfinished(folder)
        raise unwritable(folder, reason, needed) from None


def _remove_unfinished(folder: Path) -> None:
    for path in _newest_first(folder)[:1]:
        if not (path / SEAL).exists():
            shutil.rmtree(path, ignore_errors=True)


def step(folder: Path) -> int:
    """The step at which the Trainer wrote a checkpoint; -1 for a folder of another name."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else -1


def _newest_first(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("checkpoint-*") if step(path) >= 0]
    return sorted(paths, key=step, reverse=True)


def damage_of(folder: Path) -> str:
    """What is wrong with a checkpoint, or with the best model so far, which another one holds.

    Returns:
        The damage in words; empty if there is none.
    """
    if damage := _damage(folder):
        return damage
    try:
        state = json.loads((folder / "trainer_state.json").read_text())
        best = state["best_model_checkpoint"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"it is not complete: {error}"
    other = folder.with_name(Path(best).name) if best else folder
    damage = _damage(other) if other != folder else ""
    return f"its best model, {other}: {damage}" if damage else ""


def check_best(path: str | None) -> None:
    """Check the checkpoint from which the Trainer has loaded the best model.

    Raises:
        UserError: it has been damaged since it was written.
    """
    if path and (damage := _damage(Path(path))):
        raise UserError(
            f"the best model, {path}, is damaged ({damage}): start again with --resume auto, "
            f"which continues from a checkpoint before it"
        )


def _damage(folder: Path) -> str:
    try:
        content = json.loads((folder / SEAL).read_text())
        if content.pop("digest") != _own_digest(content):
            return f"{SEAL} does not match its digest"
        digests = content["digests"].items()
        changed = [name for name, digest in digests if _digest(folder / name) != digest]
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        return f"it is not complete: {error}"
    return f"{changed[0]} does not match its digest" if changed else ""


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _set_newer_aside(folder: Path, found: Path) -> None:
    """Rename checkpoints that are newer than the resumed one, which would win the next time."""
    for path in _newest_first(folder):
        if step(path) > step(found):
            # The Trainer counts and deletes what begins with checkpoint-.
            aside = path.with_name(f"aside-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            warn(
                f"{path} is newer than the checkpoint resumed from; it was renamed to {aside.name}"
            )


def _move_aside(folder: Path) -> None:
    """Move an earlier run's checkpoints: among new ones, they would be resumed by mistake."""
    if not _newest_first(folder):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    print0(f"checkpoints of an earlier run were moved to {aside}")
