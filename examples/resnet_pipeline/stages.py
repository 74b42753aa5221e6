"""Cut a ResNet, a sequence of blocks, into pipeline stages."""

from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models import get_model
from torchvision.models.resnet import BasicBlock, Bottleneck

from common.launch import UserError

# GroupNorm normalizes each sample separately. BatchNorm normalizes a micro-batch, so results then
# depend on the numbers of micro-batches and replicas, but not on the number of stages.
NORMS = {"group": partial(nn.GroupNorm, 32), "batch": nn.BatchNorm2d}


def build(arch: str, classes: int, norm: str) -> nn.Module:
    """Return the un-split model, a ResNet from torchvision."""
    # Residual blocks start as identities to ease optimization (arXiv:1706.02677).
    return get_model(arch, num_classes=classes, norm_layer=NORMS[norm], zero_init_residual=True)


def cut(model: nn.Module, stages: int, cuts: tuple[str, ...] = ()) -> list[list[str]]:
    """Return each stage's module names, in the order of the forward pass.

    A cut is possible where a single tensor passes: before a residual block and before the head. By
    default, stages have equal numbers of residual blocks.
    """
    blocks = [n for n, m in model.named_modules() if isinstance(m, BasicBlock | Bottleneck)]
    names = ["conv1", "bn1", "relu", "maxpool", *blocks, "avgpool", "fc"]
    if not cuts:
        count = len(blocks)
        if stages > count:
            raise UserError(f"cannot split {count} residual blocks into {stages} stages; use fewer")
        cuts = tuple(blocks[count * stage // stages] for stage in range(1, stages))
    possible = [*blocks, "avgpool"]
    if len(cuts) != stages - 1 or list(cuts) != [name for name in possible if name in cuts]:
        text = f"--cuts {' '.join(cuts)} does not define {stages} stage(s); choose {stages - 1}"
        raise UserError(f"{text} of these, in this order: {', '.join(possible)}")
    bounds = [0, *(names.index(name) for name in cuts), len(names)]
    return [names[bounds[i] : bounds[i + 1]] for i in range(stages)]


class Stage(nn.Module):
    """Consecutive modules of the un-split model; the parameters keep their names."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            layer, _, leaf = name.rpartition(".")  # layer1.0 is module 0 in layer1
            if layer and not hasattr(self, layer):
                self.add_module(layer, nn.Module())
            self.get_submodule(layer).add_module(leaf, model.get_submodule(name))
        self.to(memory_format=torch.channels_last)  # makes bf16 convolutions twice as fast

    def forward(self, x: Tensor) -> Tensor:
        """Return activations [B, C', H', W'] or logits [B, classes] for an input [B, C, H, W]."""
        for name in self.names:
            x = self.get_submodule(name)(x.flatten(1) if name == "fc" else x)
        return x


def build_stage(
    arch: str, classes: int, norm: str, stages: int, index: int, cuts: tuple[str, ...] = ()
) -> Stage:
    """Build the un-split model and return one of its stages."""
    model = build(arch, classes, norm)
    return Stage(model, cut(model, stages, cuts)[index])
