"""What a run says of its epochs and at its end: evaluations, result.json, curves.png."""

import csv
import io
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from common.launch.collectives import assert_same_on_all_ranks, gather_objects
from common.launch.errors import UserError
from common.launch.place import current
from common.train import machine
from common.train.curves import draw_curves
from common.train.evaluate import Evaluation
from common.train.files import write_atomically
from common.train.greet import backend, program, used_arguments
from common.train.lines import epoch_line, far_above

if TYPE_CHECKING:
    from common.train.run import Run

FILES = {
    "curves": "curves.png",
    "TensorBoard events": "tensorboard",
    "predictions": "predictions.csv",
    "best model": "best.safetensors",
    "pictures": "samples.png",
}


def show_epoch(
    run: "Run",
    evaluation: Evaluation | Mapping[str, float],
    best: str,
    smaller_is_better: bool,
) -> bool:
    """Print an epoch's line, and record its evaluation. Every rank calls this.

    Args:
        run: as in `record_evaluation`, as is `evaluation`.
        evaluation: of the epoch.
        best: the metric that decides which model is the best.
        smaller_is_better: as of an error.

    Returns:
        Whether the model is the best so far.
    """
    epoch = run.meters.epoch()
    known = record_evaluation(run, run.label, evaluation)
    better = run.state.improved(best, smaller_is_better)
    more = {f"speed/{run.meters.unit}_per_second": epoch["speed"]} if "speed" in epoch else {}
    if groups := getattr(run.parts.get("optimizer"), "param_groups", None):
        more["lr"] = groups[0]["lr"]
    run.scalars(run.state.step, more)
    run.meters.log.write_lines()
    run.meters.log.write_events()
    losses = {"loss": epoch.get("loss"), "test": known.get("loss")}
    speed, left = (epoch.get("speed"), run.meters.unit), run.meters.seconds_left
    score = best, run.state.metrics[best]
    run.print0(epoch_line(run.label, losses, score, speed, left, better))
    if warning := far_above(run.label, losses["loss"], next(train_losses(run), None)):
        run.warn(warning)
    return better


def train_losses(run: "Run") -> Iterator[float]:
    """The loss of every step of the run, also of those before a resume; rank 0 has them."""
    points = run.meters.log.points
    return (values["loss/train"] for _, values in points if "loss/train" in values)


def show_evaluation(run: "Run", label: str, evaluation: Evaluation | Mapping[str, float]) -> None:
    """Print all metrics of an evaluation, and record it. Every rank calls this.

    Args:
        run: as in `record_evaluation`, as is `evaluation`.
        label: what was evaluated.
        evaluation: of a model.
    """
    known = record_evaluation(run, label, evaluation)
    numbers = ", ".join(f"test {name} {value:.4f}" for name, value in known.items())
    run.print0(f"{label}: {numbers}")
    run.meters.log.write_lines()
    run.meters.log.write_events()


def record_evaluation(
    run: "Run", label: str, evaluation: Evaluation | Mapping[str, float]
) -> dict[str, float]:
    """Record an evaluation. Every rank calls this.

    Args:
        run: whose `state.metrics` become those of the evaluation.
        label: what was evaluated: the epoch.
        evaluation: with predictions, or metrics only.

    Returns:
        Loss and metrics by name.

    Raises:
        UserError: the model diverged, or the ranks' metrics differ.
    """
    log, step = run.meters.log, run.state.step
    run.meters.evaluated()
    metrics, loss = evaluation, {}
    if isinstance(evaluation, Evaluation):
        metrics, loss = evaluation.metrics, {"loss": evaluation.loss}
    assert isinstance(metrics, Mapping)
    known = {name: value for name, value in metrics.items() if value is not None}
    for name, value in {**loss, **known}.items():
        if not math.isfinite(value):
            raise UserError(f"training diverged: in {label} the test {name} is {value}; lower --lr")
    remedy = "evaluate the whole test set, put together by ordered_predictions, on every rank"
    assert_same_on_all_ranks(known, "the metrics", remedy)
    curves = {f"{name}/test": value for name, value in loss.items()}
    log.scalars(step, curves | {f"test/{name}": value for name, value in known.items()})
    run.state.metrics, run.state.evaluated = dict(metrics), step
    return loss | known


def write_predictions(run: "Run", evaluation: Evaluation) -> None:
    """Write predictions.csv: a row per sample of the test set, in dataset order. Rank 0 calls this.

    Args:
        run: whose data may have `class_names`, and `test_columns` with more about each test sample.
        evaluation: targets and predictions.

    Raises:
        UserError: the disk is full, for example; the file before stays as it was.
    """
    numbers = {"label": evaluation.targets.tolist(), "prediction": evaluation.predictions.tolist()}
    columns: dict[str, Sequence[Any]] = {"index": range(len(numbers["label"])), **numbers}
    if names := class_names(run.data):
        columns |= {f"{what}_name": [names[n] for n in of] for what, of in numbers.items()}
    columns |= getattr(run.data, "test_columns", {})
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*columns.values(), strict=True))
    write_atomically(run.meters.log.out / "predictions.csv", text.getvalue().encode())


def class_names(data: Any) -> list[str]:
    """The names of the classes, by their numbers, where the data have names."""
    return list(getattr(data, "class_names", ()))


def about(run: "Run") -> dict[str, str]:
    """What weights must say where they are found alone: program, classes, flags, data."""
    known = {"class_names": class_names(run.data), "arguments": run.config}
    known |= {"data": getattr(run.data, "facts", {})}
    words = {name: json.dumps(value) for name, value in known.items()}
    return {"example": program(run.args), **words}


def write_result(run: "Run", facts: Mapping[str, Any]) -> None:
    """Write result.json and curves.png, and print the summary. Every rank calls this.

    Args:
        run: the run.
        facts: `metrics`, `parameter_hash`, and what else the program says.

    Raises:
        UserError: the disk is full, for example.
    """
    place, meters, world_size = current(), run.meters, dist.get_world_size()
    memory, log = gather_objects(machine.peak_memory(run.device)), meters.log
    if not log.active:
        return
    losses = list(train_losses(run))
    result: dict[str, Any] = {
        "example": program(run.args),
        "argv": sys.argv,
        "launcher": place.launcher,
        "world_size": world_size,
        "nodes": place.num_nodes,
        "threads": torch.get_num_threads(),
        "device": run.device.type,
        "backend": backend(),
        "samples_per_second": meters.samples_per_second,
        **getattr(run.data, "facts", {}),
        "class_names": class_names(run.data),
        "arguments": used_arguments(run),
        "settings": run.config,
        "commit": machine.commit(),
        "host": platform.node(),
        "peak_memory_mb": memory,
        "epochs": run.num_epochs,
        "steps": run.state.step,
        "global_batch": run.batch_size,
        "precision": run.amp.name,
        **facts,
        "final_loss": losses[-1] if losses else None,
        **times(run),
        "versions": machine.versions(),
    }
    file = log.out / "result.json"
    write_atomically(file, (json.dumps(result, indent=2) + "\n").encode())
    smoothing = result["arguments"].get("label_smoothing") or 0.0
    draw_curves(log.out / "curves.png", log.points, title(run), smoothing)
    metrics = {name: value for name, value in facts["metrics"].items() if value is not None}
    for name, value in metrics.items():
        log.print0(f"{name + ':':23}{value:.4f}")
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in meters.seconds.items())
    log.print0(f"{'seconds:':23}{seconds}")
    for what, left in FILES.items():
        if (log.out / left).exists():
            log.print0(f"{what + ':':23}{log.out / left}")
    total = result["seconds"]["total"]
    score = f"accuracy {metrics['accuracy']:.4f}, " if "accuracy" in metrics else ""
    log.print0(
        f"{result['example']}: {score}world size {world_size}, {run.state.step} steps, "
        f"{total:.1f} s, parameters {facts['parameter_hash'][:12]}, result {file}"
    )


def times(run: "Run") -> dict[str, Any]:
    """What result.json says of the time: of this start, and how many there were."""
    began, ended = current().started, time.time()
    seconds = {"total": ended - began, **run.meters.seconds}
    return {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "started": utc(began),
        "ended": utc(ended),
        "starts": run.state.starts,
    }


def utc(seconds: float) -> str:
    """A time, in seconds since the epoch, as ISO 8601 writes it, to the second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def title(run: "Run") -> str:
    """What a picture shows: program, model, data, ranks."""
    model = type(getattr(run, "parts", {}).get("model")).__name__
    known = f"{model} on {run.data}" if model not in ("NoneType", "ModuleDict") else run.data
    what, ranks = run.options.what or known, dist.get_world_size()
    return f"{program(run.args)}: {what}, {ranks} rank{'s' if ranks > 1 else ''}"
