"""Cut a ResNet, a sequence of blocks, into pipeline stages."""

from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models import get_model

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
    row = [["conv1", "bn1", "relu", "maxpool"]]
    for layer in ("layer1", "layer2", "layer3", "layer4"):
        row += [[f"{layer}.{name}"] for name, _ in model.get_submodule(layer).named_children()]
    row += [["avgpool", "fc"]]
    firsts, residual = [block[0] for block in row], len(row) - 2
    starts = [1 + residual * stage // stages for stage in range(1, stages)]
    if cuts:
        starts = [firsts.index(name) for name in cuts if name in firsts[1:]]
        if len(cuts) != stages - 1 or len(starts) != len(cuts) or starts != sorted(set(starts)):
            text = f"--cuts {' '.join(cuts)} does not define {stages} stage(s)"
            blocks = f"{stages - 1} of these, in this order: {', '.join(firsts[1:])}"
            raise UserError(f"{text}; choose {blocks}")
    elif stages > residual:
        raise UserError(f"cannot split {residual} residual blocks into {stages} stages; use fewer")
    bounds = [0, *starts, len(row)]
    return [sum(row[bounds[i] : bounds[i + 1]], []) for i in range(stages)]  # noqa: RUF017


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
