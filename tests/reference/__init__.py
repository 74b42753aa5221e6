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

import tyro
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
