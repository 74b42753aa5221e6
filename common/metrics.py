"""Evaluation of a whole set by all ranks: exact, in dataset order, the same for any world size."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from common.distributed import World
from common.errors import UserError
from common.precision import Numerics


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


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, Tensor, Tensor]],
    numerics: Numerics,
    world: World,
    classes: int,
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Classify the whole set, each sample once, and compute the metrics on all of it.

    Args:
        model: the bare model: a DDP wrapper would communicate, and ranks may have one batch more than others.
        loader: this rank's shard (`eval_loader`).
        numerics: device and precision.
        world: this process's world.
        classes: number of classes.

    Returns:
        The metrics (accuracy; macro-averaged precision, recall, F1 and one-vs-rest AUC), and per sample, in dataset
        order, the labels [total] and the probabilities [total, classes].

    Raises:
        UserError: the model diverged.
    """
    model.eval()
    probabilities, labels = [torch.empty(0, classes)], [torch.empty(0, dtype=torch.long)]  # a shard may be empty
    for images, targets, _ in loader:
        with numerics.autocast():
            logits = model(numerics.images(images))  # [B, classes]
        probabilities.append(F.softmax(logits.float(), dim=1).cpu())
        labels.append(targets)
    model.train()
    total = len(cast("Sized", loader.dataset))
    scores = ordered_predictions(torch.cat(probabilities), total, world)
    targets = ordered_predictions(torch.cat(labels), total, world)
    if not scores.isfinite().all():
        raise UserError("training diverged: the model's outputs are not finite numbers; lower --lr")
    shared: list[Any] = [classification_metrics(scores, targets) if world.is_main else None]
    dist.broadcast_object_list(shared)
    return shared[0], targets, scores


def classification_metrics(scores: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Metrics by scikit-learn of class probabilities [N, classes] against labels [N].

    Rounded to 6 digits. AUC is None where it is not defined, because a class has no sample.
    """
    from sklearn import metrics  # 0.7 s, on the one rank that needs it

    predicted = scores.argmax(dim=1)
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        targets, predicted, labels=range(scores.shape[1]), average="macro", zero_division=0
    )
    auc = None
    if len(targets.unique()) == scores.shape[1] > 1:
        binary = scores.shape[1] == 2
        ranked = scores[:, 1] if binary else scores
        auc = round(float(metrics.roc_auc_score(targets, ranked, multi_class="raise" if binary else "ovr")), 6)
    return {
        "accuracy": round(float((predicted == targets).double().mean()), 6),
        "precision": round(float(precision), 6),
        "recall": round(float(recall), 6),
        "f1": round(float(f1), 6),
        "auc": auc,
    }
