"""What a run says at its start and end: greeting, evaluations, result.json, curves.png."""

import csv
import importlib.metadata
import io
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from common.launch.collectives import assert_same_on_all_ranks
from common.launch.device import ranks_share_devices, used_devices
from common.launch.errors import UserError
from common.launch.place import current
from common.train.evaluate import Evaluation
from common.train.files import write_atomically, writing
from common.train.log import Point

if TYPE_CHECKING:
    from common.train.run import Run

FILES = {
    "curves": "curves.png",
    "TensorBoard events": "tensorboard",
    "predictions": "predictions.csv",
    "best model": "best.safetensors",
}


def program(args: Any) -> str:
    """The name of a program, from the package of its flags."""
    return str(type(args).__module__.split(".")[-2])


def backend() -> str:
    """The backend of the default group, in a word."""
    return "nccl" if "nccl" in str(dist.get_backend_config()) else str(dist.get_backend())


def greet(run: "Run") -> None:
    """Say in one line what a run uses. Every rank calls this.

    Raises:
        UserError: nodes would compute with different precisions.
    """
    remedy = "auto is what a node's processor computes natively: give one for all"
    assert_same_on_all_ranks(run.amp.name, "--precision", remedy)
    place, world_size, cuda = current(), dist.get_world_size(), run.device.type == "cuda"
    if not cuda and place.flags.device == "auto":
        run.warn("no CUDA device was found: training on the CPU, which is slower")
    for warning in place.warnings:
        run.warn(warning)
    if run.amp.deterministic and cuda:
        run.warn("--deterministic makes CUDA kernels repeatable, and the run considerably slower")
    device = torch.cuda.get_device_name(run.device) if cuda else "cpu"
    shared = cuda and ranks_share_devices()
    count = f"{world_size} ranks share {used_devices()}" if shared else f"{world_size}"
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    shares = run.options.shares or f"{ranks} x {run.batch_size // world_size}"
    run.print0(
        f"{program(run.args)}: {run.options.what or run.data}, {count} x {device} with "
        f"{torch.get_num_threads()} thread(s), {place.num_nodes} node(s), "
        f"launcher {place.launcher}, backend {backend()}, {run.amp.name}"
        f"{', channels last' if run.amp.channels_last else ''}, batch {run.batch_size} = {shares}"
    )


def show_evaluation(run: "Run", label: str, evaluation: Evaluation | Mapping[str, float]) -> None:
    """Print and record an evaluation. Every rank calls this.

    Args:
        run: whose `state.metrics` become those of the evaluation.
        label: what was evaluated: the epoch.
        evaluation: with predictions, or metrics only.

    Raises:
        UserError: the model diverged, or the ranks' metrics differ.
    """
    log, step, seconds = run.meters.log, run.state.step, run.meters.evaluated()
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
    shown = {f"test {name}": value for name, value in loss.items()} | known
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
    log.print0(f"{label}: {numbers} ({seconds:.1f} s)")
    curves = {f"{name}/test": value for name, value in loss.items()}
    log.scalars(step, curves | {f"test/{name}": value for name, value in known.items()})
    log.write_lines()
    log.write_events()
    run.state.metrics = dict(metrics)


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
    """What weights must tell to whoever finds them alone: program, classes, flags, data."""
    known = {"class_names": class_names(run.data), "arguments": run.config}
    known |= {"data": getattr(run.data, "facts", {})}
    words = {name: json.dumps(value) for name, value in known.items()}
    return {"example": program(run.args), **words}


def write_result(run: "Run", facts: Mapping[str, Any]) -> None:
    """Write result.json and curves.png, and print the summary. Rank 0 calls this.

    Args:
        run: the run.
        facts: `metrics`, `parameter_hash`, and what else the program says.

    Raises:
        UserError: the disk is full, for example.
    """
    place, meters, world_size = current(), run.meters, dist.get_world_size()
    log = meters.log
    losses = [values["loss/train"] for _, values in log.points if "loss/train" in values]
    total = time.time() - place.started
    result = {
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
        "arguments": run.config,
        "epochs": run.num_epochs,
        "steps": run.state.step,
        "global_batch": run.batch_size,
        "precision": run.amp.name,
        **facts,
        "final_loss": losses[-1] if losses else None,
        "seconds": {name: round(s, 3) for name, s in {"total": total, **meters.seconds}.items()},
        "versions": _versions(),
    }
    file = log.out / "result.json"
    write_atomically(file, (json.dumps(result, indent=2) + "\n").encode())
    draw_curves(log.out / "curves.png", log.points, f"{result['example']}, {world_size} rank(s)")
    metrics = {name: value for name, value in facts["metrics"].items() if value is not None}
    for name, value in metrics.items():
        log.print0(f"{name + ':':20}{value:.4f}")
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in meters.seconds.items())
    log.print0(f"{'seconds:':20}{seconds}")
    for what, left in FILES.items():
        if (log.out / left).exists():
            log.print0(f"{what + ':':20}{log.out / left}")
    score = f"accuracy {metrics['accuracy']:.4f}, " if "accuracy" in metrics else ""
    log.print0(
        f"{result['example']}: {score}world size {world_size}, {run.state.step} steps, "
        f"{total:.1f} s, parameters {facts['parameter_hash'][:12]}, result {file}"
    )


def _versions() -> dict[str, str]:
    names = ["torch", "torchvision", "numpy", "scikit-learn"]
    names += ["transformers"] if "transformers" in sys.modules else []
    versions = {name: importlib.metadata.version(name) for name in names}
    return versions | {"python": sys.version.split()[0]}


def draw_curves(path: Path, points: Sequence[Point], title: str) -> None:
    """Draw one panel per group of curves: `loss/train` and `loss/test` share one.

    Args:
        path: of the PNG.
        points: steps, and values by name.
        title: of the picture.

    Raises:
        UserError: the disk is full, for example.
    """
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for step, values in points:
        for name, value in values.items():
            group, _, label = name.partition("/")
            curves.setdefault(group, {}).setdefault(label, []).append((step, value))
    if not curves:  # resumed at its end, in another folder
        return
    import matplotlib  # a second, after the training

    matplotlib.use("agg")
    from matplotlib import pyplot  # as above

    size = (5 * len(curves), 3.6)
    figure, axes = pyplot.subplots(1, len(curves), figsize=size, squeeze=False)
    for axis, (group, lines) in zip(axes[0], curves.items(), strict=True):
        for label, line in lines.items():
            axis.plot(*zip(*line, strict=True), label=label, marker="o" if len(line) < 30 else "")
        axis.set(title=group, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)
