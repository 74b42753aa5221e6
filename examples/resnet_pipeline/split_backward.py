"""A backward pass in two halves: what the stage before waits for, and what nobody waits for.

The gradient of a stage's input is wanted by the stage before, at once; those of the weights are
wanted by the optimizer, at the end of the step. So a layer's backward pass y = layer(x) is cut:

    gradient of x = f(weight, gradient of y)      now: `backward_of_inputs`
    gradient of weight = g(x, gradient of y)      when there is time: `backward_of_weights`

This is how "zero bubble" schedules fill idle time (https://arxiv.org/abs/2401.10241, section 2).
Convolutions and linear layers wait, which is half of the backward pass. All other parameters get
their gradients in the first half: those of a normalisation are by-products of its input's gradient.

Between the halves, x and the gradient of y are kept for each of these layers, and nothing else.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.grad import conv2d_weight


class Call(NamedTuple):
    """A layer was computed: y = layer(x)."""

    layer: nn.Module
    x: Tensor
    y: GradientEdge  # not y itself, which what follows may overwrite, or need no longer


class Half(NamedTuple):
    """What `backward_of_weights` needs of a layer."""

    layer: nn.Module
    x: Tensor
    gradient: Tensor
    """Of the layer's output."""


def can_wait(module: nn.Module) -> bool:
    """Whether the gradient of a module's weights can be computed later."""
    if isinstance(module, nn.Conv2d):  # others pad by hand, or have a padding in words
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return isinstance(module, nn.Linear)


@contextlib.contextmanager
def recorded(module: nn.Module) -> Generator[list[Call]]:
    """The layers that can wait, in the order in which the body computes them.

    Args:
        module: a stage whose forward pass the body computes once.
    """
    calls: list[Call] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        # Autocast has computed with an input of the output's type.
        calls.append(Call(layer, inputs[0].detach().to(y.dtype), get_gradient_edge(y)))

    hooks = [part.register_forward_hook(note) for part in module.modules() if can_wait(part)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def backward_of_inputs(
    module: nn.Module, calls: Sequence[Call], x: Tensor, y: Tensor, gradient: Tensor | None
) -> list[Half]:
    """The first half: sets `x.grad`, and adds to the gradients of parameters that cannot wait.

    Autograd computes only what it is asked for: the gradients of the layers' outputs, which lie on
    the way to that of x, but not those of their weights.

    Args:
        module: the stage.
        calls: what `recorded` has noted of its forward pass.
        x: its input. Images need no gradient.
        y: its output, or the loss.
        gradient: of y; None for the loss.

    Returns:
        What the second half needs.
    """
    waiting = {id(p) for call in calls for p in call.layer.parameters(recurse=False)}
    others = [p for p in module.parameters() if id(p) not in waiting]
    leaves = [x, *others] if x.requires_grad else others
    wanted: list[Any] = [*leaves, *(call.y for call in calls)]
    found = torch.autograd.grad(y, wanted, gradient, allow_unused=True)
    for leaf, one in zip(leaves, found, strict=False):
        add(leaf, one)
    outputs = zip(calls, found[len(leaves) :], strict=True)
    return [Half(call.layer, call.x, one) for call, one in outputs if one is not None]


def backward_of_weights(halves: Sequence[Half]) -> None:
    """The second half: adds to the gradients of the layers' weights and biases."""
    for layer, x, gradient in halves:
        if isinstance(layer, nn.Conv2d):
            how = (layer.stride, layer.padding, layer.dilation, layer.groups)
            # [out, in / groups, height, width]
            add(layer.weight, conv2d_weight(x, layer.weight.shape, gradient, *how))
            by_channel = gradient.transpose(1, -1)
        else:
            assert isinstance(layer, nn.Linear)
            # [out, samples] x [samples, in]
            add(layer.weight, gradient.flatten(0, -2).T @ x.flatten(0, -2))
            by_channel = gradient
        if layer.bias is not None:
            add(layer.bias, by_channel.flatten(0, -2).sum(dim=0))


def add(leaf: Tensor, gradient: Tensor | None) -> None:
    """Add to `leaf.grad`, as `backward` does."""
    if gradient is None:  # what was computed does not depend on it
        return
    if leaf.grad is None:
        leaf.grad = gradient.to(leaf.dtype, copy=True)
    else:
        leaf.grad += gradient
