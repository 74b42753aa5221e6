"""Write checkpoints that survive an interruption at any moment, and load other programs' weights.

A checkpoint is written to a temporary file, flushed to disk and renamed, so it is never partial.
torch.save stores a CRC-32 of each tensor; `load` verifies it, while torch.load does not.
"""

import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.launch import UserError


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write FOLDER/step-STEP.pt, and delete all other checkpoints except the previous one.

    Raises:
        UserError: the file cannot be written; the previous checkpoint remains.
        TypeError: the state contains an object that cannot be loaded again.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        # torch.save accepts objects that `load` rejects. With mmap, this check reads no tensors.
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        temporary.replace(path)
    except pickle.UnpicklingError as error:
        found = str(error).partition("Unsupported")[2].partition(" was not")[0]
        raise TypeError(f"state_dict() has an unsupported{found}; use float() or str()") from None
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"cannot write {path}: {reason}; check space and permissions") from None
    finally:
        temporary.unlink(missing_ok=True)
    # Also delete later checkpoints: they are damaged, or this run was resumed from an earlier one.
    others = checkpoints(path.parent)
    for other in {*others} - {*[p for p in others if p <= path][:2]}:
        other.unlink(missing_ok=True)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    return sorted(folder.glob("step-*.pt"), reverse=True)


def load(path: Path) -> dict[str, Any]:
    """Read a file written by torch.save, without executing code in it.

    Raises:
        UserError: the file is missing, damaged, or not written by torch.save.
    """
    try:
        with zipfile.ZipFile(path) as file:
            if damaged := file.testzip():
                raise UserError(f"{path} is damaged: the checksum of {damaged} is wrong; delete it")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile):
        raise UserError(f"{path} is not a checkpoint: {describe(path)}") from None
    except pickle.UnpicklingError:
        raise UserError(f"{path} contains Python objects; save model.state_dict()") from None
    return content if isinstance(content, dict) else {}  # not a list or a lone tensor


def describe(path: Path) -> str:
    """Return a short explanation of why a file cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:  # for example, the path is a folder
        return f"{error.strerror}"
    if head.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer; run `git lfs pull`"
    if head.lstrip()[:1] == b"<":
        return "it is a web page; download the file again"
    if head.startswith(b"\x80"):
        return "it was saved in the format of torch < 1.6; save it again with a newer torch"
    return "it is damaged or has an unknown format"


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and content of the newest intact checkpoint; warn about damaged ones."""
    for path in checkpoints(folder):
        try:
            return path, load(path)
        except UserError as error:
            warn(f"{error}; using the previous checkpoint")
    return None


def save_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write weights by name to a safetensors file, and `about` as its metadata."""
    # safetensors rejects tied weights; a clone is written once per name.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}
    temporary = path.with_suffix(".tmp")
    try:
        save_file(tensors, temporary, {name: json.dumps(value) for name, value in about.items()})
    except SafetensorError as error:
        raise UserError(f"cannot write {path}: {error}; check space and permissions") from None
    temporary.replace(path)


def load_weights(
    path: Path, names: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the weights in a file, and the metadata that `save_weights` wrote.

    The file is a .safetensors file, a checkpoint, or a state dict, also under a key like `model`.
    If it has none of the model's parameter `names`, prefixes that wrappers add are removed.

    Raises:
        UserError: the file is missing, damaged, contains no weights, or contains NaN.
    """
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                found: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                about = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
        except (OSError, SafetensorError):
            raise UserError(f"{path} contains no weights: {describe(path)}") from None
        except json.JSONDecodeError:
            about = {}  # written by another program
    else:
        about, found = {}, load(path)
        if "parts" in found:  # a checkpoint that `save` wrote
            about, found = found.get("about", {}), found["parts"]
        keys = ("ema", "state_dict", "model_state_dict", "model")
        found = next((found[key] for key in keys if isinstance(found.get(key), dict)), found)
    weights = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if not weights:
        raise UserError(f"{path} contains no weights; expected a state dict of tensors")
    weights.pop("n_averaged", None)  # added by AveragedModel
    for prefix in 2 * ("module.", "_orig_mod."):  # added by DDP and torch.compile
        if weights.keys().isdisjoint(names) and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    if wrong := [n for n, v in weights.items() if v.is_floating_point() and v.isnan().any()]:
        raise UserError(f"{path} contains NaN in {wrong[0]}; use weights from an earlier step")
    return weights, about


def load_model(path: Path, model: Any, about: Mapping[str, Any]) -> None:
    """Load a file's weights into a model, and compare the file's class names with `about`.

    Raises:
        UserError: the weights belong to another model or to other classes.
    """
    weights, written = load_weights(path, model.state_dict().keys())
    check_classes(path, written, about)
    extra = {n: value for n, value in model.state_dict().items() if not isinstance(value, Tensor)}
    try:
        model.load_state_dict(extra | weights)  # weight files lack the modules' extra state
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise UserError(f"{path} does not match the model: {reason}") from None


def check_classes(path: Path, written: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raise UserError if the file and the data have different class names."""
    ours, theirs = about.get("classes"), written.get("classes")
    if ours and theirs and ours != theirs:
        raise UserError(f"{path} has the classes {theirs}, the data {ours}; use matching weights")


def random_state() -> dict[str, Any]:
    """Return the state of this process's random number generators, as tensors and plain values."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}
    state["torch"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the state of this process's random number generators from `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
