"""One plain training loop per example, without distributed code and without `common.run`.

A module `tests/reference/NAME.py` is the specification of `examples/NAME`. It defines

    CASES: list[list[str]]                  # flags of small, awkward trainings
    def train(flags: list[str]) -> Reference

and may define

    def prepare(folder: Path) -> None       # write data; `{data}` in a flag becomes that folder
    RANKS = (1, 2, 3, 4)                    # default: those of them that divide the batch;
                                            # 4 ranks run as 2 nodes x 2
    TOLERANCE = 1e-3                        # of the final parameters

`tests/test_parity.py` runs all cases; `tests/test_resume.py` and `tests/test_launchers.py` run the
first one, which should have two epochs or more. The harness adds `--nproc`, `--out`,
`--device cpu` and `--precision fp32`; `train` gets the flags without these. A reference runs in a
process of its own with one thread, so it may set seeds and global state.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from sklearn.datasets import load_digits
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Result of a plain loop."""

    losses: list[float]
    """Mean loss of the global batch, one per step: `loss/train` of metrics.jsonl."""
    state: Mapping[str, Tensor]
    """Final state of the part `model` (empty: not compared)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics after the last epoch; those missing here are not compared."""
    predictions: list[int] | None = None
    """Predicted classes in dataset order: column `prediction` of predictions.csv."""


def digits() -> list[Tensor]:
    """Return images from 0 to 1 and labels to train on, then those to test on: every fifth."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels * 255 / 16).round().float().view(-1, 1, 8, 8) / 255
    test, targets = torch.arange(len(labels)) % 5 == 0, torch.tensor(labels)
    return [images[~test], targets[~test], images[test], targets[test]]


def normalized(images: list[Tensor]) -> list[Tensor]:
    """Return training and test images with the mean 0 and the deviation 1 in training."""
    return [(part - images[0].mean()) / images[0].std() for part in images]


def batches(samples: int, batch_size: int, seed: int) -> Tensor:
    """Return the samples of each whole batch of a permutation, [steps, batch_size]."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    steps = samples // batch_size
    return order[: steps * batch_size].view(steps, batch_size)


def judged(logits: Tensor, labels: Tensor) -> tuple[dict[str, float], list[int]]:
    """Return loss and accuracy, top5 for more than 10 classes, and the predicted classes."""
    top = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    metrics = {"loss": F.cross_entropy(logits, labels).item()}
    metrics["accuracy"] = top[:, 0].double().mean().item()
    if logits.shape[1] > 10:
        metrics["top5"] = top.any(1).double().mean().item()
    return metrics, logits.argmax(1).tolist()


@dataclass(frozen=True)
class Case:
    """A training that a reference module describes."""

    example: str
    number: int

    def __str__(self) -> str:
        return f"{self.example}-{self.number}"

    @property
    def module(self) -> Any:
        return importlib.import_module(f"tests.reference.{self.example}")

    def flags(self, folder: Path) -> list[str]:
        """Return the flags, with data in `folder` if they need any."""
        flags = self.module.CASES[self.number]
        if any("{data}" in flag for flag in flags) and not folder.exists():
            folder.mkdir(parents=True)
            self.module.prepare(folder)
        return [flag.replace("{data}", str(folder)) for flag in flags]

    @property
    def tolerance(self) -> float:
        return getattr(self.module, "TOLERANCE", 1e-3)

    def ranks(self, parity: bool = True) -> list[int]:
        """Return the numbers of ranks to compare; without parity also those with other results."""
        args_class = importlib.import_module(f"examples.{self.example}.args").Args
        batch_size = tyro.cli(args_class, args=self.module.CASES[self.number]).batch_size
        divisors = [n for n in (1, 2, 3, 4) if batch_size % n == 0]
        given = list(getattr(self.module, "RANKS", divisors))
        return given if parity else sorted({*given, *divisors})

    def train(self, folder: Path) -> Reference:
        """Run the plain loop."""
        return self.module.train(self.flags(folder))


def cases() -> list[Case]:
    """Return all cases of all reference modules."""
    found = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    firsts = [Case(example, 0) for example in found]
    return [Case(c.example, n) for c in firsts for n in range(len(c.module.CASES))]
