"""Evaluation of a whole set by all ranks: exact, in dataset order, equal for any world size."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.launch.collectives import broadcast_buffers, broadcast_object
from common.launch.errors import UserError
from common.train.ddp import bare
from common.train.loader import unwrapped

MANY = 100  # classes, above which AUC is left out: it needs all scores of all samples on one rank
PIECE = 1 << 25  # bytes that all ranks together send at once


class Loader(Protocol):
    """A DataLoader, or what behaves like one."""

    @property
    def dataset(self) -> Any:
        """What it loads, with a length."""

    def __iter__(self) -> Iterator[Any]:
        """Batches of images, labels, indices."""


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of a whole set, the same on all ranks.

    Attributes:
        metrics: accuracy, precision, recall, F1, AUC, and top5 where there are more than ten
            classes; see `classification_metrics`.
        loss: mean cross-entropy.
        targets: labels, [N], in dataset order.
        predictions: the most probable classes, [N].
    """

    metrics: dict[str, Any]
    loss: float
    targets: Tensor
    predictions: Tensor


def ordered_predictions(local_rows: Tensor, total: int, everywhere: bool = True) -> Tensor:
    """Put the rows that the ranks computed for their shards back into dataset order.

    Rank r holds rows r, r + W, r + 2W, ... of the dataset. Collectives need equal sizes, so the
    shards are padded to the longest, and the padding, which then lies at the end, is cut off. They
    come in pieces, so that no rank holds much more than the result. Every rank calls this.

    Args:
        local_rows: this rank's rows, [ceil or floor of total / W, ...], on the CPU.
        total: rows of the dataset.
        everywhere: whether all ranks need the rows, or rank 0 alone.

    Returns:
        All rows, [total, ...]; with `everywhere=False` [0, ...] on the other ranks.
    """
    world_size, width = dist.get_world_size(), local_rows.shape[1:]
    longest = -(-total // world_size)
    gets = everywhere or dist.get_rank() == 0
    # row k of rank r is row k * W + r
    ordered = local_rows.new_empty(longest if gets else 0, world_size, *width)
    row_bytes = max(1, local_rows.element_size() * math.prod(width))
    rows = max(1, PIECE // (world_size * row_bytes))
    for start in range(0, longest, rows):
        piece = local_rows.new_zeros(min(rows, longest - start), *width)
        own = local_rows[start : start + rows]
        piece[: len(own)] = own
        pieces = [torch.empty_like(piece) for _ in range(world_size)] if gets else []
        if everywhere:
            dist.all_gather(pieces, piece)
        else:
            dist.gather(piece, pieces or None)
        if gets:
            torch.stack(pieces, dim=1, out=ordered[start : start + rows])
    return ordered.flatten(0, 1)[:total]


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: Loader,
    classes: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Evaluation:
    """Classify the whole set, each sample once, and compute the metrics on all of it.

    Every rank calls this.

    Args:
        model: of DDP the bare model is used: its wrapper would communicate, and ranks may have
            one batch more than others.
        loader: this rank's shard: batches of images, labels, indices.
        classes: number of classes.
        autocast: makes the context of mixed precision.

    Raises:
        UserError: the test set is empty, the model diverged, or its outputs are not [B, classes].
    """
    model = bare(model)
    broadcast_buffers(model)
    if not len(loader.dataset):
        raise UserError("the test set is empty: nothing can be evaluated")
    model.eval()
    device = next(model.parameters()).device
    best, scored = min(5, classes), classes if classes <= MANY else 0
    rows = [torch.empty(0, 2 + best + scored)]  # a shard may be empty
    for images, labels, _ in unwrapped(loader):
        with autocast():
            logits = model(images.to(device, non_blocking=True)).float()  # [B, classes]
        if logits.shape != (len(labels), classes):
            expected = f"[{len(labels)}, {classes} classes]"
            raise UserError(f"the model's outputs are {list(logits.shape)}, not {expected}")
        targets = labels.to(logits.device, non_blocking=True)
        loss = F.cross_entropy(logits, targets, reduction="none")
        top = logits.topk(best).indices
        scores = logits.softmax(dim=1)[:, :scored]
        row = torch.cat([targets.unsqueeze(1), loss.unsqueeze(1), top, scores], dim=1)
        rows.append(row.cpu())
    model.train()
    own, total = torch.cat(rows).split([2 + best, scored], dim=1), len(loader.dataset)
    targets, losses, top = ordered_predictions(own[0], total).split([1, 1, best], dim=1)
    # all ranks need to know the classes; only the one that computes the metrics needs the scores
    scores = ordered_predictions(own[1], total, everywhere=False) if scored else own[1]
    if not losses.isfinite().all():
        raise UserError("training diverged: the model's outputs are not finite numbers; lower --lr")
    targets, top = targets.squeeze(1).long(), top.long()
    metrics = broadcast_object(lambda: classification_metrics(top, targets, classes, scores))
    return Evaluation(metrics, losses.double().mean().item(), targets, top[:, 0].clone())


def classification_metrics(
    top: Tensor, targets: Tensor, classes: int, scores: Tensor
) -> dict[str, float | None]:
    """Metrics as scikit-learn's, to 6 digits: macro precision, recall and F1, one-vs-rest AUC.

    They are written out because its import takes two seconds of every run.

    Args:
        top: the most probable classes of each sample, best first, [N, 1 to 5].
        targets: labels, [N].
        classes: number of classes.
        scores: class probabilities, [N, classes], or [N, 0] to leave AUC out.

    Returns:
        The metrics; AUC is None if it is left out, or a class has no sample.
    """
    hits = top == targets.unsqueeze(1)
    right, given, there = (  # [classes]: right predictions, predictions, samples
        labels.bincount(minlength=classes) for labels in (targets[hits[:, 0]], top[:, 0], targets)
    )
    auc = None
    if len(targets.unique()) == scores.shape[1] > 1:
        ranked = [1] if scores.shape[1] == 2 else range(scores.shape[1])
        areas = [area_under_curve(scores[:, label], targets == label) for label in ranked]
        auc = round(sum(areas) / len(areas), 6)
    return {
        "accuracy": _mean(hits[:, 0]),
        **({"top5": _mean(hits.any(dim=1))} if classes > 10 else {}),
        # a class that is never predicted, or never there, counts as 0
        "precision": _mean(right / given.clamp(min=1).double()),
        "recall": _mean(right / there.clamp(min=1).double()),
        "f1": _mean(2 * right / (given + there).clamp(min=1).double()),
        "auc": auc,
    }


def area_under_curve(scores: Tensor, positive: Tensor) -> float:
    """The area under the ROC curve, from the order of the scores.

    It is the share of pairs of a positive and a negative sample in which the positive one has the
    higher score; equal scores count half.

    Args:
        scores: [N].
        positive: which samples are, bool, [N]; there is one of either kind.
    """
    others, own = scores[~positive].sort().values, scores[positive]
    below = torch.searchsorted(others, own) + torch.searchsorted(others, own, right=True)
    return below.sum().item() / (2 * len(own) * len(others))


def _mean(values: Tensor) -> float:
    return round(values.double().mean().item(), 6)
