"""Training speed of `bert_dp` on real reviews compared with the naive recipe, at equal accuracy.

    python -m benchmarks.bert_throughput --csv ChnSentiCorp_htl_all.csv --vocab vocab.txt
    python -m benchmarks.bert_throughput --csv FILE --vocab FILE --part accuracy --epochs 3
    python -m benchmarks.bert_throughput --csv FILE --vocab FILE --part batch

The naive recipe is the usual one: each batch is tokenised in the collate function and padded to 128
tokens, dropout is 0.1, the optimizer is torch's Adam as it comes. The steps between it and ours are
added one by one; all train the same model.

* speed: sequences per second, whole steps from text (or stored tokens) to new parameters;
* accuracy: of the naive and of the last recipe after the same epochs, with the same learning rates;
* batch: DataParallel over all devices against one, by batch size (needs two CUDA devices).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tyro.conf import arg

from benchmarks import harness
from benchmarks.bert_recipes import BF16, NAIVE, OURS, Recipe, known_steps
from benchmarks.harness import Measurement, compare, earlier, facts, medians, ratios
from benchmarks.ranks import wait_for_devices
from common.launch.errors import UserError
from common.launch.flags import at_least
from examples.bert_dp.args import TextArgs


@dataclass(frozen=True, kw_only=True)
class Args(Measurement):
    """The flags of this program."""

    csv: Path
    """Labelled reviews."""
    vocab: Path
    """vocab.txt of a BERT."""
    part: Literal["speed", "accuracy", "batch"] = "speed"
    """What to measure; the results of the other parts stay in the file."""
    layers: int = 4
    """Layers of the model."""
    hidden: int = 256
    """Its width."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 32
    """Reviews per step."""
    steps: int = 6
    """Steps of a sample (speed, batch)."""
    epochs: int = 2
    """Passes over the training reviews (accuracy)."""
    seeds: int = 1
    """Trainings of each recipe, from other parameters and in another order (accuracy)."""
    lr: float = 5e-4
    """Highest learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, steps=self.steps, epochs=self.epochs, seeds=self.seeds)
        at_least(1, batch_size=self.batch_size)

    def recipe(self, name: str, seed: int = 0, devices: Sequence[int] = ()) -> Recipe:
        """One of the recipes, with these flags."""
        model: dict[str, Any] = {"layers": self.layers, "hidden": self.hidden, "lr": self.lr}
        text = TextArgs(csv=self.csv, vocab=self.vocab, **model)
        return Recipe(name, text, self.batch_size, seed, devices)


def measured(recipes: Mapping[str, Recipe], args: Args, base: str) -> dict[str, Any]:
    """Sequences per second of each recipe, and the ratios to a base."""

    def block(recipe: Recipe) -> float:
        wait_for_devices()
        started = time.perf_counter()
        reviews = sum(recipe.step() for _ in range(args.steps))
        wait_for_devices()
        return round(reviews / (time.perf_counter() - started), 2)

    programs = {name: partial(block, recipe) for name, recipe in recipes.items()}
    samples = compare(programs, args.rounds, 1, lambda name, speed: f"{name}, {speed:.1f}/s")
    ratio = medians(ratios(samples, base), 2)
    return {"samples": samples, "sequences_per_second": medians(samples, 1), "ratio": ratio}


def measure_speed(args: Args) -> dict[str, Any]:
    """Each recipe."""
    names = known_steps()
    found = measured({name: args.recipe(name) for name in names}, args, NAIVE)
    return found | {"recipes": names, "bfloat16": "native" if BF16 in names else "left out"}


def measure_accuracy(args: Args) -> dict[str, Any]:
    """The naive recipe and the last one, trained to the end."""

    def epoch(recipe: Recipe) -> tuple[float, float]:
        started = time.perf_counter()
        for _ in range(recipe.steps_per_epoch):
            recipe.step()
        return time.perf_counter() - started, round(recipe.accuracy(), 4)

    names = NAIVE, list(known_steps())[-1]
    runs: dict[str, Any] = {name: {"accuracy": [], "training_seconds": []} for name in names}
    for seed in range(args.seeds):
        programs = {}
        for name in names:
            recipe = args.recipe(name, seed)
            recipe.total = args.epochs * recipe.steps_per_epoch
            programs[name] = partial(epoch, recipe)
        samples = compare(programs, args.epochs, show=lambda name, one: f"{name}: {one}")
        for name, each in samples.items():
            runs[name]["accuracy"].append([accuracy for _, accuracy in each])
            runs[name]["training_seconds"].append(round(sum(spent for spent, _ in each), 1))
    return {"epochs": args.epochs, "runs": runs}


def measure_batch(args: Args) -> dict[str, Any]:
    """One device and DataParallel over all, for growing batches: when the second begins to pay."""
    count, found = torch.cuda.device_count(), {}
    if count < 2:
        raise UserError(f"--part batch: there are {count} CUDA device(s); DataParallel needs two")
    for size in (32, 64, 128, 256, 512):
        wide = replace(args, batch_size=size)
        parallel = wide.recipe(OURS, devices=range(count))
        recipes = {"one device": wide.recipe(OURS), "DataParallel": parallel}
        found[str(size)] = measured(recipes, wide, "one device")
    return {"devices": count, "batches": found}


def main(args: Args) -> None:
    """Measure, write the results, show them."""
    parts = {"speed": measure_speed, "accuracy": measure_accuracy, "batch": measure_batch}
    about = facts("torch", "transformers", "tokenizers") | {
        "model": {"layers": args.layers, "hidden": args.hidden},
        "batch_size": args.batch_size,
        "rounds": args.rounds,
    }
    found = {args.part: about | parts[args.part](args)}
    harness.save("bert_throughput", earlier("bert_throughput", args.out) | found, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
