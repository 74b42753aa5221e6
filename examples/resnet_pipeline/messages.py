"""Activations and gradients on their way from one process to another."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.launch.messages import message_device
from examples.resnet_pipeline.model import Stage


class Message(NamedTuple):
    """A tensor on its way, on `message_device`; it must not change until `work` is done."""

    tensor: Tensor
    work: dist.Work


def send(tensor: Tensor, stage: Stage, rank: int, group: dist.ProcessGroup, tag: int) -> Message:
    """Begin to send a tensor that `stage` has computed to a global rank."""
    tensor = in_memory_order(tensor, stage).to(message_device(stage.amp.device))
    work = dist.isend(tensor, rank, group, tag)
    assert work is not None
    return Message(tensor, work)


def receive(
    shape: Sequence[int],
    dtype: torch.dtype,
    stage: Stage,
    rank: int,
    group: dist.ProcessGroup,
    tag: int,
) -> Message:
    """Begin to receive a tensor that `stage` needs from a global rank."""
    layout = torch.channels_last if stage.amp.channels_last else torch.contiguous_format
    device = message_device(stage.amp.device)
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=layout)
    work = dist.irecv(in_memory_order(tensor, stage), rank, group, tag)
    assert work is not None
    return Message(tensor, work)


def in_memory_order(tensor: Tensor, stage: Stage) -> Tensor:
    """The tensor with its dimensions in the order of its memory, as messages need it.

    This copies nothing if the tensor is laid out as the stage's precision says.
    """
    return (tensor.permute(0, 2, 3, 1) if stage.amp.channels_last else tensor).contiguous()
