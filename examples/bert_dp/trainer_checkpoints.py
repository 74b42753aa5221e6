"""The Trainer's checkpoint folders, made safe to resume from: marked when whole, checked before use."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint, write_atomically
from common.distributed import World, agree, from_main, say
from common.errors import UserError

SEAL = "seal.json"


def seal(folder: Path, config: dict[str, Any]) -> None:
    """Write the digests of a checkpoint's files: a folder without them was interrupted while it was written."""
    digests = {file.name: _digest(file) for file in sorted(folder.iterdir()) if file.name != SEAL}
    write_atomically(folder / SEAL, json.dumps({"config": config, "digests": digests}, indent=2).encode())


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
    if resume in ("auto", "no"):
        whole = [path for path in _newest_first(folder) if not _damage(path)]
        for path in _newest_first(folder):
            if path not in whole:
                say(world, f"warning: checkpoint {path} is damaged ({_damage(path)}); trying the one before it")
        found = whole[0] if whole else None
    else:
        found = Path(resume)
        if damage := _damage(found):
            raise UserError(f"checkpoint {found} is damaged ({damage}), or no checkpoint of this program")
    agree(world, str(found), "the checkpoint to resume from")
    if found is not None:
        before = json.loads((found / SEAL).read_text())["config"]
        for name in sorted(config.keys() | before.keys()):
            if before.get(name) != config.get(name):
                raise UserError(
                    f"checkpoint {found} was made with {name} = {before.get(name)}, this run has {config.get(name)}: "
                    f"give the same flags, or start afresh with another --out"
                )
    return Checkpoint(found, step(found), {}) if found else None


def step(folder: Path) -> int:
    """The step at which the Trainer wrote a checkpoint."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else -1


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("checkpoint-*") if step(path) >= 0), key=step, reverse=True)


def _damage(folder: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing is."""
    try:
        digests = json.loads((folder / SEAL).read_text())["digests"]
        changed = [name for name, digest in digests.items() if _digest(folder / name) != digest]
    except (OSError, ValueError, KeyError) as error:
        return f"it is not complete: {error}"
    return f"{changed[0]} does not match its digest" if changed else ""


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _move_aside(folder: Path) -> None:
    """Mixed with new ones, an earlier run's checkpoints would be resumed by mistake."""
    if not _newest_first(folder):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    print(f"checkpoints of an earlier run were moved to {aside}", flush=True)
