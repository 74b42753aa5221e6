"""Training speed of `bert_dp` on real reviews compared with the naive recipe, at equal accuracy.

    python -m benchmarks.bert_throughput --csv ChnSentiCorp_htl_all.csv --vocab vocab.txt
    python -m benchmarks.bert_throughput --csv FILE --vocab FILE --part accuracy --epochs 3
    python -m benchmarks.bert_throughput --csv FILE --vocab FILE --part batch

The naive recipe is the usual one: each batch is tokenised in the collate function and padded to 128
tokens, dropout is 0.1, the optimizer is torch's Adam as it comes. The steps between it and ours are
added one by one; all train the same model.

* speed: sequences per second, whole steps from text (or stored tokens) to new parameters;
* accuracy: of the naive and of the last recipe after the same epochs, with the same learning rates;
* batch: DataParallel against one device and against gradient accumulation on it, by batch size. On
  a CPU a device is one core: one replica with one thread, or two replicas in threads. One replica
  with all cores is measured there, too, which is what the program does without --replicas. Besides:
  what copying the model and adding the gradients cost, and how far the mean of the replicas' means
  is from the loss of the batch where their shares differ.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
from tyro.conf import arg

from benchmarks import harness
from benchmarks.bert_recipes import BF16, NAIVE, Recipe, device, known_steps
from benchmarks.harness import Measurement, compare, earlier, facts, medians, ratios
from benchmarks.ranks import wait_for_devices
from common.launch.cgroup import cores
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.train.replicas import Replicas, reduce_gradients, replicate
from examples.bert_dp.args import TextArgs

ONE, ALL = "one device", "one device, all cores"
ACCUMULATED, PARALLEL = "one device, micro-batches", "DataParallel"


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
    batches: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    """Batch sizes (batch)."""
    replicas: int = 2
    """Replicas on a CPU; with GPUs it is their number (batch)."""
    patience: float = 0
    """Seconds for samples taken again because other programs were busy (speed; batch: per size)."""
    seeds: int = 1
    """Trainings of each recipe, from other parameters and in another order (accuracy)."""
    lr: float = 5e-4
    """Highest learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, steps=self.steps, epochs=self.epochs, seeds=self.seeds)
        at_least(1, batch_size=self.batch_size)
        at_least(0, patience=self.patience)
        at_least(2, replicas=self.replicas, batches=min(self.batches, default=0))

    def recipe(self, name: str, seed: int = 0, **more: Any) -> Recipe:
        """One of the recipes, with these flags."""
        model: dict[str, Any] = {"layers": self.layers, "hidden": self.hidden, "lr": self.lr}
        text = TextArgs(csv=self.csv, vocab=self.vocab, **model)
        return Recipe(name, text, self.batch_size, seed, **more)


def measured(
    recipes: Mapping[str, Recipe], args: Args, base: str, threads: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Sequences per second of each recipe, and the ratios to a base.

    Args:
        recipes: by name.
        args: the flags.
        base: a name.
        threads: of torch, by name; all have as many as torch has now if it is missing.
    """
    usual, quiet = torch.get_num_threads(), harness.Quiet(args.patience)

    def block(name: str) -> float:
        torch.set_num_threads(threads[name] if threads else usual)
        batches = list(islice(recipes[name].batches, args.steps))  # of a sample taken again, too
        return quiet.sample(partial(train, recipes[name], batches))

    def train(recipe: Recipe, batches: list[list[int]]) -> float:
        wait_for_devices()
        started = time.perf_counter()
        reviews = sum(map(recipe.step, batches))
        wait_for_devices()
        return round(reviews / (time.perf_counter() - started), 2)

    programs = {name: partial(block, name) for name in recipes}
    samples = compare(programs, args.rounds, 1, lambda name, speed: f"{name}, {speed:.1f}/s")
    torch.set_num_threads(usual)
    ratio = medians(ratios(samples, base), 2)
    speed = medians(samples, 1)
    others = {"median": round(median(quiet.others), 3), "most": max(quiet.others)}
    return {"samples": samples, "sequences_per_second": speed, "ratio": ratio, "others": others}


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
            recipe.step(next(recipe.batches))
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
    """One device, the same with two micro-batches, and DataParallel, for growing batches."""
    first, cuda = device(), torch.cuda.is_available()
    count = torch.cuda.device_count() if cuda else args.replicas
    if count < 2 or (not cuda and cores() < count):
        raise UserError(
            f"--part batch: DataParallel needs {max(2, count)} devices (GPUs, or cores)"
        )
    devices = [torch.device("cuda", number) if cuda else first for number in range(count)]
    torch.set_num_threads(count)  # the replicas on a CPU share these
    last = list(known_steps())[-1]
    recipes = {
        ONE: args.recipe(last),
        ACCUMULATED: args.recipe(last, micro_batches=count),
        PARALLEL: args.recipe(last, devices=devices),
    }
    threads = dict.fromkeys(recipes, 1)
    if not cuda:
        recipes[ALL], threads[ALL] = args.recipe(last), count
    found = {}
    for size in args.batches:
        for recipe in recipes.values():  # all take the same batches
            recipe.batch_size, recipe.epoch = size, 0
            recipe.batches = recipe.order()
        wide = replace(args, steps=max(1, args.steps * 16 // size))
        print(f"batch {size}, {wide.steps} step(s) a sample")
        found[str(size)] = measured(recipes, wide, ONE, threads)
    about = {"devices": list(map(str, devices)), "recipe": last, "batches": found}
    parallel = recipes[PARALLEL]
    if isinstance(parallel.model, Replicas):
        about["exchange"] = exchange(parallel.model, args.rounds)
    return about | {"unequal": unequal_shares(recipes[ONE], count)}


def exchange(parallel: Replicas, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step that do not depend on the batch: the copies, and adding gradients."""
    spent: dict[str, list[float]] = {"copies": [], "gradients": []}
    parameters = list(parallel.module.parameters())
    for _ in range(4 * rounds):
        for replica in parallel.replicas:
            for parameter in replica.parameters():
                parameter.grad = torch.ones_like(parameter)
        works = (replicate, reduce_gradients)
        for name, work in zip(spent, works, strict=True):
            began = time.perf_counter()
            work(parallel.replicas)
            spent[name].append(round(1e3 * (time.perf_counter() - began), 3))
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return {
        "milliseconds": medians(spent, 2),
        "samples": spent,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "copy_mb": round(size / 1e6, 1),
    }


@torch.inference_mode()
def unequal_shares(recipe: Recipe, count: int, batch: int = 5) -> dict[str, Any]:
    """How far the mean of the replicas' means is from the loss, as a share of it."""
    errors = []
    for chosen in torch.arange(min(100, len(recipe.data) // batch) * batch).split(batch):
        ids, labels = recipe.batch(chosen.tolist())
        parts = zip(ids.chunk(count), labels.chunk(count), strict=True)
        means = [recipe.model(part, targets).sum() / len(targets) for part, targets in parts]
        loss = recipe.model(ids, labels).sum() / len(labels)
        errors.append(abs(float(torch.stack(means).mean() / loss) - 1))
    about = {"batch": batch, "replicas": count, "batches": len(errors)}
    return about | {
        "median_error": round(median(errors), 4),
        "largest_error": round(max(errors), 4),
    }


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
