"""A ResNet as a row of blocks that can be cut between any two, with the parameter names of the un-split model."""

import contextlib
from collections.abc import Generator, Sequence
from functools import partial

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.errors import UserError
from common.precision import Numerics

ARCHITECTURES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
IGNORED = -100  # the label of samples that only fill a batch up: cross entropy passes over them
NORMS = {
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 32),
    "frozen": torchvision.ops.FrozenBatchNorm2d,
}


def build(arch: str, classes: int, norm: str) -> nn.Module:
    """The un-split model of torchvision.

    Args:
        arch: one of `ARCHITECTURES`.
        classes: classes to tell apart.
        norm: batch (over the micro-batch), group (per sample) or frozen (BatchNorm whose statistics do not change).
    """
    # Residual blocks that begin as identities train faster (https://arxiv.org/abs/1706.02677); frozen, they stay so.
    options = {"norm_layer": NORMS[norm], "zero_init_residual": norm != "frozen"}
    model: nn.Module = getattr(torchvision.models, arch)(num_classes=classes, **options)
    return model


def blocks(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The indivisible parts of a ResNet in the order of its forward: the stem, each residual block, the head.

    Returns:
        Parts, each a list of (qualified name, module); one tensor passes from each part to the next.
    """
    stem = [(name, model.get_submodule(name)) for name in ("conv1", "bn1", "relu", "maxpool")]
    residual = [
        [(f"{layer}.{number}", block)]
        for layer in ("layer1", "layer2", "layer3", "layer4")
        for number, block in model.get_submodule(layer).named_children()
    ]
    head = [("avgpool", model.get_submodule("avgpool")), ("flatten", nn.Flatten(1)), ("fc", model.get_submodule("fc"))]
    return [stem, *residual, head]


def cut_points(names: Sequence[str], parts: list[list[tuple[str, nn.Module]]]) -> list[int]:
    """Where `--cuts` cuts: the index of the part with which each stage begins, from the names of their blocks.

    Raises:
        UserError: no such block, or not in the order of the model.
    """
    firsts = [part[0][0] for part in parts]
    unknown = [name for name in names if name not in firsts[1:]]
    if unknown:
        raise UserError(f"--cuts {unknown[0]}: no block of this name; a stage may begin with {', '.join(firsts[1:])}")
    points = [firsts.index(name) for name in names]
    if points != sorted(set(points)):
        raise UserError(f"--cuts {' '.join(names)}: give each block once, in the order of the model")
    return [0, *points]


class Stage(nn.Module):
    """Consecutive parts of a model. Its parameters have the names that they have in the un-split model.

    Args:
        parts: as `blocks` returns them.
        numerics: precision in which the blocks are computed.
        recompute: keep only the input for the backward pass and compute the rest again there
            (activation checkpointing, https://arxiv.org/abs/1604.06174): less memory, a third more time.
    """

    def __init__(self, parts: list[list[tuple[str, nn.Module]]], numerics: Numerics, recompute: bool = False) -> None:
        super().__init__()
        self.names = [name for part in parts for name, _ in part]
        self.numerics = numerics
        self.recompute = recompute
        self.compute = torch.compile(self._run) if numerics.compile else self._run
        for part in parts:
            for name, module in part:
                parent, _, leaf = name.rpartition(".")
                if parent and parent not in self._modules:
                    self.add_module(parent, nn.Module())
                self.get_submodule(parent).add_module(leaf, module)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W] or activations in; activations [B, C, H', W'] or logits [B, classes] out."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self.compute, x, use_reentrant=False, preserve_rng_state=False,  # ResNets draw no random numbers
                context_fn=lambda: (contextlib.nullcontext(), statistics_kept(self)),
            )  # fmt: skip
        return self.compute(x)

    def _run(self, x: Tensor) -> Tensor:
        with self.numerics.autocast():
            for name in self.names:
                x = self.get_submodule(name)(x)
        return x


@contextlib.contextmanager
def statistics_kept(model: nn.Module) -> Generator[None]:
    """Normalise by the batch without updating running statistics, which a second forward would count twice."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:  # the computation is left by an exception as soon as it has what the backward pass needs
        for norm, (momentum, counted) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counted
