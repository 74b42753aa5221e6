"""The hyper-parameters of mnist_ddp_spawn on three sets of images, seed by seed.

    python -m benchmarks.mnist_recipes --mnist DIR --clothes DIR   # a busy machine does no harm
    python -m benchmarks.mnist_recipes --mnist DIR --clothes DIR --seeds 1

A recipe is the flags of `python -m examples.mnist_ddp_spawn`, all of them given, so that other
defaults change no result. Accuracy is that of the last epoch on the whole test set. The baseline is
a logistic regression on the same pixels, scaled to 0..1, without a seed.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from benchmarks import harness
from benchmarks.mnist_time_to_accuracy import find_data
from common.data.idx import ImageData, Images, image_data
from common.launch.errors import UserError
from common.launch.flags import at_least

SETS = {"digits": (20, 5), "mnist": (1, 5), "clothes": (5, 3)}  # epochs, seeds
RECIPES = {
    "weight decay 2e-3, before": "--lr 0.2 --weight-decay 2e-3 --label-smoothing 0.1",
    "weight decay 5e-4, the default": "--lr 0.2 --weight-decay 5e-4 --label-smoothing 0.1",
    "weight decay 2e-3, lr 0.3": "--lr 0.3 --weight-decay 2e-3 --label-smoothing 0.1",
    "weight decay 5e-4, lr 0.3": "--lr 0.3 --weight-decay 5e-4 --label-smoothing 0.1",
    "weight decay 5e-4, lr 0.1, no smoothing": "--lr 0.1 --weight-decay 5e-4 --label-smoothing 0",
}
FIXED = "--momentum 0.9 --batch-size 120 --device cpu --threads 1"
LINEAR = "logistic regression"


@dataclass(frozen=True, kw_only=True)
class Args:
    """The flags of this program."""

    mnist: Path
    """Folder with the four idx files of MNIST (.gz), in itself or in MNIST/raw."""
    clothes: Path
    """The same of Fashion-MNIST, or of another set of its kind."""
    seeds: int = 5
    """Most seeds of parameters and sample order, for each recipe and set."""
    sets: tuple[Literal["digits", "mnist", "clothes"], ...] = ("digits", "mnist", "clothes")
    """Sets to measure; what is known of the others stays."""
    jobs: int = 1
    """Trainings at once, each with one thread."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json)."""

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds, jobs=self.jobs)


def trained(dataset: str, epochs: int, flags: str, seed: int) -> dict[str, Any]:
    """The result.json of a training.

    Raises:
        UserError: it failed; its own lines say why.
    """
    with tempfile.TemporaryDirectory() as out:
        words = ["-m", "examples.mnist_ddp_spawn", "--dataset", dataset, "--epochs", str(epochs)]
        words += [*flags.split(), *FIXED.split(), "--seed", str(seed), "--out", out]
        command = [sys.executable, *words]
        if code := subprocess.run(command, stdout=subprocess.DEVNULL, cwd=harness.ROOT).returncode:
            raise UserError(f"a training ended with exit code {code}")
        return json.loads((Path(out) / "result.json").read_text())


def linear(data: ImageData) -> float:
    """The accuracy of a logistic regression on the test set, after 100 iterations at most."""

    def flat(pixels: Tensor) -> Any:
        return pixels.flatten(1).float().div(255).numpy()

    def part(images: Images) -> tuple[Any, Any]:
        return flat(images.pixels), images.labels.numpy()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # more iterations only overfit
        model = LogisticRegression().fit(*part(data.train))
    return float(model.score(*part(data.test)))


def measured(name: str, dataset: str, args: Args) -> dict[str, list[float]]:
    """The accuracy on a set with each recipe, by seed, and the baseline's."""
    epochs, seeds = SETS[name]
    runs = [(recipe, seed) for recipe in RECIPES for seed in range(min(seeds, args.seeds))]
    accuracy: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    with ThreadPoolExecutor(args.jobs) as pool:
        found = pool.map(lambda run: trained(dataset, epochs, RECIPES[run[0]], run[1]), runs)
        for (recipe, seed), told in zip(runs, found, strict=True):
            accuracy[recipe].append(round(told["metrics"]["accuracy"], 4))
            print(f"{name}, {recipe}, seed {seed}: {accuracy[recipe][-1]:.4f}", flush=True)
    return accuracy | {LINEAR: [round(linear(image_data(dataset, Path())), 4)]}


def main(args: Args) -> None:
    """Train with each recipe on each set, with each seed; keep what is known of other sets."""
    result = harness.earlier("mnist_recipes", args.out) | harness.facts("torch", "scikit-learn")
    result |= {"recipes": RECIPES, "fixed": FIXED}
    folders = {"mnist": str(find_data(args.mnist)), "clothes": str(find_data(args.clothes))}
    for name in args.sets:
        dataset = folders.get(name, name)
        data = image_data(dataset, Path())
        sizes = {"train": len(data.train), "test": len(data.test), "epochs": SETS[name][0]}
        accuracy = measured(name, dataset, args)
        middle = {recipe: round(median(values), 4) for recipe, values in accuracy.items()}
        for key, value in {"input": sizes, "accuracy": accuracy, "median": middle}.items():
            result.setdefault(key, {})[name] = value
    harness.save("mnist_recipes", result, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
