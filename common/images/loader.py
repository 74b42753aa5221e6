"""Batches of images on the device, for training and for evaluation."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from common.data.samplers import GlobalBatchSampler, Shard
from common.launch import place
from common.launch.errors import UserError
from common.train.amp import MixedPrecision
from common.train.loader import default_workers, start_worker, unwrapped
from common.train.run import Run

# of ImageNet's pixels per channel, scaled to 0..1
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Batches:
    """Batches of images, on the device and normalised.

    On CUDA a batch is copied and normalised on a stream of its own: the host is ahead of the
    device, so that happens while the device computes with the batch before.

    Args:
        loader: gives `folder.Batch`.
        amp: device and memory layout.
    """

    loader: "DataLoader[Any]"
    amp: MixedPrecision
    broken: set[str] = field(default_factory=set)
    """The replaced images and the reasons, so far, on this rank."""

    @property
    def dataset(self) -> Any:
        """What the loader loads."""
        return self.loader.dataset

    @property
    def batch_sampler(self) -> Any:
        """The sampler: a `GlobalBatchSampler` in training."""
        return self.loader.batch_sampler

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images [B, 3, H, W] in `amp.dtype` and labels [B] on the device, indices [B] on the CPU.

        Raises:
            UserError: an image is broken, or no batch came in time.
        """
        device = self.amp.device
        # once per epoch: copying them would make the host wait
        std, mean = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (STD, MEAN))
        scale, shift = 1 / (255 * std), -mean / std
        side = torch.cuda.Stream(device) if device.type == "cuda" else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(device))  # for scale and shift
        for batch in unwrapped(self.loader):
            self.broken.update(batch.broken)
            # even without a stream, torch's context would take memory of a GPU for a run on the CPU
            with torch.cuda.stream(side) if side is not None else nullcontext():
                images = self.amp.to_device(batch.images).float()  # [B, 3, H, W]
                # The first convolution would round them so, on the stream that computes.
                images = images.mul_(scale).add_(shift).to(self.amp.dtype)
                labels = batch.labels.to(device, non_blocking=True)
            if side is not None:
                computing = torch.cuda.current_stream(device)
                computing.wait_stream(side)
                for tensor in (images, labels):
                    tensor.record_stream(computing)  # the memory stays until it has computed
            yield images, labels, batch.indices


def train_loader(
    dataset: Any,
    batch_size: int,
    amp: MixedPrecision,
    seed: int,
    workers: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | None = None,
) -> Batches:
    """The training set, shuffled, in global batches; an epoch can begin at any of its batches.

    Args:
        dataset: gives `folder.Batch`.
        batch_size: GLOBAL; the caller has checked that the world size divides it (`local_batch`).
        amp: device and memory layout.
        seed: of the order.
        workers: loader processes of this rank; None chooses (`default_workers`).
        rank: which part of each batch; by default this process's rank.
        world_size: into how many parts a batch is cut; by default that of the process group.
        timeout: longest wait for a worker, in seconds; by default --timeout.
    """
    sampler = GlobalBatchSampler(len(dataset), batch_size, seed, rank, world_size)
    return Batches(_loader(dataset, amp, workers, timeout, batch_sampler=sampler), amp)


def eval_loader(
    dataset: Any,
    batch_size: int,
    amp: MixedPrecision,
    workers: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | None = None,
) -> Batches:
    """The evaluation set in exact shards.

    Args:
        dataset: gives `folder.Batch`.
        batch_size: per rank; it changes the speed, not the result.
        amp: device and memory layout.
        workers: loader processes of this rank; None chooses (`default_workers`).
        rank: number of the shard; by default this process's rank.
        world_size: number of shards; by default that of the process group.
        timeout: longest wait for a worker, in seconds; by default --timeout.
    """
    shard = Shard(len(dataset), rank, world_size)
    loader = _loader(dataset, amp, workers, timeout, batch_size=batch_size, sampler=shard)
    return Batches(loader, amp)


def warn_of_broken(run: Run, *loaders: Batches) -> int:
    """Name each broken image that was replaced, once in a run. Every rank calls this.

    Args:
        run: warns; its checkpoints keep the names, in `run.state.notes`.
        loaders: those of this rank.

    Returns:
        How many images have been replaced so far.
    """
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, set().union(*(loader.broken for loader in loaders)))
    named = run.state.notes.setdefault("broken", [])
    for image in sorted(set().union(*everybody) - set(named)):
        named.append(image)
        run.warn(f"skipped image {len(named)}: {image}")
    return len(named)


def _loader(
    dataset: Any, amp: MixedPrecision, workers: int | None, timeout: float | None, **order: Any
) -> "DataLoader[Any]":
    if not hasattr(dataset, "__getitems__"):
        raise UserError(
            f"{type(dataset).__name__}: give it __getitems__(keys), which returns a Batch "
            f"(common/images/folder.py); keys are pairs (epoch, index) in training, else indices"
        )
    workers = default_workers(amp.device) if workers is None else workers
    patience = place.current().flags.timeout if timeout is None else timeout
    return DataLoader(
        dataset,
        **order,
        num_workers=workers,
        # Without it, a batch that a worker could not hand over would be waited for without end.
        timeout=patience if workers else 0,
        # Forked workers share the list of files, and start at once; spawned ranks would start them
        # as they were started themselves.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        collate_fn=_as_it_is,
        worker_init_fn=start_worker,
        pin_memory=amp.device.type == "cuda",
        persistent_workers=workers > 0,
        # the loader's own: drawing from the global generator would make resuming inexact
        generator=torch.Generator(),
    )


def _as_it_is(batch: Any) -> Any:
    return batch
