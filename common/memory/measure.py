"""What autograd keeps of a model's forward, measured without memory.

The model runs once with fake tensors, which have a shape but no content, so that a GPU's kernels
need no GPU: each storage that is kept for backward is counted.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torchvision import models

from common.images.classifiers import classifier_options
from common.launch.errors import UserError
from common.memory.args import BERT, Args

INITIALISERS = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]

Model = tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]
"""A model, its forward (inputs to logits), and a batch of inputs."""


@dataclass
class Part:
    """A module in the order of forward, in bytes: its own parameters, and what backward needs."""

    parameters: int
    activations: int = 0
    copies: int = 0  # of parameters, in the precision of autocast


def build(args: Args) -> Model:
    """The model that the flags name.

    Raises:
        UserError: there is none of this name.
    """
    if args.arch != BERT:
        if args.arch not in models.list_models(module=models):
            raise UserError(f"--arch {args.arch}: give {BERT}, or a classifier of torchvision")
        size = args.image_size
        model = models.get_model(args.arch, weights=None, **classifier_options(args.arch, size))
        return model, model, torch.empty(args.batch_size, 3, size, size)
    from transformers import BertConfig, BertForSequenceClassification  # 4 s, for bert only

    sizes = BertConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.hidden // 64,
        intermediate_size=4 * args.hidden,
        max_position_embeddings=max(512, args.length),
    )
    bert = BertForSequenceClassification(sizes)
    tokens = torch.zeros(args.batch_size, args.length, dtype=torch.long)
    return bert, lambda tokens: bert(input_ids=tokens).logits, tokens


@contextmanager
def without_values() -> Generator[None]:
    """Modules are made without initial values, which cost seconds, and which nobody reads here."""
    kept = {name: getattr(nn.init, name) for name in INITIALISERS}
    try:
        for name in kept:
            setattr(nn.init, name, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for name, initialiser in kept.items():
            setattr(nn.init, name, initialiser)


@contextmanager
def autocast(device: str, enabled: bool) -> Generator[None]:
    """`torch.autocast` in bfloat16, which would switch itself off where there is no GPU."""
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_enabled(device, enabled)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


def is_copy(tensor: Tensor) -> bool:
    """Whether a tensor follows from one parameter alone: autocast's copy of it, or a view."""
    node: Any = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node is not None


def measure(built: Model, bf16: bool) -> list[Part]:
    """One forward and its loss; each storage that autograd keeps is counted once."""
    model, forward, inputs = built
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    parts, first, held = list[Part](), dict[nn.Module, Part](), list[Tensor]()

    def enter(module: nn.Module, _: object) -> None:
        parts.append(Part(0))
        first.setdefault(module, parts[-1])

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            held.append(tensor)  # or its number would be given to another
            if is_copy(tensor):
                parts[-1].copies += storage.nbytes()
            else:
                parts[-1].activations += storage.nbytes()
        return tensor

    hooks = [module.register_forward_pre_hook(enter) for module in model.modules()]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast(inputs.device.type, bf16):
            logits = forward(inputs)
        F.cross_entropy(logits.float(), logits.new_zeros(len(logits), dtype=torch.long))
    for hook in hooks:
        hook.remove()
    # Each once, where modules share it. Attention reads the weights of its linear layers itself,
    # and does not call them.
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        while model.get_submodule(path) not in first:
            path = path.rpartition(".")[0]
        first[model.get_submodule(path)].parameters += parameter.nbytes
    return parts


def measure_all(args: Args) -> tuple[Model, dict[str, list[Part]]]:
    """The model that the flags name, on fake tensors, and its parts in each precision.

    Raises:
        UserError: there is no such model, or images of this size are not for it.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # tracebacks
    try:
        with without_values():  # on the CPU: some models compute their own sizes with tensors
            model, forward, real = build(args)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device(args.device):
            inputs = torch.empty_like(real, device=args.device)
            built = model.to_empty(device=args.device), forward, inputs
            return built, {name: measure(built, name == "bf16") for name in ("fp32", "bf16")}
    except (ValueError, RuntimeError, AssertionError) as error:
        if args.arch == BERT:
            raise
        reason, size = str(error).splitlines()[0], args.image_size
        raise UserError(
            f"-a {args.arch} cannot take images of {size}x{size} ({reason}): change --image-size"
        ) from None


def blocks(module: nn.Module) -> list[int]:
    """The bytes of each block that one would shard by itself: the items of lists of modules."""
    listed, found = isinstance(module, nn.Sequential | nn.ModuleList), list[int]()
    for child in module.children():
        if listed and not isinstance(child, nn.Sequential | nn.ModuleList):
            found.append(sum(parameter.nbytes for parameter in child.parameters()))
        else:
            found += blocks(child)
    return found
