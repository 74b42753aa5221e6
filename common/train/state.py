"""Where a run is, and what a program tells `Run` beside its flags."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.launch.errors import UserError


@dataclass
class TrainState:
    """Where a run is: what a checkpoint holds beside the named parts."""

    epoch: int = 0
    batch: int = 0  # in this epoch: global batches that are done
    step: int = 0  # in all epochs
    losses: tuple[float, int] = (0.0, 0)  # of this epoch's steps: sum and count
    seen: list[int] = field(default_factory=list)  # of its samples: sums, if there are very many
    best: dict[str, float] = field(default_factory=dict)  # the best value of the metric chosen
    metrics: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)  # of the program
    starts: int = 1  # of this run, as far as they came to a checkpoint
    evaluated: int = -1  # the step after which the last evaluation was

    @classmethod
    def resumed(cls, progress: Mapping[str, Any]) -> "TrainState":
        """The state that a checkpoint holds, at another start."""
        state = cls(**{"evaluated": progress["step"], **progress})  # not in older checkpoints
        state.starts += 1
        return state

    def improved(self, metric: str, smaller_is_better: bool) -> bool:
        """Whether a metric is better than ever before in this run; then it is the best from now on.

        Raises:
            UserError: there is no such metric.
        """
        if metric not in self.metrics:
            known = ", ".join(self.metrics)
            raise UserError(
                f"end_epoch(best={metric!r}): the metrics are {known}; name one of them"
            )
        value, before = self.metrics[metric], self.best.get(metric)
        better = before is None or (value < before if smaller_is_better else value > before)
        if better:
            self.best = {metric: value}
        return better


@dataclass(frozen=True)
class Options:
    """What a program may tell `Run` beside its flags."""

    what: str | None = None
    """The greeting's words about the task, instead of `str(data)`."""
    batch_size: int | None = None
    """Samples in the GLOBAL batch, instead of `args.batch_size`."""
    shares: str | None = None
    """How the batch is divided, in words; by default equally among the ranks."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values that flags came to; resuming compares them instead of the flags."""
    shard: tuple[int, int] | None = None
    """Which shard of each batch this rank trains on, of how many; by default rank, world size."""
    counts: bool = True
    """Whether this rank's samples count in the check that each is seen once."""
    save_before_evaluation: bool = False
    """Save a checkpoint before an evaluation that takes long, too."""
    unit: str = "images"
    """What samples are, for lines about speed."""
