"""A ResNet as a row of blocks that can be cut between any two; parameters keep their names."""

import contextlib
from collections.abc import Generator, Sequence
from functools import partial

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.launch.errors import UserError
from common.train.amp import MixedPrecision

PADDING = -100  # the label of samples that only fill a batch up: cross_entropy ignores it
NORMS = {
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 32),
    "frozen": torchvision.ops.FrozenBatchNorm2d,
}

Block = list[tuple[str, nn.Module]]
"""Modules that follow each other, with their qualified names; a cut cannot separate them."""


def build(arch: str, classes: int, norm: str) -> nn.Module:
    """The un-split model of torchvision.

    Args:
        arch: resnet18, resnet34, resnet50, resnet101 or resnet152.
        classes: number of classes.
        norm: batch (over the micro-batch), group (per sample) or frozen (BatchNorm whose
            statistics do not change).
    """
    # Residual blocks that begin as identities train faster (https://arxiv.org/abs/1706.02677);
    # frozen, they would stay identities.
    options = {"norm_layer": NORMS[norm], "zero_init_residual": norm != "frozen"}
    model: nn.Module = getattr(torchvision.models, arch)(num_classes=classes, **options)
    return model


def blocks(model: nn.Module) -> list[Block]:
    """A ResNet in the order of its forward: the stem, each residual block, the head.

    One tensor passes from each block to the next.
    """
    stem = [(name, model.get_submodule(name)) for name in ("conv1", "bn1", "relu", "maxpool")]
    residual = [
        [(f"{layer}.{number}", block)]
        for layer in ("layer1", "layer2", "layer3", "layer4")
        for number, block in model.get_submodule(layer).named_children()
    ]
    pool, fc = model.get_submodule("avgpool"), model.get_submodule("fc")
    head = [("avgpool", pool), ("flatten", nn.Flatten(1)), ("fc", fc)]
    return [stem, *residual, head]


def cut_points(names: Sequence[str], row: list[Block]) -> list[int]:
    """The number of the block with which each stage begins, from the names in `--cuts`.

    Args:
        names: first block of the second and later stages.
        row: the model's blocks.

    Raises:
        UserError: there is no such block, or the names are not in the order of the model.
    """
    firsts = [block[0][0] for block in row]
    unknown = [name for name in names if name not in firsts[1:]]
    if unknown:
        raise UserError(
            f"--cuts {unknown[0]}: no block of this name; a stage may begin with "
            f"{', '.join(firsts[1:])}"
        )
    points = [firsts.index(name) for name in names]
    if points != sorted(set(points)):
        raise UserError(f"--cuts {' '.join(names)}: give each block once, in the model's order")
    return [0, *points]


class Stage(nn.Module):
    """Consecutive blocks of a model. Parameters have the same names as in the un-split model.

    Args:
        row: the blocks.
        amp: precision in which they are computed.
        compile: through torch.compile.
        recompute: keep only the input for the backward pass and compute the rest again there
            (activation checkpointing, https://arxiv.org/abs/1604.06174): less memory, a third more
            time.
    """

    def __init__(
        self,
        row: list[Block],
        amp: MixedPrecision,
        compile: bool = False,  # noqa: A002 - torch's word
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.names = [name for block in row for name, _ in block]
        self.amp = amp
        self.recompute = recompute
        self.compute = torch.compile(self._run) if compile else self._run
        for block in row:
            for name, module in block:
                parent, _, leaf = name.rpartition(".")
                if parent and parent not in self._modules:
                    self.add_module(parent, nn.Module())
                self.get_submodule(parent).add_module(leaf, module)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W] or activations to activations [B, C, H', W'] or logits [B, K]."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self.compute,
                x,
                use_reentrant=False,
                preserve_rng_state=False,  # ResNets draw no random numbers
                context_fn=lambda: (contextlib.nullcontext(), statistics_kept(self)),
            )
        return self.compute(x)

    def _run(self, x: Tensor) -> Tensor:
        with self.amp.autocast():
            for name in self.names:
                x = self.get_submodule(name)(x)
        return x


@contextlib.contextmanager
def statistics_kept(model: nn.Module) -> Generator[None]:
    """Normalise by the batch without updating running statistics.

    A second forward over the same micro-batch would otherwise count it twice.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:  # torch leaves the body by an exception once it has what the backward pass needs
        for norm, (momentum, counted) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counted
