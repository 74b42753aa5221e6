"""The images of a replica: its first stage reads them, all of its stages need the labels."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from common.images import image_loaders
from common.launch import UserError
from common.rank import local_batch_size

from .args import Args


def load_images(args: Args, mesh: DeviceMesh) -> list[Any]:
    """Return loaders of the training and the test images of this replica.

    Every rank calls this. The stages of a replica get the same batches in the same order.

    Raises:
        UserError: the batch cannot be split so; see also `image_loaders`.
    """
    batch, first = local_batch_size(args.batch_size, mesh.size(0)), mesh.get_local_rank("pp") == 0
    if not 1 <= args.micro_batches <= batch:
        raise UserError(
            f"--micro-batches {args.micro_batches} does not fit {batch} samples per replica; "
            f"use 1 to {batch}"
        )
    loaders = image_loaders(
        args.data,
        batch,
        args.image_size,
        args.seed,
        args.workers if first else 0,
        rank=mesh.get_local_rank("dp"),
        replicas=mesh.size(0),
        pin_memory=mesh.device_type == "cuda",
        timeout=args.timeout / 2,  # a loader that hangs is reported before the stages that wait
    )
    return list(loaders) if first or args.data is None else [without_images(x) for x in loaders]


class LabelsOnly(Dataset[Any]):
    """The labels of an image folder; its files are not read."""

    def __init__(self, folder: Any) -> None:
        self.targets, self.classes = folder.targets, folder.classes

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        """Return a pixel in place of an image, and the label; see `ImageFolder` for the keys."""
        index = index[1] if isinstance(index, tuple) else index
        return torch.zeros(3, 1, 1, dtype=torch.uint8), self.targets[index]


def without_images(loader: Any) -> Any:
    """Return a loader of the same labels."""
    labels = LabelsOnly(loader.dataset)
    return DataLoader(labels, loader.batch_size, sampler=loader.sampler, drop_last=loader.drop_last)
