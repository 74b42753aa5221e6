"""your_model.further.language_model: the template with a small GPT.

    python -m examples.your_model.further.language_model --nproc 2

The GPT predicts the next character in Python's help topics, such as the text of `help("import")`.
"""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.ddp import unwrapped, warm_up_buckets
from common.launch import start
from common.rank import init_distributed, local_batch_size, record
from common.run import Run

from .. import args as template

BLOCK_SIZE = 64  # characters per sample


@dataclass(frozen=True)
class Args(template.Args):
    """Train a character-level GPT."""

    epochs: int = 5
    lr: float = 0.005
    out: Path = Path("runs/language_model")


# 1. YOUR DATA: a sample is BLOCK_SIZE characters and the next one, as token IDs [T + 1].
def load_data() -> tuple[TensorDataset, Tensor, int]:
    """Return the training samples, the test samples (one eighth), and the vocabulary size."""
    text = "".join(topics[name] for name in sorted(topics))[:200_001]
    vocabulary = sorted(set(text))
    token_ids = torch.tensor([vocabulary.index(character) for character in text])
    samples = token_ids.unfold(0, BLOCK_SIZE + 1, BLOCK_SIZE)  # [N, T + 1]
    test = torch.arange(len(samples)) % 8 == 0
    return TensorDataset(samples[~test]), samples[test], len(vocabulary)


# 2. YOUR MODEL: it contains no code for ranks.
class GPT(nn.Module):
    """A GPT that maps token IDs [B, T] to logits [B, T, vocab_size] for the next characters."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(BLOCK_SIZE, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, vocab_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the logits; each position attends to itself and to earlier positions."""
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK_SIZE, token_ids.device)
        hidden = self.wte(token_ids) + self.wpe.weight
        return self.lm_head(self.blocks(hidden, mask=mask, is_causal=True))


def main(args: Args) -> None:
    """Start several ranks on this machine; not called under torchrun or srun."""
    mp.start_processes(main_worker, (args,), args.nproc, start_method="forkserver")


@record
def main_worker(local_rank: int, args: Args) -> None:
    """Train on one rank."""
    device = init_distributed(args, local_rank)
    rank, world_size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    torch.manual_seed(args.seed + rank)
    train_set, test_ids, vocab_size = load_data()
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    local_batch = local_batch_size(args.batch_size, world_size)
    loader = DataLoader(train_set, local_batch, sampler=sampler, drop_last=True, pin_memory=cuda)
    model = DDP(GPT(vocab_size).to(device), device_ids=[device] if cuda else None)
    optimizer = AdamW(model.parameters(), args.lr)
    scheduler = OneCycleLR(optimizer, args.lr, args.epochs * len(loader), cycle_momentum=False)
    run = Run(args, device, "small GPT", model=model, optimizer=optimizer, scheduler=scheduler)
    warm_up_buckets(model)

    for epoch in run.epochs(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for (samples,) in run.steps(loader):  # [B / W, T + 1]
            samples = samples.to(device, non_blocking=True)
            with run.autocast:
                logits = model(samples[:, :-1]).float()  # [B / W, T, vocab_size]
            # 3. YOUR LOSS: the mean over this rank's characters.
            loss = F.cross_entropy(logits.transpose(1, 2), samples[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.log(loss)
        # 4. YOUR METRIC: the mean loss; rank r gets the test samples r, r + W, r + 2W, ...
        with torch.no_grad():
            samples = test_ids[rank::world_size].to(device)
            logits = unwrapped(model).eval()(samples[:, :-1])
            nats = F.cross_entropy(logits.transpose(1, 2), samples[:, 1:], reduction="sum")
        dist.all_reduce(nats)  # now the sum over all characters in the test set
        test_loss = nats.item() / (len(test_ids) * BLOCK_SIZE)
        run.end_epoch({"loss": test_loss}, score=-test_loss)
    run.finish(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    start(Args, f"{__package__}.language_model")
