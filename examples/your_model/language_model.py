"""your_model.language_model: train a small GPT by the template, with its four places changed.

    python -m examples.your_model.language_model                  # a world of one
    python -m examples.your_model.language_model --nproc 2        # two processes
    diff examples/your_model/train.py examples/your_model/language_model.py   # what changes

A small transformer predicts each next character of the language reference that Python brings along
(`help("import")` prints from it).
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.data.samplers import Shard
from common.launch.args import start
from common.launch.collectives import broadcast_buffers
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.ddp import warm_up_buckets
from common.train.evaluate import ordered_predictions
from common.train.loader import unwrapped
from common.train.run import Run
from examples.your_model.args import TextArgs as Args

PADDING = -100  # a label that cross_entropy ignores


# 1. YOUR DATA: a sample is an input, a label, and its number in its set, from 0.
LENGTH = 64  # characters of a sample
CHARACTERS = 200_000  # of the text: half a minute's training


@dataclass(frozen=True)
class Data:
    """Lines of text: characters as numbers [LENGTH], and those that follow each [LENGTH]."""

    train: TensorDataset
    test: TensorDataset
    alphabet: str

    def __str__(self) -> str:
        """What the run prints at its start."""
        sizes = f"{len(self.train)} train, {len(self.test)} test"
        return f"Python's reference ({sizes}, of {LENGTH} of {len(self.alphabet)} characters)"

    @property
    def facts(self) -> dict[str, Any]:
        """What result.json says about the data."""
        return {"train_samples": len(self.train), "eval_samples": len(self.test)}


def load_data() -> Data:
    """Every eighth piece of the text is for the test."""
    text = "".join(topics[name] for name in sorted(topics))[: CHARACTERS + 1]
    alphabet = "".join(sorted(set(text)))
    numbers = torch.tensor([alphabet.index(character) for character in text])
    inputs, labels = (
        part[: len(part) // LENGTH * LENGTH].view(-1, LENGTH)
        for part in (numbers[:-1], numbers[1:])
    )
    test = torch.arange(len(labels)) % 8 == 0
    train, tested = (
        TensorDataset(inputs[part], labels[part], torch.arange(int(part.sum())))
        for part in (~test, test)
    )
    return Data(train, tested, alphabet)


# 2. YOUR MODEL: it does not know about ranks.
class Writer(nn.Module):
    """Characters [B, LENGTH] to logits [B, LENGTH, alphabet]: each place sees those before it."""

    def __init__(self, alphabet: int, width: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.logits = nn.Linear(width, alphabet)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the next characters."""
        hidden = self.characters(characters) + self.places.weight
        return self.logits(self.layers(hidden, mask=self.mask, is_causal=True))


def build_model(data: Data) -> nn.Module:
    """A writer in this alphabet."""
    return Writer(len(data.alphabet))


@torch.inference_mode()
def evaluate(
    model: DDP, loader: Any, autocast: Callable[[], AbstractContextManager[Any]]
) -> dict[str, float]:
    """Bits per character of the whole test set. Every rank calls this, with its own shard."""
    broadcast_buffers(model.module)  # BatchNorm's, if there is one: each rank has its own
    bare, device = model.module.eval(), next(model.parameters()).device
    losses = [torch.empty(0)]  # of each sample; a shard may be empty
    for inputs, labels, _ in unwrapped(loader):
        with autocast():
            logits = bare(inputs.to(device)).float()
        each = F.cross_entropy(logits.transpose(1, 2), labels.to(device), reduction="none")
        losses.append(each.mean(1).cpu())
    bare.train()
    nats = ordered_predictions(torch.cat(losses), len(loader.dataset)).double().mean().item()
    return {"bits_per_character": nats / math.log(2)}


def main(place: Place, args: Args) -> None:
    """Train in every process of this node."""
    launch(main_worker, place, args)


@record  # one line per error and job, a clean stop on SIGTERM; torch's own `record` works, too
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    place.export(local_rank)  # RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun
    device, backend = choose_device(args.launch, local_rank)  # cuda and nccl, or cpu and gloo
    bound = device if device.type == "cuda" else None  # nccl connects now, not in the first step
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience, device_id=bound)
    train(args, device)
    dist.destroy_process_group()


def train(args: Args, device: torch.device) -> None:
    """Train and evaluate; every rank runs this with its own share of the data."""
    rank, world_size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    torch.manual_seed(args.seed + rank)  # dropout differs; DDP sends rank 0's parameters to all
    data = load_data()
    with Run(args, device, data, unit="samples") as run:
        sampler = DistributedSampler(data.train, seed=args.seed)
        loader = DataLoader(
            data.train,
            args.batch_size // world_size,
            sampler=sampler,
            num_workers=args.workers,
            pin_memory=cuda,
        )
        test_loader = DataLoader(
            data.test, 1000, sampler=Shard(len(data.test)), num_workers=args.workers
        )
        model = DDP(
            run.prepare(build_model(data)),
            device_ids=[device] if cuda else None,
            find_unused_parameters=args.find_unused_parameters,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
        )
        optimizer = AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay)
        steps = args.epochs * len(loader)
        scheduler = OneCycleLR(optimizer, args.lr, steps, cycle_momentum=False)
        run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
        warm_up_buckets(model)  # a resumed run then adds gradients in the same order

        for epoch in run.epochs(args.epochs):
            sampler.set_epoch(epoch)  # without this, every epoch has the same order
            model.train()  # from_pretrained gives a model in evaluation mode
            for inputs, labels in run.steps(loader):
                # The last batch may be smaller, and the sampler pads it with repeated samples, at
                # the end, because DDP needs all ranks in every step.
                batch_samples, local_samples = run.batch_share()
                labels[local_samples:] = PADDING
                inputs, labels = (x.to(device, non_blocking=True) for x in (inputs, labels))
                with run.autocast():
                    outputs = model(inputs).float()
                # 3. YOUR LOSS: the sum over this rank's samples, without the padding.
                # Per character, so that the learning rate does not depend on LENGTH.
                logits = outputs.transpose(1, 2)  # [B, alphabet, LENGTH]; labels: [B, LENGTH]
                loss_sum = F.cross_entropy(logits, labels, reduction="sum") / LENGTH

                # DDP averages over the ranks: this makes it the mean over the global batch.
                loss = loss_sum * world_size / batch_samples
                optimizer.zero_grad()
                run.scaler.scale(loss).backward()  # DDP all-reduces full buckets meanwhile
                run.scaler.step(optimizer)
                run.scaler.update()
                scheduler.step()
                run.log(loss)
            # 4. YOUR METRIC: of the whole test set, the same on all ranks.
            metrics = evaluate(model, test_loader, run.autocast)
            run.end_epoch(metrics, best="bits_per_character", smaller_is_better=True)

        run.finish()


if __name__ == "__main__":
    start(Args, "examples.your_model.language_model:main")
