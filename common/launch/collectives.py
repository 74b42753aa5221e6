"""What ranks tell each other besides gradients."""

import os
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.launch import rendezvous
from common.launch.console import say
from common.launch.errors import UserError

Value = TypeVar("Value")


def print0(line: str) -> None:
    """Print a line from rank 0 only."""
    if dist.get_rank() == 0:
        say(line)


@contextmanager
def local_rank0_first(what: str, patience: float = 3600.0) -> Generator[None]:
    """Let one process per node do the body before the others of the node: downloads, caches.

    Every rank calls this.

    Args:
        what: names the work in the store and in error messages; used once per run.
        patience: the longest wait for the first process, in seconds (longer than --timeout).

    Raises:
        UserError: the first process failed; the others report the same.
    """
    key, store = f"first/{what}/{os.environ.get('GROUP_RANK', '0')}", rendezvous.joined
    assert store is not None, "init_process_group(init_method=JOB) comes first"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            yield
        except UserError as error:
            store.set(key, f"mistake {error}")
            raise
        except BaseException as error:
            store.set(key, f"failure {error!r}")
            raise
        store.set(key, "done")
        return
    deadline = time.monotonic() + patience
    while not store.check([key]):  # not store.wait(): a signal could not interrupt it
        if time.monotonic() > deadline:
            raise UserError(
                f"{what}: the first process of this node is not done after {patience:g} s"
            )
        time.sleep(0.01)
    outcome, _, message = store.get(key).decode().partition(" ")
    if outcome == "mistake":
        raise UserError(message)
    if outcome == "failure":
        raise RuntimeError(f"{what}: the first process of this node failed: {message}")
    yield


def broadcast_object(compute: Callable[[], Value]) -> Value:
    """Compute on rank 0 only, while the others wait, and give the result to all.

    Every rank calls this.
    """
    shared: list[Any] = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    return shared[0]


def gather_objects(value: Value) -> list[Value]:
    """The values of all ranks (anything that pickle takes), in rank order, on rank 0; else nothing.

    Every rank calls this.
    """
    everybody: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, everybody)
    return everybody or []


def assert_same_on_all_ranks(
    value: Value, what: str, remedy: str = "do all nodes see the same files?"
) -> Value:
    """Check that all ranks hold the same value (a string or number) and return it.

    Every rank calls this.

    Raises:
        UserError: they do not; the values are named.
    """
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    if any(other != everybody[0] for other in everybody):
        shown = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(everybody))
        raise UserError(f"the ranks disagree on {what} ({shown}): {remedy}")
    return value


def all_reduce_mean(
    tensors: Iterable[Tensor | None], group: dist.ProcessGroup | None = None
) -> None:
    """Average tensors over the ranks, in place, in one message. Every rank of the group calls this.

    Args:
        tensors: of any shapes and one dtype; None, as of a parameter without gradient, is left out.
        group: the ranks; by default all.
    """
    averaged = [tensor for tensor in tensors if tensor is not None]
    if not averaged:
        return
    flat = torch.cat([tensor.flatten() for tensor in averaged])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    parts = flat.split([tensor.numel() for tensor in averaged])
    for tensor, part in zip(averaged, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def broadcast_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0. Every rank calls this.

    BatchNorm's statistics are buffers: each rank has its own since its last forward.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
