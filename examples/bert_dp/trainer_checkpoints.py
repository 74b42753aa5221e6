"""The Trainer's checkpoint folders, made safe to resume from: marked when whole, checked before use."""

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

from common.checkpoint import Checkpoint, announce_world, unwritable, write_atomically
from common.distributed import World, agree, from_main, say
from common.errors import UserError

SEAL = "seal.json"
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
TORCH_WRITES = "StreamWriter|inline_container|iostream|Parent directory"  # torch.save's RuntimeErrors name no file


def seal(folder: Path, config: dict[str, Any], world_size: int) -> None:
    """Write the digests of a checkpoint's files: a folder without them was interrupted while it was written."""
    digests = {file.name: _digest(file) for file in sorted(folder.iterdir()) if file.name != SEAL}
    content = {"config": config, "world_size": world_size, "digests": digests}
    write_atomically(folder / SEAL, json.dumps(content | {"digest": _own_digest(content)}, indent=2).encode())


def choose(folder: Path, resume: str, config: dict[str, Any], world: World) -> Checkpoint | None:
    """The checkpoint that all ranks resume from, or None to start afresh.

    Args:
        folder: where the Trainer writes them.
        resume: `auto` for the newest whole one, a path, or `no`. Workers that torchrun restarted go on in any case.
        config: the settings that must be the same.
        world: this process's world.

    Raises:
        UserError: damaged, made with other settings, or not the same on all ranks.
    """
    if resume == "no" and world.place.attempt == 0:
        from_main(world, lambda: _move_aside(folder))
        return None
    found = None if resume in ("auto", "no") else Path(resume)
    if found and (damage := damage_of(found) or ("" if step(found) >= 0 else "its name is not checkpoint-STEP")):
        raise UserError(f"checkpoint {found} is damaged ({damage}), or no checkpoint of this program")
    if found is None or world.place.attempt > 0:  # restarted workers have gone on from it, and saved
        for path in _newest_first(folder):
            if found and step(path) <= step(found):
                break
            if not (damage := damage_of(path)):
                found = path
                break
            say(world, f"warning: checkpoint {path} is damaged ({damage}); trying the one before it")
    agree(world, step(found) if found else 0, "the step to resume from")
    if found is None:
        return None
    before = json.loads((found / SEAL).read_text())
    for name in sorted(config.keys() | before["config"].keys()):
        if before["config"].get(name) != config.get(name):
            raise UserError(
                f"checkpoint {found} was made with {name} = {before['config'].get(name)}, this run has "
                f"{config.get(name)}: give the same flags, or start afresh with another --out"
            )
    from_main(world, lambda: _set_newer_aside(folder, found))
    announce_world(before["world_size"], world)
    return Checkpoint(found, step(found), {})


@contextlib.contextmanager
def in_one_line(folder: Path, start: Checkpoint | None, model: nn.Module) -> Generator[None]:
    """Say in one line what is wrong when the Trainer cannot write a checkpoint, or will not read one.

    Args:
        folder: where the Trainer writes them.
        start: the one that it resumes from.
        model: what is trained; a checkpoint holds its parameters, and the optimizer's two moments of each.

    Raises:
        UserError: the disk is full, for example; nothing is left of the attempt, and the checkpoints before stay.
    """
    needed = 3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    try:
        yield
    except UserError:  # what we write ourselves: metrics.jsonl, the seal
        _remove_unfinished(folder)
        raise
    except pickle.UnpicklingError:  # the Trainer reads by `weights_only`
        name = start.path if start else folder
        raise UserError(f"{name} is no checkpoint of this program: it holds something else than tensors") from None
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
        of_python = isinstance(error, OSError) and error.errno not in DISK
        if of_python or (isinstance(error, RuntimeError) and not re.search(TORCH_WRITES, reason)):
            raise
        _remove_unfinished(folder)
        raise unwritable(folder, reason, needed) from None


def _remove_unfinished(folder: Path) -> None:
    for path in _newest_first(folder)[:1]:
        if not (path / SEAL).exists():
            shutil.rmtree(path, ignore_errors=True)


def step(folder: Path) -> int:
    """The step at which the Trainer wrote a checkpoint."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else -1


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("checkpoint-*") if step(path) >= 0), key=step, reverse=True)


def damage_of(folder: Path) -> str:
    """What is wrong with a checkpoint, or with the best model so far, which is in another one; empty if nothing is."""
    if damage := _damage(folder):
        return damage
    try:
        best = json.loads((folder / "trainer_state.json").read_text())["best_model_checkpoint"]
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
            f"the best model, {path}, is damaged ({damage}): start again with --resume auto, which goes on from a "
            f"checkpoint before it"
        )


def _damage(folder: Path) -> str:
    try:
        content = json.loads((folder / SEAL).read_text())
        if content.pop("digest") != _own_digest(content):
            return f"{SEAL} does not match its digest"
        changed = [name for name, digest in content["digests"].items() if _digest(folder / name) != digest]
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        return f"it is not complete: {error}"
    return f"{changed[0]} does not match its digest" if changed else ""


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _set_newer_aside(folder: Path, found: Path) -> None:
    """Damaged or abandoned checkpoints that are newer than the resumed one would win the next time."""
    for path in _newest_first(folder):
        if step(path) > step(found):
            aside = path.with_name(f"aside-{path.name}")  # the Trainer counts and deletes what begins with checkpoint-
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            print(f"warning: {path} is newer than the checkpoint resumed from; it was renamed to {aside}", flush=True)


def _move_aside(folder: Path) -> None:
    """Mixed with new ones, an earlier run's checkpoints would be resumed by mistake."""
    if not _newest_first(folder):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    print(f"checkpoints of an earlier run were moved to {aside}", flush=True)
