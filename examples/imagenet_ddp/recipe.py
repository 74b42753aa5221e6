"""What is trained, and how it learns: torchvision's models, SGD, warm-up and cosine, an average of the weights.

Flags are read before torch is imported, so it is imported inside the functions.
"""

from __future__ import annotations

import copy
import difflib
import math
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from common.errors import UserError
from common.flags import at_least, share

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import SGD, lr_scheduler
    from torch.optim.swa_utils import AveragedModel

    from common.distributed import World


@dataclass(frozen=True)
class Recipe:
    """Recipe: the model, and how it learns."""

    arch: Annotated[str, arg(aliases=["-a"])] = "resnet18"
    """Any classification model of torchvision."""
    pretrained: bool = False
    """Start from torchvision's weights for ImageNet."""
    lr: Annotated[float | None, arg(aliases=["--learning-rate"])] = None
    """Highest learning rate (default: 0.1 per 256 images of the batch)."""
    warmup_epochs: float = 1.0
    """Epochs in which the learning rate rises; then it falls along a cosine."""
    start_epoch: Annotated[int, arg(metavar="N")] = 0
    """Begin at this epoch's order and learning rate, where nothing is resumed."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 1e-4
    """L2 penalty."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""
    ema: Annotated[float, arg(metavar="DECAY")] = 0.0
    """Evaluate an exponential moving average of the weights, with this decay per step; 0 does not."""
    sync_bn: bool = False
    """BatchNorm over the batches of all ranks (CUDA only)."""

    def __post_init__(self) -> None:
        at_least(
            0,
            start_epoch=self.start_epoch,
            lr=self.lr,
            weight_decay=self.weight_decay,
            warmup_epochs=self.warmup_epochs,
        )
        share(momentum=self.momentum, label_smoothing=self.label_smoothing, ema=self.ema)

    def model(self, classes: int, size: int, world: World, training: bool) -> nn.Module:
        """Build the model.

        Args:
            classes: number of outputs.
            size: height and width of the images, in pixels: models with positions in them depend on it.
            world: this process's world; one process per node downloads weights.
            training: whether parameters may be random.

        Raises:
            UserError: no such model, images too small for it, weights that cannot be had, --sync-bn on a CPU.
        """
        import torch
        from torch import nn
        from torchvision import models

        names = models.list_models(module=models)
        if self.arch not in names:
            near = ", ".join(difflib.get_close_matches(self.arch, names, 3)) or "resnet18, resnet50"
            raise UserError(f"-a {self.arch}: torchvision has no such classification model; do you mean {near}?")
        if self.sync_bn and world.device.type != "cuda":
            raise UserError("--sync-bn: torch's SyncBatchNorm takes CUDA tensors only; leave it out on a CPU")
        options: dict[str, Any] = {"num_classes": classes}
        if self.arch.startswith("vit_"):
            options["image_size"] = size
        elif self.arch.startswith("maxvit"):
            options["input_size"] = (size, size)
        elif self.arch in ("googlenet", "inception_v3"):
            options |= {
                "aux_logits": False,
                "init_weights": True,
                "transform_input": self.pretrained,
            }  # without the extra heads for training
        try:
            model = models.get_model(self.arch, weights=None, **options)
            copy.deepcopy(model).to("meta").eval()(torch.empty(1, 3, size, size, device="meta"))  # shapes, no numbers
        except (ValueError, RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"-a {self.arch} cannot take images of {size}x{size} ({reason}): change --image-size"
            ) from None
        if self.pretrained:
            _load_pretrained(model, self.arch, world, training)
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if self.sync_bn else model

    def optimizer(self, model: nn.Module, batch_size: int) -> SGD:
        """SGD with the learning rate for a global batch (Goyal et al., 2017, https://arxiv.org/abs/1706.02677)."""
        from torch.optim import SGD

        lr = 0.1 * batch_size / 256 if self.lr is None else self.lr
        return SGD(model.parameters(), lr, self.momentum, weight_decay=self.weight_decay, fused=True)

    def schedule(self, optimizer: SGD, steps_per_epoch: int, epochs: int) -> lr_scheduler.LambdaLR:
        """The learning rate by step: linearly up, then down to 0 along half a cosine.

        Warm-up as Goyal et al. have it, cosine as Loshchilov and Hutter, 2016 (https://arxiv.org/abs/1608.03983),
        without restarts.
        """
        from torch.optim import lr_scheduler

        if self.start_epoch >= epochs:
            raise UserError(
                f"--start-epoch {self.start_epoch}: the run ends after --epochs {epochs}; epochs count from 0"
            )
        steps, warm_up = epochs * steps_per_epoch, round(min(self.warmup_epochs, epochs / 2) * steps_per_epoch)

        def factor(step: int) -> float:
            step += self.start_epoch * steps_per_epoch
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

        return lr_scheduler.LambdaLR(optimizer, factor)

    def average(self, model: nn.Module) -> AveragedModel | None:
        """The exponential moving average of the weights and buffers, if one was asked for."""
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        if self.ema == 0:
            return None
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.ema), use_buffers=True)


def _load_pretrained(model: nn.Module, arch: str, world: World, training: bool) -> None:
    """Set torchvision's weights; a last layer with another number of outputs stays random."""
    import torch
    from torchvision import models

    from common.distributed import main_first, say

    weights: Any = next(iter(reversed(list(models.get_model_weights(arch)))))  # the newest, as weights="DEFAULT"
    with main_first(world, f"weights of {arch}"):
        try:
            # weights_only: a file that is there already is read unchecked, and may hold code
            loaded = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            place = f"{torch.hub.get_dir()}/checkpoints"
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"--pretrained: {weights.url} cannot be had ({reason}); put that file into {place}"
            ) from None
    own = model.state_dict()
    fitting = {name: value for name, value in loaded.items() if name in own and value.shape == own[name].shape}
    random = ", ".join(sorted(own.keys() - fitting.keys()))
    if random and not training:
        raise UserError(
            f"--evaluate --pretrained: torchvision's weights are of other classes (no {random}); train first"
        )
    model.load_state_dict(fitting, strict=False)
    say(world, f"weights {weights} loaded" + (f", but for {random}" if random else ""))
