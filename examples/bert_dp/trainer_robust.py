"""bert_dp: train by the Hugging Face `Trainer` of `trainer.py`, made to survive interruptions.

It adds: resuming that gives the same bits, checkpoints that are checked before they are used, a
common last step of all ranks after a signal, a loss that is right for unequal shares of a batch,
and the results of `train.py`: result.json, curves, predictions.

    python -m examples.bert_dp.trainer_robust
    python -m examples.bert_dp.trainer_robust --csv FILE --model bert-base-chinese --resume auto
    CUDA_VISIBLE_DEVICES=0,1 python -m examples.bert_dp.trainer_robust     # DataParallel
    torchrun --nproc-per-node 2 -m examples.bert_dp.trainer_robust         # DDP
"""

import time

import torch
import torch.distributed as dist
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from common.launch.args import start
from common.launch.collectives import broadcast_object
from common.launch.errors import Stopped
from common.launch.place import Place, current
from common.launch.record import record
from common.launch.spawn import launch
from common.train.checks import check_replicas
from common.train.stop import Stop
from examples.bert_dp.args import RobustTrainerArgs
from examples.bert_dp.data import load_data
from examples.bert_dp.model import save
from examples.bert_dp.trainer import training_arguments
from examples.bert_dp.trainer_checkpoints import check_best, choose, errors_in_one_line
from examples.bert_dp.trainer_parts import (
    ReportCallback,
    TrainerRun,
    compute_metrics,
    evaluation,
    mean_loss,
)
from examples.bert_dp.trainer_setup import ProfileCallback, join, samples


def main(place: Place, args: RobustTrainerArgs) -> None:
    """Start a process per rank."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: RobustTrainerArgs) -> None:
    """Become a rank and train."""
    train(args, join(local_rank, place))
    dist.destroy_process_group()


class RobustTrainingArguments(TrainingArguments):
    """With the device "cpu" on a CPU: accelerate says "cpu:1" on rank 1.

    torch 2.11 cannot load to such a device what a resumed run reads.
    """

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device


def train(args: RobustTrainerArgs, device: torch.device) -> None:
    """Train, evaluate after every epoch, keep the best model. Every rank calls this."""
    epochs = args.epochs or args.text.default_epochs
    checkpoints = args.out / "checkpoints"
    torch.manual_seed(args.seed)  # the same parameters on all ranks
    data = load_data(args.text, args.seed)
    settings = {"epochs": epochs, **args.text.chosen}
    with TrainerRun(args, device, data, settings=settings, unit="reviews") as run:
        training_args = training_arguments(
            args,
            device,
            RobustTrainingArguments,
            ddp_backend="gloo" if device.type == "cpu" else None,
            log_level="error",
            disable_tqdm=True,
        )
        mode, devices = training_args.parallel_mode.value, max(1, training_args.n_gpu)
        run.print0(f"the Trainer's parallelism: {mode}, {devices} device(s) per process")
        found = choose(checkpoints, args.resume, run.config)
        run.begin(found, epochs)
        run.meters.seconds["startup"] = time.time() - current().started
        with Stop() as stop, errors_in_one_line(checkpoints, found, data.bert):
            trainer = Trainer(
                model=data.bert,
                args=training_args,
                train_dataset=samples(data.train),
                eval_dataset=samples(data.validation),
                data_collator=DataCollatorWithPadding(data.tokenizer),
                processing_class=data.tokenizer,
                compute_loss_func=mean_loss,
                compute_metrics=compute_metrics,
            )
            callback = ReportCallback(trainer, run, stop)
            trainer.add_callback(callback)
            trainer.add_callback(ProfileCallback(trainer, run.profile))
            trainer.remove_callback(PrinterCallback)
            with run.profile:
                output = trainer.train(resume_from_checkpoint=str(found.path) if found else None)
        if callback.signum:
            where = f"checkpoint at step {output.global_step}; go on with --resume auto"
            raise Stopped(callback.signum, where)
        best = trainer.state.best_model_checkpoint  # which has been loaded
        broadcast_object(lambda: check_best(best))
        seconds = run.meters.seconds
        runtime = output.metrics["train_runtime"]  # of the whole call, with evaluation and saving
        trained = output.metrics["train_samples_per_second"] * runtime
        seconds["train"] = runtime - seconds["eval"]

        logits = torch.as_tensor(trainer.predict(samples(data.validation)).predictions)
        run.show_best(evaluation(logits.float(), data.validation.labels), trainer.state.best_metric)
        broadcast_object(lambda: save(args.out / "model", data.bert, data.tokenizer))
        run.print0(f"best model: {args.out / 'model'}, for from_pretrained and predict.py")
        run.finish(
            samples_per_second=round(trained / seconds["train"], 1),
            parallel_mode=mode,
            parameter_hash=check_replicas(data.bert),
        )


if __name__ == "__main__":
    start(RobustTrainerArgs, "examples.bert_dp.trainer_robust:main")
