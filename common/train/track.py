"""`--track`: what metrics.jsonl holds is sent to Weights & Biases or MLflow, too. Rank 0 does."""

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.train.curves import Point

AT_ONCE = 1000  # metrics that MLflow takes in one message


class Tracker:
    """A run at Weights & Biases or MLflow.

    A resumed run is a new one there, which begins with the curves of the one before. A tracker that
    fails is given up with a warning; the training goes on.

    Args:
        warn: says that it was given up.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.kind, self._warn = "no", warn
        self._run: Any = None

    def start(self, kind: str, name: str, arguments: Mapping[str, Any], folder: Path) -> None:
        """Start a run.

        Args:
            kind: `wandb` or `mlflow`; `no` does nothing.
            name: of the project: the program's.
            arguments: all flags.
            folder: where it keeps its files, and the results of a tracker without a server.
        """
        self.kind, starts = kind, {"wandb": Wandb, "mlflow": Mlflow}
        if kind in starts:
            self._try(lambda: setattr(self, "_run", starts[kind](name, arguments, folder)))

    def log(self, points: Sequence[Point]) -> None:
        """Send values by step."""
        if self._run is not None and points:
            self._try(lambda: self._run.log(points))

    def end(self, failed: bool) -> None:
        """Send what is left, and end the run."""
        if self._run is not None:
            self._try(lambda: self._run.end(failed))
        self._run = None

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # of a network, of a server, of an account: not of the training
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._warn(f"--track {self.kind} ends here ({reason}); metrics.jsonl has all values")
            self._run = None


class Wandb:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the run's folder."""

    def __init__(self, name: str, arguments: Mapping[str, Any], folder: Path) -> None:
        self._wandb: Any = importlib.import_module("wandb")  # 2 s, which only --track has to pay
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", name), config=dict(arguments), dir=str(folder)
        )

    def log(self, points: Sequence[Point]) -> None:
        """Send values by step."""
        for step, values in points:
            self._run.log(values, step=step)

    def end(self, failed: bool) -> None:
        """End the run, and the process that sends it."""
        self._run.finish(exit_code=int(failed))
        self._wandb.teardown()


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI, or in a database in the run's folder."""

    def __init__(self, name: str, arguments: Mapping[str, Any], folder: Path) -> None:
        mlflow: Any = importlib.import_module("mlflow")  # 3 s, which only --track has to pay
        where = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.absolute()}/mlflow.db")
        self._client, self._metric = mlflow.MlflowClient(where), mlflow.entities.Metric
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=str(folder)).info.run_id
        params = [mlflow.entities.Param(key, str(value)) for key, value in arguments.items()]
        self._client.log_batch(self._id, params=params)

    def log(self, points: Sequence[Point]) -> None:
        """Send values by step."""
        now = int(1000 * time.time())
        metrics = [
            self._metric(key, value, now, step)
            for step, values in points
            for key, value in values.items()
        ]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[start : start + AT_ONCE])

    def end(self, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
