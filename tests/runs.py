"""What runs leave behind, and runs of code that is broken on purpose."""

import csv
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

from tests.conftest import ROOT

NO_GPU = "warning: no CUDA device was found: training on the CPU, which is slower\n"
TINY = (
    "nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.GroupNorm(1, 8), nn.GELU(), nn.Conv2d(8, 16, 3, 2), nn.GroupNorm(1, 16), "
    "nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, classes))"
)
SMALL_RESNET = (  # two of four layers: checkpoints of 8 in place of 140 MB
    "examples/resnet_pipeline/model.py",
    "    return model\n",
    "    model.layer3, model.layer4 = (nn.Sequential(nn.GELU(), nn.GELU()) for _ in range(2))\n"
    "    model.fc = nn.Linear(128, classes)\n"
    "    return model\n",
)
Result = dict[str, Any]
Eventually = Callable[[Callable[[], object], float, str], None]


def result(out: Path) -> Result:
    return json.loads((out / "result.json").read_text())


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: record["loss/train"] for record in records if "loss/train" in record}
    assert list(found) == list(range(1, len(found) + 1))
    return list(found.values())


def predictions(out: Path) -> list[list[str]]:
    return list(csv.reader((out / "predictions.csv").read_text().splitlines()))


def check_predictions(out: Path, model: Any, *inputs: Any, **more: Any) -> None:
    """predictions.csv is that of the weights that were kept, with the names of the classes.

    Args:
        out: what the run has left.
        model: of the run's architecture; it gets the weights.
        inputs: the whole test set, and its labels.
        more: what follows in each row, by its name, and in `forward` how to get logits from model and inputs.
    """
    from safetensors.torch import load_file  # with torch, which the smoke tests need not wait for

    file, (*tensors, labels) = out / "best.safetensors", inputs
    forward = more.pop("forward", lambda: model(*tensors))
    model.load_state_dict(load_file(file if file.exists() else out / "model" / "model.safetensors"))
    numbers, best = labels.tolist(), forward().argmax(dim=1).tolist()
    names = result(out)["class_names"]
    columns = [range(len(numbers)), numbers, best, [names[n] for n in numbers], [names[n] for n in best]]
    head = ["index", "label", "prediction", "label_name", "prediction_name", *more]
    rows = ([str(value) for value in row] for row in zip(*columns, *more.values(), strict=True))
    assert predictions(out) == [head, *rows]


def mutated(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A copy of the project in which one thing is broken: (file, before, after)."""
    for name in ("common", "examples"):
        # With the bytecode of all that stays the same, but without what others are writing at this moment.
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    for path, old, new in changes:
        source = (folder / path).read_text()
        assert old in source
        (folder / path).write_text(source.replace(old, new))
    return folder


def shown(terminal: int) -> str:
    """All that is written to a terminal (the descriptor of its master) until nobody has it any more."""
    said = b""
    while True:
        try:
            said += os.read(terminal, 4096)
        except OSError:
            os.close(terminal)
            return said.decode()


def newest_step(out: Path) -> int:
    """Of the checkpoints that are whole; those of the Trainer are folders with a seal."""
    ours = [path.name for path in (out / "checkpoints").glob("step-*.pt")]
    trainers = [path.parent.name for path in (out / "checkpoints").glob("checkpoint-*/seal.json")]
    return max((int(name.split("-")[1]) for name in ours + trainers), default=0)


def stopped_inside_an_epoch(process: Popen[str], out: Path, after: int, steps: int) -> bool:
    """Stop a run (SIGSTOP, all its processes) whose newest checkpoint is that of step `after` or a later one, and not
    that of the end of an epoch, which has so many steps. Ask again and again; between, it goes on.
    """
    if newest_step(out) < after:
        return False
    os.killpg(process.pid, signal.SIGSTOP)
    inside = newest_step(out) % steps != 0
    if not inside:
        os.killpg(process.pid, signal.SIGCONT)
    return inside


def tiny_imagenet(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A copy of the project in which imagenet_ddp has a model that starts fast, and has no BatchNorm."""
    source = "model = models.get_model(recipe.arch, weights=None, num_classes=classes, **options)"
    return mutated(folder, ("examples/imagenet_ddp/recipe.py", source, f"model = {TINY}"), *changes)


def slow(seconds: float) -> tuple[str, str, str]:
    """A change to all programs: each step takes longer, so that a run does not end before it is disturbed."""
    step = "            self._end_step(total)\n"
    return "common/train/run.py", step, f"{step}            __import__('time').sleep({seconds})\n"


# A change to all programs: every rank notes which samples it trains on, beside the run's own check.
RECORD = (
    "common/train/run.py",
    "self._seen.add(indices, self.batch_share()[1])",
    "mine = indices[: self.batch_share()[1]]; self._seen.add(mine); (self.args.out / 'seen').open('a').write("
    "' '.join(map(str, [state.epoch, state.batch, self.shard[1], *mine.tolist()])) + '\\n')",
)


def accounted(out: Path) -> dict[int, list[int]]:
    """By epoch, the samples of the steps that count: of a step that was done again, the last time."""
    steps: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for line in (out / "seen").read_text().splitlines():
        epoch, batch, size, *samples = map(int, line.split())
        steps.setdefault((epoch, batch), []).append((size, samples))
    found: dict[int, list[int]] = {}
    for (epoch, _), times in steps.items():
        for _, samples in times[-times[-1][0] :]:  # as many ranks as there were the last time
            found.setdefault(epoch, []).extend(samples)
    return found
