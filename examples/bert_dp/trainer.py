"""bert_dp with the Hugging Face Trainer.

    python -m examples.bert_dp.trainer
    python -m examples.bert_dp.trainer --csv FILE --model bert-base-chinese --epochs 3
    CUDA_VISIBLE_DEVICES=0,2 python -m examples.bert_dp.trainer
    torchrun --nproc-per-node 2 -m examples.bert_dp.trainer

The Trainer uses DataParallel in a single process, and DistributedDataParallel under torchrun.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after init_process_group, it keeps gloo's threads alive
import tyro
from sklearn.metrics import accuracy_score, f1_score
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from common.launch import expand_home, one_line_errors

from .args import TextArgs
from .data import Reviews, split
from .model import build


@dataclass(frozen=True)
class Args(TextArgs):
    """Classify hotel reviews with the Hugging Face Trainer."""

    epochs: int = 16
    """Passes over the training reviews; a pretrained BERT needs 3."""
    seed: int = 0
    """Seed for the split, the parameters and the sample order."""
    out: Path = Path("runs/bert_dp_trainer")
    """Folder for checkpoints and the best model."""
    resume: bool = False
    """Continue from the newest checkpoint in --out."""


def compute_metrics(prediction: Any) -> dict[str, float]:
    """Return the accuracy and F1 score for logits [N, 2] and labels [N]."""
    logits, labels = prediction
    classes = logits.argmax(axis=1)
    return {"accuracy": accuracy_score(labels, classes), "f1": f1_score(labels, classes)}


def train(args: Args) -> None:
    """Train, evaluate after each epoch, and keep the best model."""
    reviews = Reviews(args.csv)
    train_set, validation_set = split(reviews, args.seed)
    set_seed(args.seed)
    bert, tokenizer = build(args.model, [text for text, _ in train_set], args.max_length)
    limit = {"truncation": True, "max_length": args.max_length}
    tokenized = [
        [{**tokenizer(text, **limit), "label": label} for text, label in part]
        for part in (train_set, validation_set)
    ]
    cuda, checkpoints = torch.cuda.is_available(), args.out / "checkpoints"
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=128,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=3,
        learning_rate=args.peak_lr,
        weight_decay=0.01,
        metric_for_best_model="f1",
        load_best_model_at_end=True,
        use_cpu=not cuda,  # otherwise, CPU processes would not join a process group
        dataloader_pin_memory=cuda,
        ddp_find_unused_parameters=False,  # all parameters are used; a search would only take time
        average_tokens_across_devices=False,  # otherwise, the loss is scaled by the world size
        report_to="none",
        seed=args.seed,
    )
    trainer = Trainer(
        bert,
        arguments,
        DataCollatorWithPadding(tokenizer),
        *tokenized,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    if trainer.is_world_process_zero():
        print(f"{reviews.about}; {arguments.world_size} process(es), {arguments.n_gpu} GPU(s) each")
    resume = args.resume and checkpoints.exists()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(checkpoints)) if resume else None)
    trainer.save_model(str(args.out / "model"))  # train() has loaded the best checkpoint
    trainer.save_metrics("eval", trainer.evaluate())
    if dist.is_initialized():  # under torchrun
        dist.destroy_process_group()  # gloo's threads could abort a process that exits


if __name__ == "__main__":
    with one_line_errors():
        train(expand_home(tyro.cli(Args)))
