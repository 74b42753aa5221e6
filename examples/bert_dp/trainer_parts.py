"""What the Trainer is given: data, loss, metrics, and a callback that reports and stops."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalPrediction

from common.distributed import Stop, World, from_main, settle
from common.metrics import Evaluation, classification_metrics
from common.report import Report
from examples.bert_dp.tokens import Encoded
from examples.bert_dp.trainer_checkpoints import seal


def dataset(encoded: Encoded) -> Any:
    """Tokenised reviews as the Trainer takes them; `DataCollatorWithPadding` pads each batch to its longest."""
    ends = zip(encoded.starts[:-1].tolist(), encoded.starts[1:].tolist(), encoded.labels.tolist(), strict=True)
    return [{"input_ids": encoded.ids[start:end].tolist(), "labels": label} for start, end, label in ends]


def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean over a process's batch, from logits that DataParallel has gathered.

    BERT's own loss will not do. Under DataParallel it is one mean per device, and the Trainer takes the mean of those,
    whatever their shares. Under DistributedDataParallel the Trainer multiplies it by the number of processes, because
    it takes BERT for a model that divides by `num_items_in_batch`; that changes what gradient clipping does.
    """
    return F.cross_entropy(outputs["logits"].float(), labels)


def evaluation(logits: Tensor, targets: Tensor) -> Evaluation:
    """Metrics and loss of logits [N, 2] in dataset order, as in train.py."""
    metrics = classification_metrics(logits.argsort(descending=True), targets, 2, logits.softmax(dim=1))
    return Evaluation(metrics, F.cross_entropy(logits.double(), targets).item(), targets, logits.argmax(dim=1))


def compute_metrics(found: EvalPrediction) -> dict[str, float]:
    """Accuracy, precision, recall, F1 and AUC of the whole validation set, for the Trainer."""
    metrics = evaluation(torch.as_tensor(found.predictions).float(), torch.as_tensor(found.label_ids)).metrics
    return {name: value for name, value in metrics.items() if value is not None}


class Logits(nn.Module):
    """A BERT, wrapped or not, as `settle` calls a model: token numbers [N, L] in, logits [N, 2] out."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor) -> Tensor:
        """The logits."""
        return self.bert(input_ids=ids)["logits"]


class Telling(TrainerCallback):
    """Passes on what the Trainer does: to the report; and to the Trainer, on which step all ranks stop."""

    def __init__(self, trainer: Trainer, report: Report, stop: Stop, config: dict[str, Any], world: World) -> None:
        self.trainer, self.report, self.stop, self.config, self.world = trainer, report, stop, config, world
        self.signum = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have a resumed run add up in the order of an uninterrupted one, with 3 and more ranks, too."""
        if isinstance(self.trainer.model_wrapped, DistributedDataParallel):
            settle(Logits(self.trainer.model_wrapped), torch.ones(1, 2, dtype=torch.long, device=args.device))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """The mean loss of the last steps."""
        if logs and "loss" in logs:
            self.report.scalars(state.global_step, {"loss/train": float(logs["loss"])})
            self.report.log(f"step {state.global_step}/{state.max_steps}: loss {float(logs['loss']):.4f}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """The metrics of an epoch."""
        known = {name: metrics[f"eval_{name}"] for name in ("loss", "accuracy", "f1") if f"eval_{name}" in metrics}
        self.report.seconds["eval"] += metrics["eval_runtime"]
        self.report.scalars(state.global_step, {f"test/{name}": value for name, value in known.items()})
        self.report.log(f"epoch {state.epoch:g}: " + ", ".join(f"test {name} {v:.4f}" for name, v in known.items()))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After a signal: save, stop; after an epoch's last step, when the epoch has been evaluated and saved."""
        self.report.passed(state.global_step)
        self.signum = self.signum or self.stop.agreed()
        if self.signum:
            control.should_training_stop = True
            control.should_save = not state.epoch.is_integer()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A run that stops in the middle of an epoch has saved already, and does not evaluate."""
        if self.signum and not state.epoch.is_integer():
            control.should_save = control.should_evaluate = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer's checkpoints are not written atomically: mark the ones that are whole."""
        self.report.write()  # what a resumed run goes on from
        dist.barrier()  # each rank has written its random state
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        from_main(self.world, lambda: seal(folder, self.config, self.world.size))
