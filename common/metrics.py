"""Evaluation of a whole set by all ranks: exact, in dataset order, the same for any world size."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.distributed import World
from common.errors import UserError
from common.precision import Numerics


class Batched(Protocol):
    """A loader: a DataLoader, or `data.Batches`."""

    @property
    def dataset(self) -> Any:
        """What it loads, with a length."""

    def __iter__(self) -> Iterator[Any]:
        """Batches of images, labels, indices."""


def ordered_predictions(mine: Tensor, total: int, world: World) -> Tensor:
    """Put the rows that the ranks computed for their shards back into dataset order.

    Rank r holds rows r, r + W, r + 2W, ... of the dataset. Collectives need equal sizes, so the shards are padded to
    the longest, and the padding, which then lies at the end, is cut off.

    Args:
        mine: this rank's rows, [ceil or floor of total / W, ...], on the CPU.
        total: rows of the dataset.
        world: this process's world.

    Returns:
        All rows, [total, ...], on every rank.
    """
    rows = -(-total // world.size)
    padded = mine.new_zeros(rows, *mine.shape[1:])
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(parts, padded)
    return torch.stack(parts, dim=1).flatten(0, 1)[:total]  # row k of rank r is row k * W + r


MANY = 100  # classes, above which AUC is left out: it needs all scores of all samples on one rank


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of a whole set, the same on all ranks.

    Attributes:
        metrics: accuracy, top5 (both as shares), precision, recall, F1, AUC; see `classification_metrics`.
        loss: mean cross-entropy.
        targets: labels, [N], in dataset order.
        predictions: the most probable classes, [N].
    """

    metrics: dict[str, Any]
    loss: float
    targets: Tensor
    predictions: Tensor


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Batched, numerics: Numerics, world: World, classes: int) -> Evaluation:
    """Classify the whole set, each sample once, and compute the metrics on all of it.

    Args:
        model: the bare model: a DDP wrapper would communicate, and ranks may have one batch more than others.
        loader: this rank's shard: batches of images, labels, indices.
        numerics: device and precision.
        world: this process's world.
        classes: number of classes.

    Raises:
        UserError: the model diverged, or its outputs are no classes.
    """
    for buffer in model.buffers():  # BatchNorm's statistics: each rank has its own since its last forward
        dist.broadcast(buffer, 0)
    model.eval()
    best, scored = min(5, classes), classes if classes <= MANY else 0
    rows = [torch.empty(0, 2 + best + scored)]  # a shard may be empty
    for images, labels, _ in loader:
        with numerics.autocast():
            logits = model(numerics.images(images)).float()  # [B, classes]
        if logits.shape != (len(labels), classes):
            raise UserError(f"the model's outputs are {list(logits.shape)}, not [{len(labels)}, {classes} classes]")
        targets = labels.to(logits.device, non_blocking=True)
        loss = F.cross_entropy(logits, targets, reduction="none")
        top = logits.topk(best).indices
        scores = logits.softmax(dim=1)[:, :scored]
        rows.append(torch.cat([targets.unsqueeze(1), loss.unsqueeze(1), top, scores], dim=1).cpu())
    model.train()
    total = len(cast("Sized", loader.dataset))
    table = ordered_predictions(torch.cat(rows), total, world)
    targets, losses, top, scores = table.split([1, 1, best, scored], dim=1)
    if not losses.isfinite().all():
        raise UserError("training diverged: the model's outputs are not finite numbers; lower --lr")
    targets, top = targets.squeeze(1).long(), top.long()
    shared: list[Any] = [classification_metrics(top, targets, classes, scores) if world.is_main else None]
    dist.broadcast_object_list(shared)
    return Evaluation(shared[0], losses.double().mean().item(), targets, top[:, 0])


def classification_metrics(top: Tensor, targets: Tensor, classes: int, scores: Tensor) -> dict[str, float | None]:
    """Metrics by scikit-learn, rounded to 6 digits: macro-averaged precision, recall, F1, one-vs-rest AUC.

    Args:
        top: the most probable classes of each sample, best first, [N, 1 to 5].
        targets: labels, [N].
        classes: number of classes.
        scores: class probabilities, [N, classes], or [N, 0] to leave AUC out.

    Returns:
        The metrics; AUC is None where it is not defined, because a class has no sample, or left out.
    """
    from sklearn import metrics  # 0.7 s, on the one rank that needs it

    predicted = top[:, 0]
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        targets, predicted, labels=range(classes), average="macro", zero_division=0
    )
    auc = None
    if len(targets.unique()) == scores.shape[1] > 1:
        binary = scores.shape[1] == 2
        ranked = scores[:, 1] if binary else scores
        auc = round(float(metrics.roc_auc_score(targets, ranked, multi_class="raise" if binary else "ovr")), 6)
    return {
        "accuracy": round(float((predicted == targets).double().mean()), 6),
        "top5": round(float((top == targets.unsqueeze(1)).any(dim=1).double().mean()), 6),
        "precision": round(float(precision), 6),
        "recall": round(float(recall), 6),
        "f1": round(float(f1), 6),
        "auc": auc,
    }
