"""bert_dp beside a linear model: accuracy on the same splits of real reviews, seed by seed.

    python -m benchmarks.bert_accuracy --csv FILE

Both see the same nine tenths of the reviews. BERT's accuracy is that of its last epoch, which
nobody has chosen, and that of its best one, which the validation reviews have chosen themselves.
Processor seconds are those of all threads, the start of the program included: other programs on the
machine do not change them much. A quiet machine of two cores takes about half as many by the clock.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import harness
from common.launch.errors import UserError
from common.launch.flags import at_least
from examples.bert_dp.baseline import accuracy
from examples.bert_dp.reviews import read_reviews

# Chosen on a fifth of the training reviews of seed 0: examples/bert_dp/README.md.
RECIPE = "--fast --layers 1 --pairs 6000 --max-length 384 --dropout 0.3 --mask 0.4 --weight-decay 1"


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    csv: Path | None = None
    """Reviews (default: those shipped with the example)."""
    seeds: int = 5
    """Splits to train on."""
    epochs: int = 8
    """Passes over the training reviews."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json)."""

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds, epochs=self.epochs)


def trained(args: Args, seed: int) -> dict[str, Any]:
    """What `python -m examples.bert_dp` comes to with the flags of `RECIPE`.

    Raises:
        UserError: it failed; its own lines say why.
    """
    given = {"--csv": args.csv, "--epochs": args.epochs, "--seed": seed}
    flags = [str(part) for flag in given.items() if flag[1] is not None for part in flag]
    with tempfile.TemporaryDirectory() as out:
        words = ["-m", "examples.bert_dp", *RECIPE.split(), "--device", "cpu", "--out", out, *flags]
        if code := subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL).returncode:
            raise UserError(f"a training ended with exit code {code}")
        return json.loads((Path(out) / "result.json").read_text())


def processor_seconds() -> float:
    """What this process and its ended children have used, user and system."""
    return sum(os.times()[:4])


def main(args: Args) -> None:
    """Train both models with each seed."""
    about, reviews = harness.facts("torch", "transformers", "scikit-learn"), read_reviews(args.csv)
    linear, last, best, told = [], [], [], dict[str, Any]()
    seconds: dict[str, list[float]] = {"linear model": [], "BERT": []}
    for seed in range(args.seeds):
        began = processor_seconds()
        linear.append(accuracy(reviews, seed))
        seconds["linear model"].append(round(processor_seconds() - began, 1))
        began = processor_seconds()
        told = trained(args, seed)
        seconds["BERT"].append(round(processor_seconds() - began, 1))
        last.append(told["metrics"]["accuracy"])
        best.append(told["metrics"]["best_accuracy"])
        print(f"seed {seed}: linear {linear[-1]:.4f}, BERT {last[-1]:.4f}, at best {best[-1]:.4f}")
    runs = {"linear model": linear, "BERT, last epoch": last, "BERT, best epoch": best}
    means = {name: round(mean(values), 4) for name, values in runs.items()}
    inputs = {
        "input": {"reviews": len(reviews.texts), "name": reviews.name},
        "flags": f"{RECIPE} --epochs {args.epochs}",
        "precision": told["precision"],
    }
    found = {"accuracy": {name: [round(v, 4) for v in values] for name, values in runs.items()}}
    found["mean"] = means
    found["processor_seconds"] = seconds
    harness.save("bert_accuracy", about | inputs | found, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
