"""bert_dp: train BERT on Chinese hotel reviews with `nn.DataParallel`; data.py reads the reviews.

    python -m examples.bert_dp                                 # 316 shipped reviews
    python -m examples.bert_dp --csv FILE --model bert-base-chinese --epochs 3
    CUDA_VISIBLE_DEVICES=0,2 python -m examples.bert_dp        # on these two devices
    torchrun --nproc-per-node 2 -m examples.bert_dp            # with one device per process
    torchrun --nnodes 2 --node-rank R --master-addr HOST0 -m examples.bert_dp

In each step, DataParallel copies the model to all devices of a process and splits the batch. It
runs the chunks in threads, and gathers the outputs on the first device. A CPU counts as one device.
"""

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

from common.checkpoint import load_weights
from common.ddp import all_reduce_mean
from common.evaluate import evaluate, write_predictions
from common.rank import init_distributed, local_batch_size, print0, record
from common.run import Run

from .args import Args
from .data import ID2LABEL, Reviews, collate, split
from .model import build


class Classifier(nn.Module):
    """BERT with token IDs as its only input. DataParallel runs it in one thread per device."""

    def __init__(self, bert: nn.Module, pad: int, autocast: torch.autocast) -> None:
        super().__init__()
        self.bert, self.pad, self.autocast = bert, pad, autocast

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, 2] for token IDs [B, L], padded with `pad`."""
        # This mask broadcasts over [B, heads, queries, keys]. With a mask [B, L], transformers
        # would check for padding on the device, and the host would wait for the result.
        mask = (ids != self.pad)[:, None, None, :]
        with self.autocast:  # entered here, because threads do not inherit the autocast dtype
            return self.bert(input_ids=ids, attention_mask=mask).logits.float()


def main(args: Args) -> None:
    """Start several ranks on this machine; not called under torchrun or srun."""
    mp.start_processes(main_worker, (args,), args.nproc, start_method="forkserver")


@record  # prints an error once per job, and sets the exit code
def main_worker(local_rank: int, args: Args) -> None:
    """Train on all devices of one rank."""
    device = init_distributed(args, local_rank)
    rank, world_size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    reviews = Reviews(args.csv)
    train_set, validation_set = split(reviews, args.seed)
    for text, label in (train_set[i] for i in range(5)):
        print0(f"{ID2LABEL[label]}  {text[:36]}")
    texts = [text for text, _ in train_set]
    torch.manual_seed(args.seed)  # all ranks draw the same parameters
    bert, tokenizer = build(args.model, texts, args.max_length)
    bert.to(device)
    torch.manual_seed(args.seed + rank)  # dropout differs between ranks
    sampler = DistributedLengthGroupedSampler(  # reviews of similar lengths need little padding
        args.batch_size, lengths=[len(t) for t in texts], seed=args.seed, drop_last=True
    )
    batch_size = local_batch_size(args.batch_size, world_size)
    options: Any = {"num_workers": args.workers, "pin_memory": cuda}
    options["collate_fn"] = partial(collate, tokenizer, args.max_length)
    loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options)
    in_order = DistributedSampler(validation_set, shuffle=False)
    validation_loader = DataLoader(validation_set, 64, sampler=in_order, **options)
    optimizer = AdamW(bert.parameters(), args.peak_lr, weight_decay=0.01, fused=True)
    steps = args.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    device_ids = [device.index]
    if cuda and os.environ["LOCAL_WORLD_SIZE"] == "1":  # no other rank uses the other devices
        device_ids = list(range(torch.cuda.device_count()))
    parts: Any = {"model": bert, "optimizer": optimizer, "scheduler": scheduler}
    names = list(ID2LABEL.values())
    run = Run(args, device, reviews.about, about={"classes": names}, **parts)
    classifier = Classifier(bert, tokenizer.pad_token_id, run.autocast)
    parallel = nn.DataParallel(classifier, device_ids) if cuda else classifier

    for epoch in run.epochs(args.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the same order
        for ids, labels in run.steps(loader):  # [B / W, L], [B / W]
            ids, labels = (x.to(device, non_blocking=True) for x in (ids, labels))
            logits = parallel(ids)  # [B / W, 2], on the first device
            # A loss inside the model would be a mean per device. The mean of these means is wrong
            # if chunks have different sizes: 4 devices split 5 reviews into 2, 2 and 1.
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()  # adds up the replicas' gradients in `bert`
            if world_size > 1:  # DistributedDataParallel cannot wrap a DataParallel
                all_reduce_mean(p.grad for p in bert.parameters() if p.grad is not None)
            nn.utils.clip_grad_norm_(bert.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            run.log(loss)
        evaluation = evaluate(parallel, validation_loader, len(validation_set), nullcontext())
        if run.end_epoch(evaluation.metrics, score=evaluation.metrics["accuracy"]):
            columns = reviews.columns(validation_set.indices)
            write_predictions(args.out / "predictions.csv", names, evaluation, **columns)
    run.finish(bert, device_ids=device_ids)
    if rank == 0:  # the best model, for predict.py, from_pretrained and pipeline
        bert.load_state_dict(load_weights(args.out / "best.safetensors")[0])
        bert.save_pretrained(args.out / "model")  # the wrappers lack this method
        tokenizer.save_pretrained(args.out / "model")
    dist.destroy_process_group()
