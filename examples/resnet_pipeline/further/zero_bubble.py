"""The schedule ZB-H1: fill 1F1B's bubble with half of each backward pass.

    torchrun --standalone --nproc-per-node 2 -m examples.resnet_pipeline.further.zero_bubble

A backward pass computes two kinds of gradients. The previous stage waits for the gradient of the
stage's input (I), but only the optimizer needs the gradients of the weights (W). ZB-H1
(https://arxiv.org/abs/2401.10241) splits B into I and W. On stage s, W is delayed by s
micro-batches and fills the time in which 1F1B waits. P = 3, M = 4, equal times for F, I and W:

    stage 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

The bubble is (P - 1) / (3 M + P - 1). Layers keep their inputs until W, so every stage keeps up to
P micro-batches; in 1F1B, only the first stage keeps that many.
"""

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.grad import conv2d_weight

from common.launch import RunArgs
from common.rank import init_distributed, print0

from ..pipeline import Action, Pipeline, gpipe, make_mesh, one_forward_one_backward
from ..stages import build_stage


def zero_bubble_h1(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return a stage's actions: 1F1B, with each W running `stage` micro-batches after its I."""
    actions = list[Action]()
    for kind, micro in one_forward_one_backward(stage, stages, micro_batches):
        actions.append(Action("F" if kind == "F" else "I", micro))
        if kind == "B" and micro >= stage:
            actions.append(Action("W", micro - stage))
    return actions + [Action("W", m) for m in range(max(0, micro_batches - stage), micro_batches)]


class ZeroBubblePipeline(Pipeline):
    """A pipeline that defers the weight gradients of convolutional and linear layers.

    I uses autograd to compute the gradients of the stage's input and of these layers' outputs.
    W computes the gradients of a layer's weights from its input and the gradient of its output.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.micro = 0  # the current action's micro-batch
        # Per micro-batch: layer, input, the output's graph edge; after I, the output's gradient.
        self.calls: dict[int, list[tuple[Any, Tensor, Any]]] = defaultdict(list)
        layers = [m for m in self.stage.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        for layer in layers:
            layer.register_forward_hook(self.record)
        later = {parameter for layer in layers for parameter in layer.parameters()}
        self.norms = [p for p in self.stage.parameters() if p not in later]

    def record(self, layer: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        """Save a layer call, with its input in the output's dtype, which autocast chose."""
        if torch.is_grad_enabled():
            call = layer, inputs[0].detach().to(y.dtype), get_gradient_edge(y)
            self.calls[self.micro].append(call)

    def execute(self, action: Action) -> None:
        """Execute an action: I communicates like B, and W does not communicate."""
        self.micro = action.micro
        if action.kind == "W":
            self.compute_weights(action.micro)
        else:
            super().execute(action._replace(kind=action.kind.replace("I", "B")))

    def compute_backward(self, micro: int, x: Tensor, y: Tensor, gradient: Tensor | None) -> None:
        """Set `x.grad`, and accumulate the norm layers' gradients, with one autograd call."""
        calls, leaves = self.calls[micro], [*self.norms, *([x] if x.requires_grad else [])]
        gradients = torch.autograd.grad(y, leaves + [edge for *_, edge in calls], gradient)
        for leaf, own in zip(leaves, gradients, strict=False):
            add_gradient(leaf, own)
        outputs = zip(calls, gradients[len(leaves) :], strict=True)
        self.calls[micro] = [(layer, x, own) for (layer, x, _), own in outputs]

    def compute_weights(self, micro: int) -> None:
        """Add the weight gradients of the convolutional and linear layers."""
        for layer, x, gradient in self.calls.pop(micro):
            if isinstance(layer, nn.Conv2d):
                how = (layer.stride, layer.padding, layer.dilation, layer.groups)
                add_gradient(layer.weight, conv2d_weight(x, layer.weight.shape, gradient, *how))
            else:
                add_gradient(layer.weight, gradient.T @ x)
                add_gradient(layer.bias, gradient.sum(dim=0))


def add_gradient(leaf: Tensor, gradient: Tensor) -> None:
    """Add a gradient to `leaf.grad`, like `backward`."""
    gradient = gradient.to(leaf.dtype)
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


FORMS: dict[str, Any] = {"GPipe": (Pipeline, gpipe), "1F1B": (Pipeline, one_forward_one_backward)}
FORMS["ZB-H1"] = ZeroBubblePipeline, zero_bubble_h1


@dataclass(frozen=True)
class Args:
    """Time a step with each schedule, and compare the gradients."""

    arch: str = "resnet50"
    batch_size: int = 32
    micro_batches: int = 4
    image_size: int = 64
    cuts: tuple[str, ...] = ()  # first block of each stage but the first


def prepare(args: Args, device: torch.device, name: str) -> tuple[Pipeline, Tensor, Tensor]:
    """Return a pipeline over all ranks, the images and the labels. Every rank calls this."""
    mesh, (form, schedule) = make_mesh(device.type, dist.get_world_size(), 120.0), FORMS[name]
    torch.manual_seed(0)
    stage = build_stage(args.arch, 10, "group", mesh.size(1), mesh.get_local_rank("pp"), args.cuts)
    pipeline = form(stage.to(device), mesh, schedule, args.micro_batches, 120.0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.arange(args.batch_size, device=device) % 10
    return pipeline, images.to(memory_format=torch.channels_last), labels


def compare(args: Args, device: torch.device) -> bool:
    """Time steps with each schedule; return True if the gradients are bit-identical."""
    gradients = list[list[Any]]()
    for name in FORMS:
        pipeline, images, labels = prepare(args, device, name)
        for _ in range(4):
            start = time.perf_counter()
            pipeline.step(images, labels)
        print0(f"{name}: {time.perf_counter() - start:.3f} s per step")
        gradients.append([parameter.grad for parameter in pipeline.parameters()])
    return all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*gradients, strict=True))


if __name__ == "__main__":
    rank_device = init_distributed(RunArgs(), local_rank=0)  # torchrun sets it
    print0(f"all schedules give stage 0 the same gradients: {compare(tyro.cli(Args), rank_device)}")
    dist.destroy_process_group()
