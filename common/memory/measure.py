"""What autograd keeps of a model's forward, measured without memory.

The model runs once with fake tensors, which have a shape but no content, so that a GPU's kernels
need no GPU: each storage that is kept for backward is counted.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchvision import models

from common.launch.errors import UserError
from common.memory.args import BERT, Args

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
        model = models.get_model(args.arch, weights=None)
        return model, model, torch.empty(args.batch_size, 3, args.image_size, args.image_size)
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
    counted, parts, held = set[int](), list[Part](), list[Tensor]()

    def enter(module: nn.Module, _: object) -> None:
        own = {id(p): p.nbytes for p in module.parameters(recurse=False) if id(p) not in counted}
        counted.update(own)
        parts.append(Part(sum(own.values())))

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
    return parts


def blocks(module: nn.Module) -> list[int]:
    """The bytes of each block that one would shard by itself: the items of lists of modules."""
    listed, found = isinstance(module, nn.Sequential | nn.ModuleList), list[int]()
    for child in module.children():
        if listed and not isinstance(child, nn.Sequential | nn.ModuleList):
            found.append(sum(parameter.nbytes for parameter in child.parameters()))
        else:
            found += blocks(child)
    return found
