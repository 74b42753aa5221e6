"""Model, pretrained weights, learning-rate schedule and weight average for imagenet_ddp."""

import difflib
import math
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import models

from common.checkpoint import load_model, newest
from common.launch import UserError
from common.rank import print0

from .args import Args


def model_options(args: Args) -> dict[str, Any]:
    """Return arguments for `torchvision.models.get_model` that suit --arch and --image-size."""
    if args.arch.startswith("vit_"):
        return {"image_size": args.image_size}
    if args.arch.startswith("maxvit"):
        return {"input_size": [args.image_size, args.image_size]}
    if args.arch in ("googlenet", "inception_v3"):  # one output, without the auxiliary heads
        return {"aux_logits": False, "init_weights": True, "transform_input": True}
    return {}


def build_model(args: Args, classes: int, device: torch.device) -> nn.Module:
    """Build the model that --arch names, on the device. Every rank calls this."""
    names = models.list_models(module=models)
    if args.arch not in names:
        similar = difflib.get_close_matches(args.arch, names) or ["resnet18", "resnet50"]
        raise UserError(f"torchvision has no model {args.arch}; try {', '.join(similar)}")
    if args.sync_bn and device.type != "cuda":
        raise UserError("--sync-bn needs CUDA, because SyncBatchNorm rejects CPU tensors")
    model = models.get_model(args.arch, num_classes=classes, **model_options(args))
    if args.pretrained and not (args.evaluate and args.resume != "no"):
        _load_pretrained(model, args)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(device).to(memory_format=torch.channels_last)  # speeds up bf16


def _load_pretrained(model: nn.Module, args: Args) -> None:
    """Load torchvision's newest weights, except for tensors whose shapes differ in the model."""
    weights: Any = models.get_model_weights(args.arch)["DEFAULT"]
    first = os.environ["LOCAL_RANK"] == "0"
    if not first:
        dist.barrier()  # the first process on the node downloads the file
    try:
        loaded = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        text = f"cannot load {weights.url} ({reason})"
        raise UserError(f"{text}; download it to {torch.hub.get_dir()}/checkpoints") from None
    if first:
        dist.barrier()
    own = model.state_dict()
    loaded = {n: v for n, v in loaded.items() if n in own and v.shape == own[n].shape}
    missing = ", ".join(sorted(own.keys() - loaded.keys()))
    if missing and args.evaluate:
        raise UserError(f"{weights} has no weights for {missing}; fine-tune the model first")
    model.load_state_dict(loaded, strict=False)
    print0(f"loaded {weights}" + (f", except {missing}" if missing else ""))


def load_trained(model: nn.Module, args: Args, classes: list[str]) -> None:
    """Load the weights that --resume specifies, for --evaluate."""
    if args.resume == "no":
        if not args.pretrained:
            raise UserError("--evaluate needs weights; add --resume auto|PATH or --pretrained")
        return
    path = Path(args.resume)
    if args.resume == "auto":
        found = newest(args.out / "checkpoints", print0)
        if found is None:
            raise UserError(f"{args.out}/checkpoints has no checkpoint; use --resume PATH")
        path, _ = found
    load_model(path, model, {"classes": classes})
    print0(f"loaded {path}")


def make_scheduler(args: Args, optimizer: Optimizer, loader: Any) -> LambdaLR:
    """Return the schedule: one epoch of warm-up (arXiv:1706.02677), then a half cosine to 0."""
    if loader.batch_size % args.accumulate:
        text = f"the local batch size {loader.batch_size} is not divisible by"
        raise UserError(f"{text} --accumulate {args.accumulate}; change --batch-size")
    steps_per_epoch = len(loader)
    if not steps_per_epoch:
        raise UserError(f"--batch-size {args.batch_size} exceeds the training set; use less")
    if args.start_epoch >= args.epochs:
        raise UserError(f"--start-epoch {args.start_epoch} must be below --epochs {args.epochs}")
    start, total = args.start_epoch * steps_per_epoch, args.epochs * steps_per_epoch
    warm_up = min(steps_per_epoch, total // 2)

    def factor(step: int) -> float:
        step += start
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up)))

    return LambdaLR(optimizer, factor)


class ExponentialAverage(AveragedModel):
    """Exponential moving average of weights that does not make the host wait for the GPU.

    In each update, AveragedModel copies the number of updates to the device and waits for the copy.
    The average starts with step 1's weights; later steps keep the fraction `decay` of the average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.lerp = get_ema_multi_avg_fn(decay)
        super().__init__(model, multi_avg_fn=self.lerp, use_buffers=True)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the model's weights and buffers."""
        if self.n_averaged == 0:  # a CPU tensor, so the host does not wait
            super().update_parameters(model)
            return
        own, new = self.module.state_dict(), model.state_dict()
        floats = [name for name, value in own.items() if value.is_floating_point()]
        self.lerp([own[name] for name in floats], [new[name] for name in floats], 0)
        for name in own.keys() - floats:  # BatchNorm's number of batches
            own[name].copy_(new[name])
        self.n_averaged += 1
