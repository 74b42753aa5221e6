"""What the robust Trainer is given: loss, metrics, and a callback that reports and stops."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalPrediction

from common.launch.collectives import broadcast_object
from common.train.checkpoint import Checkpoint
from common.train.ddp import warm_up_buckets
from common.train.evaluate import Evaluation, classification_metrics
from common.train.run import Run
from common.train.stop import Stop
from common.train.summary import write_predictions
from examples.bert_dp.trainer_checkpoints import seal


def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean over a process's batch, from logits that DataParallel has gathered.

    BERT's own loss is another. Under DataParallel it is one mean per device, and the Trainer takes
    the mean of those, whatever their shares. Under DistributedDataParallel the Trainer multiplies
    it by the number of processes, because it takes BERT for a model that divides by
    `num_items_in_batch`; that changes what gradient clipping does.
    """
    return F.cross_entropy(outputs["logits"].float(), labels)


def evaluation(logits: Tensor, targets: Tensor) -> Evaluation:
    """Metrics and loss of logits [N, 2] for labels [N] in dataset order, as in `train.py`."""
    top, scores = logits.argsort(descending=True), logits.softmax(dim=1)
    metrics = classification_metrics(top, targets, 2, scores)
    loss = F.cross_entropy(logits.double(), targets).item()
    return Evaluation(metrics, loss, targets, logits.argmax(dim=1))


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, precision, recall, F1 and AUC of the whole validation set, for the Trainer."""
    logits = torch.as_tensor(prediction.predictions).float()
    metrics = evaluation(logits, torch.as_tensor(prediction.label_ids)).metrics
    return {name: value for name, value in metrics.items() if value is not None}


class TrainerRun(Run):
    """The greeting, log and result of a `Run`, around a loop that the Trainer owns."""

    def begin(self, start: Checkpoint | None, epochs: int) -> None:
        """Start the curves, or go on with those of the run that is resumed.

        Args:
            start: the checkpoint that the Trainer resumes from.
            epochs: of the whole run.
        """
        self.num_epochs = epochs
        if start:
            self.state.step = start.step
            self.print0(f"resumed from {start.path} at step {start.step}")
        self._log.start(self.state.step, resumed=start is not None)

    def write(self) -> None:
        """Write the curves so far: a resumed run continues them."""
        self._log.write_lines()
        self._log.write_events()

    def show_best(self, best: Evaluation, f1: float | None) -> None:
        """Show the best model's metrics and write its predictions; the curves have them already."""
        self.state.metrics = best.metrics
        self.state.best = {} if f1 is None else {"f1": f1}
        known = {name: value for name, value in best.metrics.items() if value is not None}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in known.items())
        self.print0(f"best model: test loss {best.loss:.4f}, {shown}")
        if dist.get_rank() == 0:
            write_predictions(self, best)


class ReportCallback(TrainerCallback):
    """Forwards the Trainer's events to the report, and stops all ranks after the same step."""

    def __init__(self, trainer: Trainer, run: TrainerRun, stop: Stop) -> None:
        self.trainer, self.run, self.stop = trainer, run, stop
        self.signum = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let a resumed run add gradients in the order of an uninterrupted one."""
        if isinstance(self.trainer.model_wrapped, DistributedDataParallel):
            warm_up_buckets(self.trainer.model_wrapped)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Report the mean loss of the last steps."""
        if logs and "loss" in logs:
            loss = float(logs["loss"])
            self.run.scalars(state.global_step, {"loss/train": loss})
            self.run.print0(f"step {state.global_step}/{state.max_steps}: loss {loss:.4f}")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Report the metrics of an epoch."""
        names = ("loss", "accuracy", "f1")
        known = {name: metrics[f"eval_{name}"] for name in names if f"eval_{name}" in metrics}
        self.run.meters.seconds["eval"] += metrics["eval_runtime"]
        names = {"loss": "loss/test"} | {name: f"test/{name}" for name in known if name != "loss"}
        self.run.scalars(state.global_step, {names[name]: v for name, v in known.items()})
        shown = ", ".join(f"test {name} {value:.4f}" for name, value in known.items())
        self.run.print0(f"epoch {state.epoch:g}: {shown}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After a signal, save and stop; after an epoch's last step, when it has been evaluated."""
        self.run.state.step = state.global_step
        self.signum = self.signum or self.stop.agreed()
        if self.signum:
            control.should_training_stop = True
            control.should_save = not state.epoch.is_integer()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let a run that stops in the middle of an epoch, and has saved, not evaluate."""
        if self.signum and not state.epoch.is_integer():
            control.should_save = control.should_evaluate = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seal the checkpoint, which the Trainer does not write atomically."""
        self.run.write()
        dist.barrier()  # each rank has written its random state
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        ranks = {"world_size": dist.get_world_size(), "threads": torch.get_num_threads()}
        broadcast_object(lambda: seal(folder, self.run.config, ranks))
