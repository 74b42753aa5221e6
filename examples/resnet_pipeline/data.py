"""Load a replica's data: its first stage needs the images, and all stages need the labels."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from common.images import InMemoryImages, image_loaders
from common.launch import UserError
from common.rank import local_batch_size

from .args import Args


def load_images(args: Args, mesh: DeviceMesh) -> list[Any]:
    """Return this replica's DataLoaders for training and test images. Every rank calls this."""
    batch, first = local_batch_size(args.batch_size, mesh.size(0)), mesh.get_local_rank("pp") == 0
    if not 1 <= args.micro_batches <= batch:
        raise UserError(f"--micro-batches must be from 1 to {batch}, the samples per replica")
    loaders = image_loaders(
        args.data,
        batch,
        args.image_size,
        args.seed,
        args.workers if first else 0,
        rank=mesh.get_local_rank("dp"),
        replicas=mesh.size(0),
        pin_memory=mesh.device_type == "cuda",
        timeout=args.timeout / 2,  # a slow loader must time out before the stages do
    )
    return list(loaders) if first or args.data is None else [without_images(x) for x in loaders]


def without_images(loader: Any) -> Any:
    """Return a loader for the same labels in the same order, with one pixel per image."""
    folder, pixel = loader.dataset, torch.zeros(1, 3, 1, 1, dtype=torch.uint8)
    labels = InMemoryImages(pixel, torch.tensor(folder.targets), folder.classes)
    return DataLoader(labels, loader.batch_size, sampler=loader.sampler, drop_last=loader.drop_last)
