"""gan_ddp: train a GAN with DDP; each network runs one forward and one backward pass per step.

    python -m examples.gan_ddp                                 # one process
    python -m examples.gan_ddp --nproc 2                       # two processes
    torchrun --nproc-per-node 2 -m examples.gan_ddp            # started by torchrun
    python -m examples.gan_ddp.further.break_the_rule          # common mistakes

Each forward pass sets up DDP's gradient averaging for the next backward pass.
Therefore, the discriminator gets real and generated images in one batch, and the generator's loss
is computed with the unwrapped discriminator.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.data import image_data
from common.ddp import warm_up_buckets
from common.rank import init_distributed, local_batch_size, record
from common.run import Run

from .args import Args
from .networks import LATENT, make_discriminator, make_generator
from .samples import frechet_distance, generate, save_samples


def main(args: Args) -> None:
    """Start several ranks on this machine; not called under torchrun or srun."""
    mp.start_processes(main_worker, (args,), args.nproc, start_method="forkserver")


@record  # prints an error once per job, and sets the exit code
def main_worker(local_rank: int, args: Args) -> None:
    """Train both networks on one rank."""
    device = init_distributed(args, local_rank)
    rank, world_size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    torch.manual_seed(args.seed + rank)  # DDP broadcasts rank 0's parameters
    data = image_data(args.dataset, Path("data"))
    # Scale the pixels to [-1, 1], the range of the generator's Tanh.
    train, test = ((x.tensors[0] * data.std + data.mean) * 2 - 1 for x in (data.train, data.test))
    train_set = TensorDataset(train)
    local_batch = local_batch_size(args.batch_size, world_size)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(
        train_set,
        local_batch,
        sampler=sampler,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=cuda,
    )
    device_ids = [device] if cuda else None
    generator = DDP(make_generator(data.size).to(device), device_ids=device_ids)
    discriminator = DDP(make_discriminator(data.size).to(device), device_ids=device_ids)
    networks = nn.ModuleDict({"generator": generator.module, "discriminator": discriminator.module})
    optimizer_g = Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99), fused=cuda)
    optimizer_d = Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99), fused=cuda)
    run = Run(args, device, data, model=networks, optimizer_g=optimizer_g, optimizer_d=optimizer_d)
    warm_up_buckets(generator)  # makes a resumed run match an uninterrupted one bit for bit
    warm_up_buckets(discriminator)

    for epoch in run.epochs(args.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the same order
        for (real,) in run.steps(loader):  # [B / W, 1, S, S]
            # The noise for the global batch is the same for any number of ranks. It is drawn into
            # pinned memory, so that the host does not wait for the copy.
            seeded = torch.Generator().manual_seed(args.seed * 1_000_003 + run.step)
            noise = torch.randn(args.batch_size, LATENT, generator=seeded, pin_memory=cuda)
            noise = noise.split(local_batch)[rank].to(device, non_blocking=True)
            real = real.to(device, non_blocking=True)

            with run.autocast:
                fake = generator(noise).float()  # the generator's only forward pass
                # The discriminator's only forward pass; detach stops gradients to the generator.
                logits = discriminator(torch.cat([real, fake.detach()])).float()  # [2 B / W]
            on_real, on_fake = logits.split(local_batch)
            loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
            optimizer_d.zero_grad()
            loss.backward()  # the discriminator's only backward pass: DDP averages its gradients
            optimizer_d.step()

            # Unwrapped, the discriminator sends nothing; frozen, it computes no weight gradients.
            critic = discriminator.module.requires_grad_(False)
            with run.autocast:
                fooled = F.softplus(-critic(fake).float()).mean()
            critic.requires_grad_(True)
            optimizer_g.zero_grad()
            fooled.backward()  # the generator's only backward pass
            optimizer_g.step()
            run.log(loss)
        samples = generate(generator.module, 1000, args.seed)
        if rank == 0:
            save_samples(samples[:100], args.out / f"samples/epoch-{epoch + 1:03}.png")
        distance = frechet_distance(samples, test)
        run.end_epoch({"frechet_distance": distance}, score=-distance)
    run.finish(networks)
    dist.destroy_process_group()
