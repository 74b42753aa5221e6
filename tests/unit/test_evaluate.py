"""Evaluation by several ranks: each sample once, in dataset order, the same metrics as sklearn."""

import csv
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import torch.distributed as dist
from pytest import approx
from sklearn.metrics import (
    accuracy_score,
    classification_report,
    log_loss,
    roc_auc_score,
    top_k_accuracy_score,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.evaluate import Evaluation, evaluate, write_predictions
from common.launch import UserError
from examples.mnist_ddp_spawn.train import report
from tests import ranks

TOTAL = 53  # divides by none of the world sizes


class Net(nn.Sequential):
    """Dropout and BatchNorm are different in training and evaluation, and on each rank."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, classes))


def problem(classes: int) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(4)
    return Net(classes), torch.randn(TOTAL, 6), torch.randint(classes, (TOTAL,))


def classify(classes: int, wrap: bool, scale: float) -> tuple[Evaluation, bool, Any]:
    net, inputs, labels = problem(classes)
    model: Any = net
    with torch.no_grad():
        for _ in range(3):  # the statistics of each rank are its own
            model(torch.randn(20, 6, generator=torch.Generator().manual_seed(dist.get_rank())))
        model[3].weight *= scale
    parallel = DistributedDataParallel(model) if wrap else model
    parallel.train()
    model[1].eval()  # a frozen BatchNorm
    before = [module.training for module in model]
    data = TensorDataset(inputs, labels)
    loader = DataLoader(data, 7, sampler=DistributedSampler(data, shuffle=False))
    autocast = torch.autocast("cpu", enabled=False)
    evaluation = evaluate(parallel, loader, TOTAL, autocast)
    kept = model.training and before == [module.training for module in model]
    model.eval()
    evaluate(model, loader, TOTAL, autocast)
    return evaluation, kept, model.state_dict() | {"training": model.training}


@pytest.mark.parametrize(
    ("world_size", "classes", "wrap"),
    [(1, 3, False), (2, 13, True), (3, 10, False), (3, 150, True)],
)
def test_metrics_are_exact(world_size: int, classes: int, wrap: bool, tmp_path: Path) -> None:
    results = ranks.call(classify, classes, wrap, 1.0, folder=tmp_path, ranks=world_size)
    model, inputs, labels = problem(classes)
    state = results[0][2]
    assert not state.pop("training"), "a model in evaluation mode stays in it"
    model.load_state_dict(state)  # rank 0's statistics
    scores = model.eval()(inputs).detach().double().softmax(dim=1)
    for evaluation, kept, _ in results:
        metrics, targets, predictions, given = evaluation
        assert kept, "each module returns to its mode"
        assert targets.tolist() == labels.tolist()
        assert predictions.tolist() == scores.argmax(dim=1).tolist()
        assert given.shape == (TOTAL, classes if classes <= 100 else 0)
        assert given.tolist() == [
            approx(row, rel=1e-4) for row in scores[:, : given.shape[1]].tolist()
        ]
        assert metrics["accuracy"] == approx(accuracy_score(labels, predictions))
        every = range(classes)
        assert metrics["loss"] == approx(log_loss(labels, scores, labels=every), rel=1e-5)
        top5 = top_k_accuracy_score(labels, scores, k=5, labels=every) if classes > 10 else None
        assert metrics.get("top5") == (top5 and approx(top5))


@pytest.mark.parametrize("classes", [2, 3, 13])
def test_report_is_that_of_scikit_learn(classes: int) -> None:
    torch.manual_seed(0)
    targets, scores = torch.arange(60) % min(classes, 12), torch.rand(60, classes)
    scores /= scores.sum(1, keepdim=True)
    guess = scores.argmax(1)
    found = report(Evaluation({}, targets, guess, scores))
    each = classification_report(targets, guess, output_dict=True, zero_division=0)["macro avg"]
    expected = {"precision": each["precision"], "recall": each["recall"], "f1": each["f1-score"]}
    if classes < 13:  # the last class does not occur
        one = [roc_auc_score(targets == c, scores[:, c]) for c in range(classes)]
        expected["auc"] = sum(one) / classes
    assert found == approx(expected)


def classify_pairs() -> list[int]:
    data = TensorDataset(torch.arange(5.0), torch.tensor([9.0, 0, 9, 0, 9]), torch.zeros(5).long())
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
    return evaluate(Pair(), loader, 5, torch.autocast("cpu", enabled=False)).predictions.tolist()


class Pair(nn.Linear):
    """Choose the class of the larger input."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:  # type: ignore[override]
        return torch.stack([first, second], dim=1)


def test_models_may_have_several_inputs(tmp_path: Path) -> None:
    assert ranks.call(classify_pairs, folder=tmp_path, ranks=2)[0] == [1, 0, 1, 0, 1]


def diverge() -> str:
    with pytest.raises(UserError) as error:
        classify(3, wrap=False, scale=float("nan"))
    return str(error.value)


def test_divergence_is_the_users_error(tmp_path: Path) -> None:
    message = ranks.call(diverge, folder=tmp_path, ranks=2)[1]
    assert "the test loss is NaN or infinite" in message
    assert "check the data for NaN" in message


def write(folder: Path) -> None:
    targets, predictions = torch.tensor([1, 0]), torch.tensor([1, 1])
    evaluation = Evaluation({}, targets, predictions, torch.zeros(2, 0))
    names = ["cat, $big$", '狗 "dog"\n']
    path = folder / f"{dist.get_rank()}.csv"
    write_predictions(path, names, evaluation, row=[5, 9], text=["a\n\rb\r", ""])


def test_predictions_keep_names_and_rows(tmp_path: Path) -> None:
    ranks.call(write, tmp_path, folder=tmp_path / "log", ranks=2)
    assert not (tmp_path / "1.csv").exists()
    table = pandas.read_csv(tmp_path / "0.csv")
    assert [*table["prediction_name"]] == ['狗 "dog"\n', '狗 "dog"\n']
    assert [*table["row"]] == [5, 9]
    with (tmp_path / "0.csv").open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert head == ["index", "label", "prediction", "label_name", "prediction_name", "row", "text"]
    assert rows == [
        ["0", "1", "1", '狗 "dog"\n', '狗 "dog"\n', "5", "a\n\rb\r"],
        ["1", "0", "1", "cat, $big$", '狗 "dog"\n', "9", ""],
    ]
