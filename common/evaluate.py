"""Evaluate a model on a whole dataset, with each sample counted once and in dataset order."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.ddp import broadcast_buffers, unwrapped
from common.launch import UserError


class Evaluation(NamedTuple):
    """A model's results for a whole dataset of N samples; equal on all ranks."""

    metrics: dict[str, float]  # loss, accuracy, and top5 for more than 10 classes
    targets: Tensor  # labels, [N]
    predictions: Tensor  # most probable classes, [N]
    scores: Tensor  # class probabilities, [N, C]; [N, 0] for more than 100 classes, to save memory


def in_dataset_order(rows: Tensor, total: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the rows from all ranks in dataset order, [total, ...]. Every rank calls this.

    `DistributedSampler(shuffle=False)` gives rank r of W the samples r, r + W, r + 2 W, ... The
    samples that it repeats to make the ranks equal are removed. `rows` is a CPU tensor.
    """
    shards = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, rows.contiguous(), group=group)
    return torch.stack(shards, dim=1).flatten(0, 1)[:total]  # row k of rank r is row k * W + r


@torch.no_grad()  # not inference_mode: a model may keep a tensor for its next training step
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    total: int,
    autocast: AbstractContextManager[Any],
    group: dist.ProcessGroup | None = None,
) -> Evaluation:
    """Classify a dataset of `total` samples, each once. Every rank of the group calls this.

    A batch is one or more inputs and the labels, sampled by `DistributedSampler(shuffle=False)`.

    Raises:
        UserError: the loss of a sample is NaN or infinite.
    """
    model = unwrapped(model)  # a DDP wrapper would communicate
    broadcast_buffers(model, group)
    device = next(model.parameters()).device
    columns: list[tuple[Tensor, ...]] = []
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for batch in batches:
        *inputs, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        with autocast:
            logits = model(*inputs).float()  # [B, C]
        classes = logits.shape[1]
        scores = logits.softmax(dim=1)[:, : classes if classes <= 100 else 0]
        losses = F.cross_entropy(logits, labels, reduction="none")
        columns.append((labels, losses, logits.topk(min(5, classes)).indices, scores))
    for module, training in modes:  # a frozen BatchNorm remains in evaluation mode
        module.training = training
    own = (torch.cat(column).cpu() for column in zip(*columns, strict=True))
    targets, losses, top, scores = (in_dataset_order(rows, total, group) for rows in own)
    if not losses.isfinite().all():
        raise UserError("the test loss is NaN or infinite: lower --lr, or check the data for NaN")
    hits = (top == targets[:, None]).double()  # [N, 5], at most one 1 in each row
    metrics = {"loss": losses.double().mean().item(), "accuracy": hits[:, 0].mean().item()}
    if classes > 10:
        metrics["top5"] = hits.sum(dim=1).mean().item()
    return Evaluation(metrics, targets, top[:, 0], scores)


def write_predictions(
    path: Path, class_names: Sequence[str], evaluation: Evaluation, **columns: Sequence[Any]
) -> None:
    """Write one row per sample to a csv file, on rank 0; `columns` are additional columns."""
    if dist.get_rank() != 0:
        return
    import pandas as pd  # slow to import; only rank 0 needs it

    table = pd.DataFrame({"label": evaluation.targets, "prediction": evaluation.predictions})
    names = table.map(lambda label: class_names[label]).add_suffix("_name")
    table = table.join(names).assign(**columns)
    table.to_csv(path, index_label="index", lineterminator="\r\n")  # quotes fields with \r or \n
