"""Training speed of `bert_dp` on real reviews beside the naive recipe, at equal accuracy.

    python -m benchmarks.bert_throughput --csv ChnSentiCorp_htl_all.csv --vocab vocab.txt
    python -m benchmarks.bert_throughput --csv FILE --vocab FILE --part accuracy --epochs 3
    python -m benchmarks.bert_throughput --csv FILE --vocab FILE --part batch       # DataParallel over batch sizes

The naive recipe is the usual one: each batch is tokenised in the collate function and padded to 128 tokens, dropout is
0.1, the optimizer is torch's Adam as it comes. The steps between it and ours are added one by one. All train the same
model, and take turns step by step, so that a change of the machine's load meets all of them:

* speed: sequences per second, whole steps from text (or stored tokens) to new parameters, over blocks of steps;
* accuracy: of the naive recipe and of the last one after the same epochs, with the same learning rates;
* batch: one device against DataParallel over all of them, by batch size (needs two CUDA devices).
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from tyro.conf import arg

from benchmarks.machine import describe_machine, describe_software
from common.errors import UserError
from common.flags import at_least, fail, parse
from examples.bert_dp.options import TextOptions

NAIVE, OURS = "naive", "+ first token only in the last layer"
STEPS = {
    NAIVE: "tokenised in collate, padded to 128, dropout 0.1, Adam",
    "+ tokenised once, dynamic padding": "padded to the longest of the batch",
    "+ batches of like lengths": "LengthSampler",
    "+ fused optimizer": "AdamW(fused=True)",
    "+ no dropout": "its random numbers cost time",
    OURS: "Classifier",
    "+ bfloat16": "autocast, where the device computes it natively",
}


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    csv: Path
    """Labelled reviews."""
    vocab: Path
    """vocab.txt of a BERT."""
    part: Literal["speed", "accuracy", "batch"] = "speed"
    """What to measure."""
    layers: int = 4
    """Layers of the model."""
    hidden: int = 256
    """Its width."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 32
    """Reviews per step."""
    rounds: int = 5
    """Blocks of steps that each recipe gets (speed, batch)."""
    steps: int = 6
    """Steps in a block."""
    epochs: int = 2
    """Passes over the training reviews (accuracy)."""
    seeds: int = 1
    """Trainings of each recipe, from other parameters and in another order (accuracy)."""
    lr: float = 5e-4
    """Highest learning rate."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json) and the chart (.png)."""

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, steps=self.steps, epochs=self.epochs, batch_size=self.batch_size)
        at_least(1, seeds=self.seeds)

    @property
    def text(self) -> TextOptions:
        """The same as flags of the example."""
        return TextOptions(csv=self.csv, vocab=self.vocab, layers=self.layers, hidden=self.hidden, lr=self.lr)


class Recipe:
    """One way to train, step by step.

    Args:
        name: one of `STEPS`; it includes those before it.
        args: the flags.
        total: steps of the whole run, for the learning rate.
        devices: for DataParallel; empty for the first device alone.
        seed: of parameters and order.
    """

    def __init__(self, name: str, args: Args, total: int, devices: list[int] | None = None, seed: int = 0) -> None:
        import torch
        from torch import nn
        from torch.optim import Adam, AdamW

        from common.precision import Precision
        from examples.bert_dp.classifier import Classifier, prepare
        from examples.bert_dp.reviews import read_reviews, split
        from examples.bert_dp.tokens import LengthSampler, encode

        level = list(STEPS).index(name)
        self.batch_size, self.total, self.options = args.batch_size, total, args.text
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        reviews = read_reviews(args.csv)
        train, test = split(reviews, 0)
        self.texts = [reviews.texts[position] for position in train]
        self.labels = torch.tensor([reviews.labels[position] for position in train])
        torch.manual_seed(seed)
        dropout = 0.0 if level >= 4 else 0.1
        options = TextOptions(csv=args.csv, vocab=args.vocab, layers=args.layers, hidden=args.hidden, dropout=dropout)
        self.bert, self.tokenizer, _ = prepare(options, self.texts)
        self.bert.to(self.device).train()
        numbers = Precision(precision="bf16" if level >= 6 else "fp32", channels_last="no").on(self.device)
        classifier = Classifier(self.bert, numbers)
        self.model: nn.Module = nn.DataParallel(classifier, devices) if devices else classifier
        self.data = encode(self.tokenizer, self.texts, self.labels.tolist(), 128) if level >= 1 else None
        self.test = encode(self.tokenizer, [reviews.texts[p] for p in test], [reviews.labels[p] for p in test], 128)
        self.sampler = (
            LengthSampler(self.data.lengths, args.batch_size, alone(), seed) if self.data and level >= 2 else None
        )
        self.own_forward = level >= 5
        kind = AdamW if level >= 3 else Adam
        decay: dict[str, Any] = {"weight_decay": 0.01, "fused": True} if level >= 3 else {}
        self.optimizer = kind(self.bert.parameters(), args.lr, **decay)
        self.seed, self.epoch, self.done = seed, 0, 0
        self.batches = self.order()

    def order(self) -> Iterator[list[int]]:
        """The indices of each batch, epoch after epoch."""
        import torch

        while True:
            if self.sampler:
                self.sampler.set_epoch(self.epoch)
                for batch in self.sampler:
                    yield [index for _, index in batch]
            else:
                order = torch.randperm(
                    len(self.texts), generator=torch.Generator().manual_seed(hash((self.seed, self.epoch)))
                ).tolist()
                for start in range(0, len(order), self.batch_size):
                    yield order[start : start + self.batch_size]
            self.epoch += 1

    def step(self) -> int:
        """Train on a batch; return how many reviews it had."""
        import torch
        import torch.nn.functional as F

        chosen = next(self.batches)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * self.options.factor(min(self.done, self.total - 1), self.total)
        self.done += 1
        self.optimizer.zero_grad()
        if self.data is None:
            texts = [self.texts[index] for index in chosen]
            inputs = self.tokenizer(texts, max_length=128, padding="max_length", truncation=True, return_tensors="pt")
            inputs["labels"] = self.labels[chosen]
            loss = self.bert(**{name: tensor.to(self.device) for name, tensor in inputs.items()}).loss
        else:
            ids, labels, _ = self.data.__getitems__(chosen)
            ids, labels = ids.to(self.device), labels.to(self.device)
            if self.own_forward:
                loss = self.model(ids, labels).sum() / len(chosen)
            else:
                loss = F.cross_entropy(self.bert(ids, (ids != 0).long()).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.bert.parameters(), 1.0)
        self.optimizer.step()
        return len(chosen)

    def accuracy(self) -> float:
        """On the validation reviews, by the model itself."""
        import torch

        self.bert.eval()
        right = 0
        with torch.inference_mode():
            for start in range(0, len(self.test), 64):
                ids, labels, _ = self.test.__getitems__(range(start, min(start + 64, len(self.test))))
                ids = ids.to(self.device)
                logits = self.bert(ids, (ids != 0).long()).logits
                right += int((logits.argmax(dim=1).cpu() == labels).sum())
        self.bert.train()
        return right / len(self.test)


def alone() -> Any:
    """The place of a process that is a world of one, as far as samplers look at it."""
    from types import SimpleNamespace

    return SimpleNamespace(rank=0, size=1)


def in_turns(recipes: dict[str, Recipe], args: Args) -> dict[str, list[float]]:
    """Sequences per second of each recipe in each round; in a round the recipes take their turns in random order."""
    import torch

    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for recipe in recipes.values():
        for _ in range(2):
            recipe.step()
    found: dict[str, list[float]] = {name: [] for name in recipes}
    for number in range(args.rounds):
        names = list(recipes)
        random.Random(number).shuffle(names)  # noqa: S311 - an order of measurements
        for name in names:
            wait()
            started = time.perf_counter()
            reviews = sum(recipes[name].step() for _ in range(args.steps))
            wait()
            found[name].append(reviews / (time.perf_counter() - started))
        print(
            f"round {number + 1}/{args.rounds}: " + ", ".join(f"{found[name][-1]:.1f}" for name in recipes), flush=True
        )
    return found


def summary(samples: dict[str, list[float]], base: str) -> dict[str, Any]:
    """Medians, and the medians of the rounds' ratios to a base."""
    ratios = {name: [a / b for a, b in zip(values, samples[base], strict=True)] for name, values in samples.items()}
    return {
        "samples": {name: [round(value, 2) for value in values] for name, values in samples.items()},
        "sequences_per_second": {name: round(median(values), 1) for name, values in samples.items()},
        "ratio": {name: round(median(values), 2) for name, values in ratios.items()},
    }


def recipes() -> list[str]:
    """Those that this machine computes natively; the last one is what bert_dp does."""
    import torch

    from common.precision import Precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    native = Precision().on(device).name == "bf16"
    return [name for name in STEPS if native or name != "+ bfloat16"]


def speed(args: Args) -> dict[str, Any]:
    """Each recipe, in turns."""
    names = recipes()
    found = summary(in_turns({name: Recipe(name, args, 1000) for name in names}, args), NAIVE)
    bf16 = "native" if "+ bfloat16" in names else "left out"
    return found | {"recipes": {name: STEPS[name] for name in names}, "bfloat16": bf16}


def accuracy(args: Args) -> dict[str, Any]:
    """The naive recipe and the last one, trained to the end."""
    names = (NAIVE, recipes()[-1])
    runs: dict[str, Any] = {name: {"accuracy": [], "training_seconds": []} for name in names}
    for seed in range(args.seeds):
        pair = {name: Recipe(name, args, 0, seed=seed) for name in names}
        seconds = dict.fromkeys(names, 0.0)
        curves: dict[str, list[float]] = {name: [] for name in names}
        for epoch in range(args.epochs):
            for name, recipe in pair.items():
                steps = -(-len(recipe.texts) // args.batch_size)
                recipe.total = steps * args.epochs
                started = time.perf_counter()
                for _ in range(steps):
                    recipe.step()
                seconds[name] += time.perf_counter() - started
                curves[name].append(round(recipe.accuracy(), 4))
                print(
                    f"seed {seed}, epoch {epoch + 1}/{args.epochs}, {name}: {seconds[name]:.0f} s, "
                    f"accuracy {curves[name][-1]:.4f}", flush=True,
                )  # fmt: skip
        for name in names:
            runs[name]["accuracy"].append(curves[name])
            runs[name]["training_seconds"].append(round(seconds[name], 1))
    return {"epochs": args.epochs, "runs": runs}


def batch(args: Args) -> dict[str, Any]:
    """One device and DataParallel over all, for growing batches: where the second device begins to pay."""
    import torch

    devices = torch.cuda.device_count()
    if devices < 2:
        raise UserError(f"--part batch: DataParallel over {devices} CUDA device(s) has nothing to show; it needs two")
    found = {}
    for size in (32, 64, 128, 256, 512):
        wide = replace(args, batch_size=size)
        recipes = {
            "one device": Recipe(OURS, wide, 1000),
            "DataParallel": Recipe(OURS, wide, 1000, list(range(devices))),
        }
        found[str(size)] = summary(in_turns(recipes, wide), "one device")
    return {"devices": devices, "batches": found}


def draw(path: Path, results: dict[str, Any]) -> None:
    """A bar per recipe, and the accuracies below."""
    import matplotlib  # a second

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = results["speed"]
    names, values = list(found["ratio"]), list(found["sequences_per_second"].values())
    figure, axis = pyplot.subplots(figsize=(9.5, 0.55 * (2 + len(names))))
    axis.barh(names, values, height=0.6, color=["#999999", *["#0072b2"] * (len(names) - 1)])
    for position, name in enumerate(names):
        note = f"{values[position]:.0f} ({found['ratio'][name]:.2f} times the naive recipe)"
        axis.annotate(note, (values[position], position), (5, 0), textcoords="offset points", va="center")
    axis.invert_yaxis()
    axis.set_xlim(0, max(values) * 1.6)
    machine, model = found["machine"], found["model"]
    title = (
        f"BERT {model['layers']} layers x {model['hidden']}, batch {found['batch_size']}: training sequences per second"
    )
    axis.set_title(
        f"{title}\n{machine['cpu']}, {machine['cores']} cores, median of {found['rounds']} rounds",
        loc="left",
        fontsize=10,
    )
    if "accuracy" in results:
        runs = results["accuracy"]["runs"]
        words = "; ".join(
            f"{name}: {', '.join(f'{curve[-1]:.3f}' for curve in run['accuracy'])} "
            f"after {median(run['training_seconds']):.0f} s"
            for name, run in runs.items()
        )
        axis.set_xlabel(f"validation accuracy after {results['accuracy']['epochs']} epochs - {words}", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(args: Args) -> None:
    """Measure, write the results, show them."""
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[Args], dict[str, Any]]] = {"speed": speed, "accuracy": accuracy, "batch": batch}
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_software("torch", "transformers", "tokenizers"),
        "model": {"layers": args.layers, "hidden": args.hidden},
        "batch_size": args.batch_size,
        "rounds": args.rounds,
    }
    file = args.out / "bert_throughput.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    results[args.part] = about | parts[args.part](args)
    file.write_text(json.dumps(results, indent=2) + "\n")
    if "speed" in results:
        draw(file.with_suffix(".png"), results)
        for name, ratio in results["speed"]["ratio"].items():
            print(f"{name:40} {results['speed']['sequences_per_second'][name]:8.1f} {ratio:6.2f}")
    print(f"result: {file}")


if __name__ == "__main__":
    try:
        main(parse(Args, description=__doc__))
    except UserError as mistake:
        fail(mistake)
