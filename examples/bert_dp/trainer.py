"""bert_dp: the same task by the Hugging Face `Trainer`, which chooses the kind of data parallelism itself.

One process uses DataParallel over the CUDA devices that it sees; several processes use DistributedDataParallel.

    python -m examples.bert_dp.trainer                                      # the reviews that come with it
    python -m examples.bert_dp.trainer --csv FILE --model bert-base-chinese # fine-tune a pretrained one, local folder
    CUDA_VISIBLE_DEVICES=0,1 python -m examples.bert_dp.trainer             # DataParallel over two devices
    torchrun --nproc-per-node 2 -m examples.bert_dp.trainer                 # DistributedDataParallel
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from common.errors import Stopped, UserError
from common.flags import at_least, begin, leave
from common.launcher import Launch, Place
from common.precision import Precision
from examples.bert_dp.options import SLOW, TextOptions


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    epochs: Annotated[int | None, arg(metavar="N")] = None
    """Passes over the training reviews (default: 20 for those that come with the example, else 3)."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 64
    """GLOBAL batch size in reviews, divided by all devices (the Trainer's own flag is per device)."""
    eval_batch_size: Annotated[int, arg(metavar="N")] = 128
    """Reviews at once on a device in evaluation."""
    logging_steps: Annotated[int, arg(metavar="STEPS")] = 10
    """Steps between lines of the log."""
    save_total_limit: Annotated[int, arg(metavar="N")] = 3
    """Checkpoints that stay."""
    seed: int = 0
    """Seed of the split, the parameters and the order."""
    out: Path = Path("runs/bert_dp_trainer")
    """Folder for everything that the run writes."""
    resume: Annotated[str, arg(metavar="auto|PATH|no")] = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    text: OmitArgPrefixes[TextOptions] = TextOptions()
    launch: OmitArgPrefixes[Launch] = Launch()
    numbers: OmitArgPrefixes[Precision] = Precision(channels_last="no")

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, eval_batch_size=self.eval_batch_size)
        at_least(1, logging_steps=self.logging_steps)
        at_least(3, save_total_limit=self.save_total_limit)  # the best, the last, and the one that is being written
        at_least(0, seed=self.seed)
        if self.numbers.channels_last != "no" or self.numbers.compile:
            raise UserError("--channels-last is for images, and --compile for inputs of one shape: leave them out here")
        if self.launch.gpu is not None:
            raise UserError(f"--gpu {self.launch.gpu}: the Trainer takes the devices of CUDA_VISIBLE_DEVICES")


if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, workers start meanwhile
    args, place = begin(Args, __doc__, preload_also=(*SLOW, "transformers.trainer"))

import os
import time

import torch
import torch.distributed as dist
from transformers.data.data_collator import DataCollatorWithPadding
from transformers.trainer import Trainer
from transformers.trainer_callback import PrinterCallback
from transformers.training_args import TrainingArguments

from common.data import local_batch
from common.distributed import Stop, World, from_main, launch, taking_part
from common.precision import Numerics
from common.proof import prove_replicas_agree
from common.report import Report
from common.seed import seed_everything
from examples.bert_dp.classifier import save
from examples.bert_dp.data import load_data
from examples.bert_dp.trainer_checkpoints import check_best, choose, in_one_line
from examples.bert_dp.trainer_parts import Telling, compute_metrics, dataset, evaluation, mean_loss


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job; the Trainer finds the group that is already there, and its place in the environment."""
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        if world.size > 1:  # what torchrun sets; alone, the Trainer must find nothing, or it would not use DataParallel
            ranks = {"RANK": world.rank, "LOCAL_RANK": world.local_rank}
            sizes = {"WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": place.local_size}
            os.environ |= {name: str(value) for name, value in (ranks | sizes).items()}
            os.environ |= {"MASTER_ADDR": place.host, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        with Report("bert_dp_trainer", args.out, world, "reviews") as report:
            train(args, world, report)


class Arguments(TrainingArguments):
    """On a CPU, "cpu": accelerate says "cpu:1" on rank 1, where torch 2.11 cannot load what a resume reads."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device("cpu") if super().device.type == "cpu" else super().device


def arguments(args: Args, world: World, numerics: Numerics, epochs: int) -> TrainingArguments:
    """What the Trainer is told; all else is its default."""
    told = Arguments(
        output_dir=str(args.out / "checkpoints"),
        num_train_epochs=epochs,
        per_device_train_batch_size=local_batch(args.batch_size, world),
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
        bf16=numerics.name == "bf16",
        use_cpu=world.device.type == "cpu",
        ddp_backend="gloo" if world.device.type == "cpu" else None,
        ddp_find_unused_parameters=False,  # all are used: looking for others costs time, and a warning of each rank
        dataloader_pin_memory=world.device.type == "cuda",
        average_tokens_across_devices=False,  # see `mean_loss`
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
    )
    devices = max(1, told.n_gpu)  # of this process, as the Trainer has counted them
    if told.per_device_train_batch_size % devices:
        shares = f"{world.size} process(es) x {devices} devices"
        raise UserError(f"--batch-size {args.batch_size} (global) cannot be divided by {shares}")
    told.per_device_train_batch_size //= devices
    return told


def train(args: Args, world: World, report: Report) -> None:
    """Train, evaluate after every epoch, keep the best model."""
    epochs = args.epochs or (3 if args.text.csv else 20)
    numerics = args.numbers.on(world.device)
    told = arguments(args, world, numerics, epochs)
    seed_everything(args.seed, 0, args.numbers.deterministic)  # the same parameters on all ranks
    data = load_data(args.text, args.seed, world, report)
    report.introduce(f"{data.model_name} on {data}", numerics, args.batch_size)
    report.log(
        f"the Trainer's kind of parallelism: {told.parallel_mode.value}, {max(1, told.n_gpu)} device(s) per process"
    )
    config = {"epochs": epochs, "batch_size": args.batch_size, "seed": args.seed} | data.identity | numerics.settings
    start = choose(args.out / "checkpoints", args.resume, config, world)
    report.begin(start.step if start else 0, start)
    report.seconds["startup"] = time.time() - world.place.started
    with Stop() as stop, in_one_line(args.out / "checkpoints", start, data.bert):
        trainer = Trainer(
            model=data.bert,
            args=told,
            train_dataset=dataset(data.train),
            eval_dataset=dataset(data.validation),
            data_collator=DataCollatorWithPadding(data.tokenizer),
            processing_class=data.tokenizer,
            compute_loss_func=mean_loss,
            compute_metrics=compute_metrics,
        )
        telling = Telling(trainer, report, stop, config, world)
        trainer.add_callback(telling)
        trainer.remove_callback(PrinterCallback)
        output = trainer.train(resume_from_checkpoint=str(start.path) if start else None)
    if telling.signum:
        raise Stopped(telling.signum, f"checkpoint at step {output.global_step}; go on with --resume auto")
    from_main(world, lambda: check_best(trainer.state.best_model_checkpoint))  # which has been loaded
    report.seconds["train"] = output.metrics["train_runtime"] - report.seconds["eval"]

    logits = torch.as_tensor(trainer.predict(dataset(data.validation)).predictions)  # of the best model
    found = evaluation(logits.float(), data.validation.labels)
    report.epoch("best model", output.global_step, found, record=False)
    from_main(world, lambda: save(args.out / "model", data.bert, data.tokenizer))
    report.log(f"best model: {args.out / 'model'}, for from_pretrained and examples.bert_dp.predict")
    report.finish(
        **data.facts,
        epochs=epochs,
        steps=output.global_step,
        global_batch=args.batch_size,
        precision=numerics.name,
        metrics=found.metrics | {"best_f1": trainer.state.best_metric},
        samples_per_second=output.metrics["train_samples_per_second"],
        parallel_mode=told.parallel_mode.value,
        parameter_hash=prove_replicas_agree(data.bert, world),
    )


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
