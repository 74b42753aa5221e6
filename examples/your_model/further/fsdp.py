"""your_model.further.fsdp: shard a model that does not fit on one device, with FSDP2.

    torchrun --standalone --nproc-per-node 2 -m examples.your_model.further.fsdp
    torchrun --standalone --nproc-per-node 1 -m examples.your_model.further.fsdp   # same losses

This program uses only torch and imports nothing from this repository. Each of W ranks keeps 1/W of
every parameter, gradient and optimizer state; the full parameters exist for one layer at a time. A
run continues from the newest checkpoint in --out, with any number of ranks.
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

TEXT = torch.tensor(list("".join(topics.values()).encode()))  # Python's language reference
BATCH_SIZE, LENGTH, WIDTH, LAYERS, VOCAB_SIZE = 16, 64, 64, 4, 256  # BATCH_SIZE is global


class GPT(nn.Module):
    """A GPT that maps token IDs [B, LENGTH] to next-byte logits [B, LENGTH, VOCAB_SIZE]."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.lm_head = blocks, nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the logits; each position attends to itself and to earlier positions."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, token_ids.device)
        hidden = self.wte(token_ids) + self.wpe.weight
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        return self.lm_head(hidden)


def load_batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs and targets (next tokens), both [BATCH_SIZE / W, LENGTH]."""
    generator = torch.Generator().manual_seed(step)  # the same on all ranks
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH_SIZE,), generator=generator)
    local = starts[dist.get_rank() :: dist.get_world_size(), None] + torch.arange(LENGTH)
    return TEXT[local].to(device), TEXT[local + 1].to(device)


def main(steps: int, folder: Path) -> None:
    """Train for `steps` steps from the newest checkpoint, and write a new one."""
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # as NCCL requires
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH_SIZE % world_size:  # FSDP averages as if local batches were equal in size
        message = f"BATCH_SIZE {BATCH_SIZE} is not divisible by {world_size} ranks"
        raise SystemExit(f"{message}; use a multiple of {world_size}")
    mesh = init_device_mesh(device.type, (world_size,))  # also calls torch.cuda.set_device
    torch.manual_seed(0)  # equal parameters on all ranks, because FSDP does not broadcast them

    # Each block is sharded as soon as it is built, so that no process stores the whole model.
    blocks = nn.ModuleList()
    for _ in range(LAYERS):
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True)
        fully_shard(block.to(device), mesh=mesh)  # in place: its parameters become DTensors
        blocks.append(block)
    model = GPT(blocks).to(device)
    fully_shard(model, mesh=mesh)  # shards wte, wpe and lm_head
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # its state is then sharded as well

    first_step = 0
    # dcp.save writes .metadata last: a checkpoint without it is incomplete.
    if newest := max(folder.glob("step-*/.metadata"), default=None):
        weights, moments = get_state_dict(model, optimizer)  # initializes the optimizer's state
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=newest.parent)  # in place
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first_step = int(newest.parent.name.removeprefix("step-"))
    for step in range(first_step, first_step + steps):
        token_ids, next_ids = load_batch(step, device)
        loss = F.cross_entropy(model(token_ids).flatten(0, 1), next_ids.flatten())
        optimizer.zero_grad()
        loss.backward()  # reduce-scatter: each rank gets its shard of the averaged gradient
        optimizer.step()
        mean_loss = loss.detach() / world_size
        dist.all_reduce(mean_loss)
        if rank == 0:
            print(f"step {step + 1}, loss {mean_loss.item():.6f}", flush=True)
    weights, moments = get_state_dict(model, optimizer)  # this rank's shards
    checkpoint = folder / f"step-{first_step + steps:08}"
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=checkpoint)

    sharded = [each for each in model.parameters() if isinstance(each, DTensor)]  # all parameters
    total, local = sum(x.numel() for x in sharded), sum(x.to_local().numel() for x in sharded)
    print(f"rank {rank} stores {local:,} of {total:,} parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="number of optimizer steps")
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp"), help="checkpoint folder")
    args = parser.parse_args()
    main(args.steps, args.out)
