"""Metrics against definitions written out, and numbers that are not defined."""

import io
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from common.launch.errors import UserError
from common.train import log, machine
from common.train.evaluate import classification_metrics, evaluate, ordered_predictions
from common.train.log import Log
from common.train.state import TrainState


def metrics(scores: Tensor, targets: Tensor) -> dict[str, float | None]:
    classes = scores.shape[1]
    return classification_metrics(scores.topk(min(5, classes)).indices, targets, classes, scores)


def test_metrics_by_hand() -> None:
    targets = torch.tensor([0, 0, 0, 1, 1, 2])
    scores = torch.tensor(
        [[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.3, 0.5, 0.2], [0.1, 0.2, 0.7], [0.2, 0.2, 0.6]]
    )  # predicted: 0, 0, 1, 1, 2, 2
    found = metrics(scores, targets)
    assert found["accuracy"] == round(4 / 6, 6)
    assert found["precision"] == round((1 + 1 / 2 + 1 / 2) / 3, 6)
    assert found["recall"] == round((2 / 3 + 1 / 2 + 1) / 3, 6)
    assert found["f1"] == round((2 * 1 * (2 / 3) / (1 + 2 / 3) + 0.5 + 2 * 0.5 * 1 / 1.5) / 3, 6)
    # AUC: the share of (positive, negative) pairs in the right order, ties half, for each class against the rest
    areas = []
    for label in range(3):
        positive, negative = scores[targets == label, label], scores[targets != label, label]
        right = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
        areas.append(right.mean().item())
    assert found["auc"] == round(sum(areas) / 3, 6)


@pytest.mark.parametrize("classes", [2, 3, 12])
@pytest.mark.parametrize("seed", range(4))
def test_metrics_equal_scikit_learns(classes: int, seed: int) -> None:
    """With equal scores, and with a class that is never predicted."""
    from sklearn import metrics as reference

    generator = torch.Generator().manual_seed(seed)
    targets = torch.cat([torch.arange(classes), torch.randint(classes, (60,), generator=generator)])
    logits = torch.randint(-2, 3, (len(targets), classes), generator=generator) + 2.0 * F.one_hot(targets, classes)
    logits[:, 0] -= 9.0 * seed
    scores = logits.softmax(dim=1)
    predicted = scores.topk(min(5, classes)).indices[:, 0]  # of equal scores, the same one
    assert (0 in predicted) == (seed == 0)
    precision, recall, f1, _ = reference.precision_recall_fscore_support(
        targets, predicted, labels=range(classes), average="macro", zero_division=0
    )
    auc = reference.roc_auc_score(targets, scores[:, 1] if classes == 2 else scores, multi_class="ovr")
    found = metrics(scores, targets)
    assert (found["precision"], found["recall"], found["f1"], found["auc"]) == pytest.approx(
        (precision, recall, f1, auc), abs=1e-6
    )
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(targets, predicted), abs=1e-6)


def test_two_classes_and_a_class_without_samples() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7]])
    assert metrics(scores, torch.tensor([0, 0, 1]))["auc"] == 1.0
    assert metrics(scores, torch.tensor([1, 1, 1]))["auc"] is None


def test_top5_and_many_classes() -> None:
    top = torch.tensor([[7, 1, 2, 3, 4], [1, 2, 3, 4, 7], [1, 2, 3, 4, 5], [9, 8, 6, 5, 4]])
    found = classification_metrics(top, torch.tensor([7, 7, 7, 9]), 1000, torch.empty(4, 0))
    assert (found["accuracy"], found["top5"], found["auc"]) == (0.5, 0.75, None)
    assert "top5" not in classification_metrics(top, torch.tensor([7, 7, 7, 9]), 10, torch.empty(4, 0))


@pytest.mark.usefixtures("alone")
def test_dropout_is_off_in_evaluation_only() -> None:
    images, labels = torch.randn(12, 4), torch.arange(12) % 3
    linear = nn.Linear(4, 3)
    model = nn.Sequential(linear, nn.Dropout(0.5))
    found = evaluate(model, DataLoader(TensorDataset(images, labels, torch.arange(12)), 5), 3, nullcontext)
    assert found.loss == pytest.approx(F.cross_entropy(linear(images), labels).item(), abs=1e-5)
    assert model.training, "the next epoch would be without dropout, and without statistics of BatchNorm"


@pytest.mark.usefixtures("alone")
def test_an_empty_test_set_is_named() -> None:
    """It is not reported as a divergence, although the mean of nothing is not a number."""
    nothing = DataLoader(TensorDataset(torch.ones(0, 3), torch.ones(0).long(), torch.arange(0)), 4)
    with pytest.raises(UserError, match=r"^the test set is empty"):
        evaluate(nn.Linear(3, 2), nothing, 2, nullcontext)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("everywhere", [True, False])
def test_rows_that_come_in_pieces_are_all_there(monkeypatch: pytest.MonkeyPatch, everywhere: bool) -> None:
    monkeypatch.setitem(ordered_predictions.__globals__, "PIECE", 64)  # bytes: two rows
    rows = torch.arange(23 * 3).reshape(23, 3)
    assert torch.equal(ordered_predictions(rows, 23, everywhere), rows)


@pytest.mark.parametrize(("smaller", "best"), [(False, [True, False, True]), (True, [True, True, False])])
def test_the_best_is_the_largest_or_the_smallest(smaller: bool, best: list[bool]) -> None:
    state, found = TrainState(), list[bool]()
    for value in (0.5, 0.25, 0.75):
        state.metrics = {"metric": value}
        found.append(state.improved("metric", smaller))
    assert found == best
    assert state.best == {"metric": 0.25 if smaller else 0.75}


@pytest.mark.parametrize("resumed", [True, False])
def test_a_fresh_run_leaves_no_results_of_an_earlier_one(tmp_path: Path, resumed: bool) -> None:
    for name in ("result.json", "predictions.csv"):
        (tmp_path / name).touch()
    Log(tmp_path, active=True).start(step=0, resumed=resumed)
    assert [path.name for path in tmp_path.glob("[rp]*")] == ["predictions.csv"] * resumed


def test_the_line_of_progress_has_the_newest_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    shown = Log(tmp_path, active=True)
    monkeypatch.setattr(log, "tqdm", partial(log.tqdm, file=terminal, mininterval=0, ncols=80))
    shown.bar("epoch 1/1", total=9, done=4)
    shown.advance(lambda: None)
    assert "loss" not in terminal.getvalue()
    shown.advance(lambda: 0.125)
    assert re.search(r"epoch 1/1: .* 6/9 .*, loss 0.125\]", terminal.getvalue())


def test_the_commit_of_an_image_is_that_from_which_it_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no git in it; outside of both, nobody knows."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("SOURCE_REVISION", "0123abc")
    assert machine.commit() == "0123abc"
    monkeypatch.setenv("SOURCE_REVISION", "unknown")  # the build was not told
    assert machine.commit() is None
    monkeypatch.delenv("SOURCE_REVISION")
    assert machine.commit() is None
