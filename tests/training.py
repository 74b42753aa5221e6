"""What a run of an example left behind."""

import json
from csv import DictReader
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Training:
    """Exit codes, output and files of a run of an example."""

    out: Path
    codes: list[int]
    texts: list[str] = field(repr=False)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.out / "result.json").read_text())

    def points(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [point["loss/train"] for point in self.points() if "loss/train" in point]

    def rows(self) -> list[dict[str, str]]:
        with (self.out / "predictions.csv").open(newline="") as file:
            return list(DictReader(file))

    def checkpoint(self) -> dict[str, Any]:
        import torch

        newest = max((self.out / "checkpoints").glob("step-*.pt"))
        return torch.load(newest, map_location="cpu", weights_only=True)

    def done(self) -> "Training":
        """Return this training if all ranks exited with 0."""
        assert not any(self.codes), f"{self.codes}\n{self.text}"
        return self
