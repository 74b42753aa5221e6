"""Weights: read from files of several kinds, and the best of a run kept as safetensors."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from common.launch.collectives import assert_same_on_all_ranks, print0
from common.launch.errors import UserError
from common.train.checkpoint_files import NAME, latest, read
from common.train.checks import parameter_hash
from common.train.files import write_atomically

WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel's and torch.compile's
EXTRA = ("aux", "AuxLogits")  # heads of googlenet and inception_v3, for their training only


def save_model(file: Path, model: nn.Module, about: Mapping[str, str]) -> None:
    """Write a bare model's parameters and buffers as safetensors, with words about them."""
    weights, seen = dict[str, Tensor](), set[int]()
    for name, tensor in model.state_dict().items():
        weight = tensor.detach().cpu().contiguous()
        memory = weight.untyped_storage().data_ptr()
        # safetensors has no tensor in the memory of another, as tied weights have it
        weights[name] = weight.clone() if memory in seen else weight
        seen.add(memory)
    write_atomically(file, save(weights, dict(about)))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read weights without running code in the file, named as in the bare model.

    Args:
        path: a .safetensors file; a checkpoint of this project, of which the average of weights is
            taken if there is one; or what torch.save has written: weights (torchvision's files), or
            a dictionary with them in `state_dict` (`checkpoint.pth.tar` of pytorch/examples).

    Raises:
        UserError: it is missing, damaged, or none of these.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if NAME.fullmatch(path.name):
            return _of_checkpoint(read(path).state)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read as weights ({reason})") from None
    if isinstance(state, dict):
        state = state.get("state_dict", state.get("model", state))
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(f"{path} holds no weights: expected tensors by name, or `state_dict`")
    return _bare_names(state)


def _of_checkpoint(state: Mapping[str, Any]) -> dict[str, Tensor]:
    if "ema" not in state:
        return dict(state["model"])
    # what was evaluated during training
    return _bare_names({name: v for name, v in state["ema"].items() if name != "n_averaged"})


def _bare_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        if weights and all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): value for name, value in weights.items()}
    return dict(weights)


def init_model(path: Path, model: Any) -> None:
    """Set a model's weights from the file of `--init`, before it is trained. Every rank calls this.

    A last layer with another number of outputs stays random.

    Args:
        path: as `read_weights`.
        model: gets the weights.

    Raises:
        UserError: as `read_weights`; the weights are another model's, or not the same on all ranks.
    """
    own, found = model.state_dict(), read_weights(path)
    head = next(reversed(own)).rpartition(".")[0]
    differ = [name for name in own.keys() & found.keys() if own[name].shape != found[name].shape]
    random = [
        name
        for name in differ
        if name.rpartition(".")[0] == head and own[name].shape[1:] == found[name].shape[1:]
    ]
    if wrong := sorted(set(differ) - set(random)):
        there, here = (list(state[wrong[0]].shape) for state in (found, own))
        raise UserError(
            f"--init {path} is of another model: {wrong[0]} is {there} there and {here} here"
            f"{_others(wrong)}"
        )
    surplus = [name for name in found.keys() - own.keys() if not name.startswith(EXTRA)]
    counts = "num_batches_tracked"  # BatchNorm's, which some files lack
    odd = [name for name in {*surplus, *(own.keys() - found.keys())} if not name.endswith(counts)]
    if odd := sorted(odd):
        place = "this model" if odd[0] in found else "the file"
        raise UserError(f"--init {path} is of another model: no {odd[0]} in {place}{_others(odd)}")
    fitting = {name: found[name] for name in own if name in found and name not in random}
    model.load_state_dict({**own, **fitting})
    assert_same_on_all_ranks(parameter_hash(model)[:16], "the weights of --init")
    but = f", but for {', '.join(sorted(random))}: another number of outputs" if random else ""
    print0(f"weights of {path} loaded{but}")


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more such tensors)" if len(names) > 1 else ""


def load_model(resume: str, out: Path, model: nn.Module) -> str:
    """Set a model's weights from a file, to use it without training on. Every rank calls this.

    Args:
        resume: `auto` for the newest valid checkpoint of the run, or a path, as `read_weights`;
            `no` leaves the weights as they are.
        out: the run's folder, with its `checkpoints`.
        model: gets the weights.

    Returns:
        What was loaded, in words.

    Raises:
        UserError: the file is missing, damaged, or another model's.
    """
    if resume == "no":
        return "pretrained weights"
    if resume == "auto":
        found = latest(out / "checkpoints")
        if found is None:
            raise UserError(
                f"{out} holds no checkpoint to evaluate: give the path of one by --resume"
            )
        path, weights = found.path, _of_checkpoint(found.state)
    else:
        path = Path(resume)
        weights = read_weights(path)
    own = model.state_dict()
    weights = {n: v for n, v in weights.items() if n in own or not n.startswith(EXTRA)}
    assert_same_on_all_ranks(path.name, "the weights to evaluate")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{path} holds the weights of another model: {reason}") from None
    return str(path)
