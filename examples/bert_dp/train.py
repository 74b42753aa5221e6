"""bert_dp: train BERT on Chinese hotel reviews with `nn.DataParallel`, the loop written out.

    python -m examples.bert_dp                                        # the shipped reviews, seconds
    python -m examples.bert_dp --csv ChnSentiCorp_htl_all.csv         # columns: label, review
    python -m examples.bert_dp --csv FILE --vocab vocab.txt           # a real BERT's vocabulary
    python -m examples.bert_dp --csv FILE --model bert-base-chinese   # fine-tune a local folder
    CUDA_VISIBLE_DEVICES=0,2 python -m examples.bert_dp               # DataParallel over these two
    python -m examples.bert_dp --replicas 2                           # DataParallel on a CPU
    torchrun --nproc-per-node 2 -m examples.bert_dp                   # one device per process
    torchrun --nnodes 2 --node-rank R --master-addr HOST0 -m examples.bert_dp
                                                      # DataParallel in each of two nodes

With any number of devices and processes, the training is the same up to rounding.
"""

import runpy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from common.data.samplers import Shard
from common.launch.collectives import all_reduce_mean
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.evaluate import evaluate
from common.train.replicas import Replicas
from common.train.run import Run
from examples.bert_dp.args import Args
from examples.bert_dp.classifier import Classifier, in_words, local_devices
from examples.bert_dp.data import load_data
from examples.bert_dp.fast_bert import FastClassifier
from examples.bert_dp.model import save
from examples.bert_dp.tokens import LengthSampler

PADDING = -100  # a label that cross_entropy ignores


def main(place: Place, args: Args) -> None:
    """Start a process per rank: one per node with all its devices, or one per device."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """Become a rank and train."""
    place.export(local_rank)  # RANK, LOCAL_RANK, WORLD_SIZE, ... as torchrun sets them
    device, backend = choose_device(args.launch, local_rank)
    bound = device if device.type == "cuda" else None  # nccl connects now, not in the first step
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience, device_id=bound)
    train(args, device)
    dist.destroy_process_group()


def train(args: Args, device: torch.device) -> None:
    """Train and evaluate. Every rank calls this; each has its own share of every batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)  # the same parameters on all ranks: nobody broadcasts them
    data = load_data(args.text, args.seed)
    torch.manual_seed(args.seed + rank)  # but each its own dropout

    epochs = args.epochs or args.text.default_epochs
    settings = {"epochs": epochs, **args.text.chosen}
    with Run(args, device, data, settings=settings, unit="reviews") as run:
        kind = FastClassifier if args.fast else Classifier
        mask = (args.mask, data.tokenizer.mask_token_id)
        model = run.prepare(kind(data.bert, run.autocast, *mask))
        devices = local_devices(args.launch, device, args.replicas)
        run.print0(in_words(devices, args.batch_size // world_size))
        wrap = nn.DataParallel if device.type == "cuda" else Replicas  # torch's needs CUDA
        parallel = wrap(model, devices) if devices else model

        sampler = LengthSampler(data.train.lengths, args.batch_size, args.seed)
        loader = DataLoader(
            data.train, batch_sampler=sampler, collate_fn=tuple, pin_memory=device.type == "cuda"
        )
        shard = Shard(len(data.validation))  # this rank's reviews, not shuffled
        size = 64 * max(1, len(devices))
        validation = DataLoader(data.validation, size, sampler=shard, collate_fn=tuple)

        steps, lr = epochs * len(loader), args.text.learning_rate
        decay = args.text.weight_decay
        optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=decay, fused=True)
        scheduler = LambdaLR(optimizer, partial(args.text.factor, steps=steps))
        run.resume(model=data.bert, optimizer=optimizer, scheduler=scheduler)
        save_best = partial(save, args.out / "model", data.bert, data.tokenizer)

        for epoch in run.epochs(epochs):
            sampler.set_epoch(epoch)  # without this, every epoch has the same order
            for ids, labels in run.steps(loader):  # [B, L], [B]
                batch_samples, local_samples = run.batch_share()
                labels[local_samples:] = PADDING
                # One sum per replica. The mean of the replicas' means would be another loss where
                # their shares differ: of 5 reviews, 4 devices get 2, 2 and 1.
                ids, labels = (x.to(device, non_blocking=True) for x in (ids, labels))
                sums = parallel(ids, labels)  # [replicas]
                loss = sums.sum() * world_size / batch_samples  # averaged over the ranks below
                optimizer.zero_grad()
                run.scaler.scale(loss).backward()  # adds up the gradients of the replicas
                # DistributedDataParallel cannot wrap a DataParallel: the ranks average by hand.
                all_reduce_mean(parameter.grad for parameter in model.parameters())
                run.scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
                run.scaler.step(optimizer)
                run.scaler.update()
                scheduler.step()
                run.log(loss)
            evaluation = evaluate(parallel, validation, 2, run.autocast)
            run.end_epoch(evaluation, save_best=save_best)
        run.print0(
            f"best model: {args.out / 'model'}, for from_pretrained and examples.bert_dp.predict"
        )
        run.finish()


if __name__ == "__main__":  # the same as python -m examples.bert_dp
    runpy.run_module("examples.bert_dp", run_name="__main__")
