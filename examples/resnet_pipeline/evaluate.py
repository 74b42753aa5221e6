"""Evaluation of the whole test set by all pipelines, each sample once."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.launch.collectives import broadcast_object, gather_objects
from common.launch.errors import UserError
from common.train.evaluate import Evaluation, classification_metrics
from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.messages import Message, receive, send
from examples.resnet_pipeline.stages import LocalStages


@torch.inference_mode()
def predict(local: LocalStages, grid: Grid, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Send batches forward through the pipeline.

    A stage works on one batch while the next stage works on the one before. Every rank calls this.

    Args:
        local: this process's stages.
        grid: this process's place.
        batches: this replica's images, labels and indices, on the device.

    Returns:
        Logarithms of the probabilities [N, classes], and labels [N], on the process with the last
        stage, both on the CPU; nothing on the others.
    """
    last = len(local.owners) - 1
    rows, targets = [torch.empty(0, *local.partition.blocks[-1].shape)], [torch.empty(0).long()]
    for images, labels, _ in batches:
        x, leaving = images, list[Message]()
        for index, stage in local.stages.items():
            before, after = local.neighbours(index, grid.pp_rank)
            if before != grid.pp_rank:
                shape, dtype = local.partition.input(index)
                rank, shape = grid.ranks[before], (len(labels), *shape)
                message = receive(shape, dtype, stage, rank, grid.pipeline, index)
                with grid.watching(rank, "waits for an evaluation"):
                    message.work.wait()
                x = message.tensor.to(grid.device)
            x = stage(x)
            if after != grid.pp_rank:
                leaving.append(send(x, stage, grid.ranks[after], grid.pipeline, index + 1))
            elif index == last:
                # the logarithms: a small probability would be 0, and its loss infinite
                rows.append(x.float().log_softmax(dim=1).cpu())
                targets.append(labels.cpu())
        for message in leaving:
            message.work.wait()
    return torch.cat(rows), torch.cat(targets)


def evaluate(local: LocalStages, grid: Grid, batches: Any, classes: int) -> Evaluation:
    """Classify the whole test set, each sample once. Every rank calls this.

    Args:
        local: this process's stages.
        grid: this process's place.
        batches: this replica's shard of the test set, a loader.
        classes: number of classes.

    Returns:
        Metrics and loss; rank 0 also has the labels and predictions of the whole set.

    Raises:
        UserError: the model diverged.
    """
    for stage in local.modules:
        stage.eval()
    shards = gather_objects((grid.dp_rank, *predict(local, grid, batches)))
    for stage in local.modules:
        stage.train()
    targets = torch.empty(len(batches.dataset), dtype=torch.long)
    scores = torch.full((len(targets), classes), torch.nan)
    for dp_rank, rows, labels in shards:
        if len(labels):
            scores[dp_rank :: grid.dp_size], targets[dp_rank :: grid.dp_size] = rows, labels

    def summary() -> tuple[dict[str, Any], float] | None:
        if not scores.isfinite().all():
            return None
        top = scores.topk(min(5, classes)).indices
        loss = F.nll_loss(scores.double(), targets).item()
        return classification_metrics(top, targets, classes, scores.exp()), loss

    found = broadcast_object(summary)
    if found is None:
        raise UserError("training diverged: the model's outputs are not finite numbers; lower --lr")
    return Evaluation(*found, targets, scores.argmax(dim=1))
