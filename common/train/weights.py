"""Weights: read from a file, and the best of a run kept as safetensors."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from common.launch.collectives import assert_same_on_all_ranks
from common.launch.errors import UserError
from common.train.checkpoint_files import latest, read
from common.train.files import write_atomically


def save_model(file: Path, model: nn.Module) -> None:
    """Write a bare model's parameters and buffers as safetensors."""
    weights = model.state_dict()
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_atomically(file, save(weights))


def load_model(resume: str, out: Path, model: nn.Module) -> str:
    """Set a model's weights from a file, to use it without training on. Every rank calls this.

    Args:
        resume: `auto` for the newest valid checkpoint of the run, or the path of a checkpoint or
            .safetensors file; `no` leaves the weights as they are.
        out: the run's folder, with its `checkpoints`.
        model: gets the weights.

    Returns:
        What was loaded, in words.

    Raises:
        UserError: the file is missing, damaged, or another model's.
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
        found = latest(out / "checkpoints") if resume == "auto" else read(path)
        if found is None:
            raise UserError(
                f"{out} holds no checkpoint to evaluate: give the path of one by --resume"
            )
        path, weights = found.path, found.state["model"]
        if "ema" in found.state:  # what was evaluated during training
            average = found.state["ema"].items()
            weights = {
                name.removeprefix("module."): value
                for name, value in average
                if name != "n_averaged"
            }
    assert_same_on_all_ranks(path.name, "the weights to evaluate")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{path} holds the weights of another model: {reason}") from None
    return str(path)
