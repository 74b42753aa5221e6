"""bert_dp: train on the same reviews by the Hugging Face `Trainer`, as its documentation has it.

The Trainer chooses the parallelism itself: DataParallel over the CUDA devices that one process
sees, DistributedDataParallel for several processes. `trainer_robust.py` is this program with exact
resuming, checked checkpoints, and a common last step after a signal.

    python -m examples.bert_dp.trainer                                       # the shipped reviews
    python -m examples.bert_dp.trainer --csv FILE --model bert-base-chinese  # a local folder
    CUDA_VISIBLE_DEVICES=0,1 python -m examples.bert_dp.trainer              # DataParallel
    torchrun --nproc-per-node 2 -m examples.bert_dp.trainer                  # DDP
"""

from typing import Any

import torch
import torch.distributed as dist
from sklearn.metrics import accuracy_score, f1_score
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, set_seed

from common.launch.args import start
from common.launch.place import Place
from common.launch.record import record
from common.launch.spawn import launch
from common.train.amp import MixedPrecision
from common.train.log import Log
from common.train.profile import Profile
from examples.bert_dp.args import TrainerArgs
from examples.bert_dp.data import load_data
from examples.bert_dp.trainer_setup import ProfileCallback, device_batch, join, samples


def main(place: Place, args: TrainerArgs) -> None:
    """Start a process per rank."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: TrainerArgs) -> None:
    """Become a rank and train."""
    train(args, join(local_rank, place))
    dist.destroy_process_group()


def compute_metrics(prediction: Any) -> dict[str, float]:
    """Accuracy and F1 of the whole validation set, from its logits [N, 2] and labels [N]."""
    logits, labels = prediction
    classes = logits.argmax(axis=1)
    f1 = f1_score(labels, classes, average="macro")
    return {"accuracy": float(accuracy_score(labels, classes)), "f1": float(f1)}


def training_arguments(
    args: TrainerArgs, device: torch.device, kind: Any = TrainingArguments, **more: Any
) -> TrainingArguments:
    """The Trainer's arguments; those that are not named have its defaults."""
    precision = MixedPrecision(args.amp, device).name
    return kind(
        output_dir=str(args.out / "checkpoints"),
        num_train_epochs=args.epochs or args.text.default_epochs,
        per_device_train_batch_size=device_batch(args.batch_size, device),
        per_device_eval_batch_size=args.eval_batch_size,
        logging_steps=args.logging_steps,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=args.save_total_limit,
        learning_rate=args.text.learning_rate,
        weight_decay=args.text.weight_decay,
        warmup_steps=args.text.warmup,  # below 1: a share of all steps
        metric_for_best_model="f1",
        load_best_model_at_end=True,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        ddp_find_unused_parameters=False,  # all are used: the search costs time, and warns
        # BERT's loss is a mean already: the Trainer would multiply it by the number of processes.
        average_tokens_across_devices=False,
        report_to="none",
        seed=args.seed,
        **more,
    )


def train(args: TrainerArgs, device: torch.device) -> None:
    """Train, evaluate after every epoch, keep the best model. Every rank calls this."""
    set_seed(args.seed)
    data = load_data(args.text, args.seed)
    trainer = Trainer(
        model=data.bert,
        args=training_arguments(args, device),
        train_dataset=samples(data.train),
        eval_dataset=samples(data.validation),
        data_collator=DataCollatorWithPadding(data.tokenizer),
        processing_class=data.tokenizer,
        compute_metrics=compute_metrics,
    )
    with Profile(args.watch.profile, Log(args.out, dist.get_rank() == 0), device) as profile:
        trainer.add_callback(ProfileCallback(trainer, profile))
        trainer.train()
    trainer.save_model(str(args.out / "model"))  # the best one, which has been loaded
    trainer.save_metrics("eval", trainer.evaluate())  # eval_results.json
    trainer.save_state()  # losses and metrics by step: trainer_state.json


if __name__ == "__main__":
    start(TrainerArgs, "examples.bert_dp.trainer:main")
