"""your_model.fsdp: a model that does not fit into one device, sharded over all of them by FSDP2.

    torchrun --standalone --nproc-per-node 2 -m examples.your_model.fsdp
    torchrun --standalone --nproc-per-node 1 -m examples.your_model.fsdp    # the same losses

Plain torch: nothing comes from this repository. Each of W ranks keeps 1/W of every parameter, of
its gradient and of the optimizer's state; whole parameters exist for one layer at a time.
"""

import argparse
import os
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

TEXT = torch.tensor(list("".join(topics.values()).encode()))  # Python's reference, as bytes
BATCH, LENGTH, WIDTH, LAYERS = 16, 64, 64, 4  # BATCH is global


class Writer(nn.Module):
    """Bytes [B, LENGTH] to logits [B, LENGTH, 256] of those that follow. It does not know ranks."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.logits = layers, nn.Linear(WIDTH, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        """Each place sees itself and those before it."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, inputs.device)
        hidden = self.bytes(inputs) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.logits(hidden)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's samples of a step, and what follows each byte: [BATCH / W, LENGTH] both."""
    generator = torch.Generator().manual_seed(step)  # the same on all ranks
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=generator)
    mine = starts[dist.get_rank() :: dist.get_world_size(), None] + torch.arange(LENGTH)
    return TEXT[mine].to(device), TEXT[mine + 1].to(device)


def state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds. An optimizer without a state gets one, and counts a step for it."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": torch.tensor(step)}


def main(steps: int, checkpoint: Path) -> None:
    """Train for some steps from the checkpoint, if there is one, and write another."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if BATCH % dist.get_world_size():  # FSDP averages gradients as if all had the same share
        raise SystemExit(f"{dist.get_world_size()} ranks do not divide BATCH {BATCH}: change one")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # and torch.cuda.set_device
    torch.manual_seed(0)  # FSDP broadcasts nothing: equal seeds make equal parameters

    # Each layer is sharded as soon as it is made: the model is never whole in any process.
    layers = nn.ModuleList()
    for _ in range(LAYERS):
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True)
        fully_shard(layer.to(device), mesh=mesh)  # in place: its parameters are DTensors now
        layers.append(layer)
    model = Writer(layers).to(device)
    fully_shard(model, mesh=mesh)  # what is in no layer
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # made after sharding

    old = checkpoint.with_name(f"{checkpoint.name}.old")
    found = checkpoint if checkpoint.exists() else old  # killed between the two renames below
    first = 0
    if found.exists():  # written by any number of ranks
        saved = state(model, optimizer, step=0)  # tensors to load into
        dcp.load(saved, checkpoint_id=found)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        first = int(saved["step"])
    for step in range(first, first + steps):
        inputs, targets = batch(step, device)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # reduce-scatter: each rank gets its part of the averaged gradient
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step + 1}, loss {mean.item():.6f}")
    saved = state(model, optimizer, first + steps)
    new = checkpoint.with_name(f"{checkpoint.name}.new")
    dcp.save(saved, checkpoint_id=new)  # each rank writes what it holds
    if dist.get_rank() == 0:  # all have written: only now the checkpoint before may go
        if checkpoint.exists():
            shutil.rmtree(old, ignore_errors=True)
            checkpoint.rename(old)  # at once, while deleting takes a while
        new.rename(checkpoint)
        shutil.rmtree(old, ignore_errors=True)

    sharded = [each for each in model.parameters() if isinstance(each, DTensor)]  # all
    whole, held = sum(x.numel() for x in sharded), sum(x.to_local().numel() for x in sharded)
    print(f"rank {dist.get_rank()} holds {held:,} of {whole:,} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    typed = "torchrun --standalone --nproc-per-node 2 -m examples.your_model.fsdp"
    parser = argparse.ArgumentParser(prog=typed, description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to do")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/fsdp"), help="a folder")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.checkpoint)
