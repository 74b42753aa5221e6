"""The model and how it learns: torchvision's models, SGD, warm-up and cosine, average of weights.

`Recipe` in args.py has the flags. No function here knows ranks, except that the first process of
a node downloads weights.
"""

import copy
import difflib
import itertools
import math
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import models

from common.images.classifiers import classifier_options
from common.launch.collectives import local_rank0_first, print0
from common.launch.errors import UserError
from examples.imagenet_ddp.args import Recipe


def build_model(
    recipe: Recipe, classes: int, size: int, device: torch.device, training: bool = True
) -> nn.Module:
    """Build the model, on the CPU. With --pretrained, every rank calls this.

    Args:
        recipe: the flags.
        classes: number of outputs.
        size: height and width of the images, in pixels: models with positions depend on it.
        device: on which it will be trained.
        training: whether parameters may be random.

    Raises:
        UserError: there is no such model; images are too small for it; its weights could not be
            downloaded; --sync-bn on a CPU.
    """
    names = models.list_models(module=models)
    if recipe.arch not in names:
        near = ", ".join(difflib.get_close_matches(recipe.arch, names, 3)) or "resnet18, resnet50"
        raise UserError(
            f"-a {recipe.arch}: torchvision has no such classification model; do you mean {near}?"
        )
    if recipe.sync_bn and device.type != "cuda":
        raise UserError(
            "--sync-bn: torch's SyncBatchNorm takes CUDA tensors only; leave it out on a CPU"
        )
    options = classifier_options(recipe.arch, size)
    try:
        model = models.get_model(recipe.arch, weights=None, num_classes=classes, **options)
        # "meta": tensors that have shapes and no numbers
        trial = copy.deepcopy(model).to("meta").eval()
        trial(torch.empty(1, 3, size, size, device="meta"))
    except (ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"-a {recipe.arch} cannot take images of {size}x{size} ({reason}): change --image-size"
        ) from None
    if recipe.pretrained:
        _load_pretrained(model, recipe.arch, training)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if recipe.sync_bn else model


def _load_pretrained(model: nn.Module, arch: str, training: bool) -> None:
    """Set torchvision's weights; a last layer with another number of outputs stays random."""
    # the newest, as weights="DEFAULT"
    weights: Any = next(iter(reversed(list(models.get_model_weights(arch)))))
    with local_rank0_first(f"weights of {arch}"):
        try:
            # weights_only: a file that is there already is read unchecked, and may hold code
            loaded = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            folder = f"{torch.hub.get_dir()}/checkpoints"
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"--pretrained: {weights.url} could not be downloaded, or read ({reason}); "
                f"put that file into {folder}"
            ) from None
    own = model.state_dict()
    fitting = {
        name: value
        for name, value in loaded.items()
        if name in own and value.shape == own[name].shape
    }
    random = ", ".join(sorted(own.keys() - fitting.keys()))
    if random and not training:
        raise UserError(
            f"--evaluate --pretrained: torchvision's weights are of other classes (no {random}); "
            f"train first"
        )
    model.load_state_dict(fitting, strict=False)
    print0(f"weights {weights} loaded" + (f", but for {random}" if random else ""))


def make_optimizer(recipe: Recipe, model: nn.Module, lr: float, scaler: GradScaler) -> SGD:
    """SGD; `lr` is the highest learning rate."""
    decay = recipe.weight_decay
    # In float16 a step that overflows is left out. If it is the first, torch's fused SGD continues
    # with a momentum that was never set.
    fused = not scaler.is_enabled()
    return SGD(model.parameters(), lr, recipe.momentum, weight_decay=decay, fused=fused)


def make_scheduler(recipe: Recipe, optimizer: SGD, steps_per_epoch: int, epochs: int) -> LambdaLR:
    """The learning rate by step: linearly up, then down to 0 along half a cosine.

    The warm-up is that of Goyal et al., the cosine that of Loshchilov and Hutter, 2016
    (arXiv:1608.03983), without restarts.

    Raises:
        UserError: --start-epoch is not before the end.
    """
    if recipe.start_epoch >= epochs:
        raise UserError(
            f"--start-epoch {recipe.start_epoch}: the run ends after --epochs {epochs}; "
            f"epochs count from 0"
        )
    steps = epochs * steps_per_epoch
    warm_up = round(min(recipe.warmup_epochs, epochs / 2) * steps_per_epoch)

    def factor(step: int) -> float:
        step += recipe.start_epoch * steps_per_epoch
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    return LambdaLR(optimizer, factor)


class ExponentialAverage(AveragedModel):
    """torch's average of weights, without the copy of its count to the device in each update.

    The host waits for that copy, and so for all that the device still has to do.

    Args:
        model: what is averaged; the average begins as what it is after the first step.
        decay: how much of the average stays in a step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.average_lists = get_ema_multi_avg_fn(decay)
        super().__init__(model, multi_avg_fn=self.average_lists, use_buffers=True)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the parameters and buffers of the model to the average."""
        if self.n_averaged == 0:  # on the CPU
            super().update_parameters(model)
            return
        own = itertools.chain(self.module.parameters(), self.module.buffers())
        new = itertools.chain(model.parameters(), model.buffers())
        by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for average, value in zip(own, new, strict=True):
            averages, values = by_type.setdefault(average.dtype, ([], []))
            averages.append(average)
            values.append(value)
        for averages, values in by_type.values():
            self.average_lists(averages, values, 0)
        self.n_averaged += 1


def make_ema(recipe: Recipe, model: nn.Module) -> AveragedModel | None:
    """The exponential moving average of weights and buffers, if --ema asks for one.

    Args:
        recipe: the flags.
        model: on its device, not wrapped.
    """
    if recipe.ema == 0:
        return None
    return ExponentialAverage(model, recipe.ema)
