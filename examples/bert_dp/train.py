"""bert_dp: sentiment of Chinese hotel reviews, the training loop written out, with `nn.DataParallel`.

python -m examples.bert_dp.train                                        # the reviews that come with it, seconds
python -m examples.bert_dp.train --csv ChnSentiCorp_htl_all.csv         # any csv with the columns label, review
python -m examples.bert_dp.train --csv FILE --vocab vocab.txt           # with the vocabulary of a real BERT
python -m examples.bert_dp.train --csv FILE --model bert-base-chinese   # fine-tune a pretrained one, local folder
CUDA_VISIBLE_DEVICES=0,2 python -m examples.bert_dp.train               # DataParallel over these two
torchrun --nproc-per-node 2 -m examples.bert_dp.train                   # one device per process
torchrun --nnodes 2 --nproc-per-node 1 --node-rank R --master-addr HOST0 -m examples.bert_dp.train
                                                                        # DataParallel in each of two nodes
"""

from dataclasses import dataclass
from functools import partial
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
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 32
    """GLOBAL batch size in reviews, divided by the ranks, and in each of them by DataParallel's devices."""
    log_step: Annotated[int, arg(metavar="STEPS")] = 100
    """Steps between lines of the log."""
    seed: int = 0
    """Seed of the split, the parameters and the order."""
    out: Path = Path("runs/bert_dp")
    """Folder for everything that the run writes."""
    resume: Annotated[str, arg(metavar="auto|PATH|no")] = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS")] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    text: OmitArgPrefixes[TextOptions] = TextOptions()
    launch: OmitArgPrefixes[Launch] = Launch()
    numbers: OmitArgPrefixes[Precision] = Precision(channels_last="no")

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, log_step=self.log_step)
        at_least(1, checkpoint_every=self.checkpoint_every)
        at_least(0, seed=self.seed)
        if self.numbers.channels_last != "no" or self.numbers.compile:
            raise UserError("--channels-last is for images, and --compile for inputs of one shape: leave them out here")


if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, workers start meanwhile
    args, place = begin(Args, __doc__, preload_also=SLOW)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, lr_scheduler
from torch.utils.data import DataLoader

from common.checkpoint import Checkpoints
from common.data import Shard, dealt, local_batch
from common.distributed import Stop, World, from_main, launch, taking_part
from common.metrics import evaluate
from common.proof import prove_replicas_agree, prove_seen_once
from common.report import Report
from common.seed import seed_everything
from examples.bert_dp.classifier import Classifier, data_parallel, local_devices, save
from examples.bert_dp.data import load_data
from examples.bert_dp.tokens import LengthSampler


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job: one per node with all its devices, or one per device."""
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        with Report("bert_dp", args.out, world, "reviews") as report:
            train(args, world, report)


def average_gradients(model: nn.Module) -> None:
    """Sum the gradients over the ranks, in one message; each rank has divided by the global batch already."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def train(args: Args, world: World, report: Report) -> None:
    """Train and evaluate; every rank runs this with its own share of the data."""
    epochs = args.epochs or (3 if args.text.csv else 20)
    local_batch(args.batch_size, world)
    numerics = args.numbers.on(world.device)
    seed_everything(args.seed, 0, args.numbers.deterministic)  # the same parameters on all ranks
    data = load_data(args.text, args.seed, world, report)
    seed_everything(args.seed, world.rank)  # but each its own dropout
    report.introduce(f"{data.model_name} on {data}", numerics, args.batch_size)

    model = numerics.prepare(Classifier(data.bert, numerics))
    devices = local_devices(world)
    parallel = data_parallel(model, devices)
    used = [f"cuda:{number}" for number in devices]
    report.log(f"DataParallel over {', '.join(used) or 'one device, the CPU: the model as it is'}")
    sampler = LengthSampler(data.train.lengths, args.batch_size, world, args.seed)
    # Generators of their own: a loader draws from the global one whenever it starts, and resuming would not be exact.
    pinned = world.device.type == "cuda"
    loader = DataLoader(
        data.train, batch_sampler=sampler, collate_fn=tuple, pin_memory=pinned, generator=torch.Generator()
    )
    shard = Shard(len(data.validation), world.rank, world.size)  # not shuffled
    size = 64 * max(1, len(devices))
    validation = DataLoader(data.validation, size, sampler=shard, collate_fn=tuple, generator=torch.Generator())

    steps = epochs * len(loader)
    optimizer = AdamW(
        model.parameters(), args.text.learning_rate, weight_decay=args.text.weight_decay, fused=True
    )  # Adam, with decay apart
    schedule = lr_scheduler.LambdaLR(optimizer, partial(args.text.factor, steps=steps))
    config = {"epochs": epochs, "batch_size": args.batch_size, "seed": args.seed} | data.identity | numerics.settings
    parts = {"model": data.bert, "optimizer": optimizer, "schedule": schedule}
    checkpoints = Checkpoints(args.out / "checkpoints", parts, config, world)
    start = checkpoints.load(args.resume)
    progress = start.progress if start else {"epoch": 0, "batch": 0, "step": 0, "best": -torch.inf, "metrics": {}}
    report.begin(progress["step"], start)

    with checkpoints, Stop() as stop:
        for epoch in range(progress["epoch"], epochs):
            sampler.set_epoch(epoch, progress["batch"])  # a new permutation, from the batch to go on with
            seen = sampler.seen()  # by the run that this one resumes
            name = f"epoch {epoch + 1}/{epochs}"
            for ids, labels, indices in report.steps(loader, name, len(loader), progress["batch"]):
                total = min(args.batch_size, len(data.train) - progress["batch"] * args.batch_size)
                mine = dealt(total, world)
                labels[mine:] = -100  # what this rank has beyond its share is padding
                # One sum per replica. Their mean would be the loss only if all replicas had as many reviews: of 5
                # reviews 4 devices get 2, 2, 1. Sums over the whole batch's size are right for any share.
                sums = parallel(ids.to(world.device), labels.to(world.device))  # [replicas]
                loss = sums.sum() / total
                optimizer.zero_grad()
                loss.backward()  # DataParallel adds the replicas' gradients up in the model
                average_gradients(model)
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                seen.index_add_(0, indices[:mine], torch.ones(mine, dtype=torch.int32))
                progress["batch"] += 1
                progress["step"] += 1
                report.loss(progress["step"], loss * world.size, total)
                if progress["step"] % args.log_step == 0:
                    report.progress(f"{name}, step {progress['step']}")
                signum = stop.agreed()
                if signum or progress["step"] % args.checkpoint_every == 0:
                    report.gather_losses()
                    checkpoints.save(progress)
                if signum:
                    raise Stopped(signum, f"checkpoint at step {progress['step']}; go on with --resume auto")

            report.gather_losses()
            prove_seen_once(seen)
            with report.evaluating():
                found = evaluate(parallel, validation, numerics, world, classes=2)
            progress |= {"epoch": epoch + 1, "batch": 0, "metrics": found.metrics}
            report.epoch(name, progress["step"], found)
            if found.metrics["accuracy"] > progress["best"]:
                progress["best"] = found.metrics["accuracy"]
                from_main(world, partial(save, args.out / "model", data.bert, data.tokenizer))
            checkpoints.save(progress)

    report.log(f"best model: {args.out / 'model'}, for from_pretrained and examples.bert_dp.predict")
    report.finish(
        **data.facts,
        epochs=epochs,
        steps=progress["step"],
        global_batch=args.batch_size,
        precision=numerics.name,
        metrics=progress["metrics"] | {"best_accuracy": progress["best"]},
        parameter_hash=prove_replicas_agree(data.bert, world),
    )


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
