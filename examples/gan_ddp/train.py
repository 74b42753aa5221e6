"""gan_ddp: train a GAN under DDP: one forward and one backward per network and iteration.

    python -m examples.gan_ddp                                           # a world of one
    python -m examples.gan_ddp --nproc 2                                 # two processes
    python -m examples.gan_ddp --nproc 2 --break-the-rule two-backwards  # ranks drift apart: fails
    python -m examples.gan_ddp --multiprocessing-distributed             # one process per GPU
    torchrun --nproc-per-node 2 -m examples.gan_ddp                      # started by torchrun

With any number of processes, the training is the same up to rounding.
"""

import runpy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam
from torch.utils.data import DataLoader

from common.data.idx import ImageData, image_data
from common.data.samplers import GlobalBatchSampler
from common.launch.collectives import broadcast_buffers, broadcast_object
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.checks import check_replicas
from common.train.ddp import warm_up_buckets
from common.train.run import Run
from examples.gan_ddp.args import Args
from examples.gan_ddp.networks import Discriminator, Generator
from examples.gan_ddp.rule import discriminator_backward
from examples.gan_ddp.samples import (
    draw,
    frechet_distance,
    generate,
    noise,
    picture,
    scaled,
    side_by_side,
)


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
    """Train both networks in turn; every rank runs this with its own share of the data."""
    rank, world_size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    torch.manual_seed(args.seed + rank)  # DDP sends rank 0's parameters to all
    data = image_data(args.dataset, args.data_dir)
    with Run(args, device, data) as run:
        sampler = GlobalBatchSampler(len(data.train), args.batch_size, args.seed)
        loader = DataLoader(data.train, batch_sampler=sampler, collate_fn=list, pin_memory=cuda)
        generator = Generator(data.size, args.latent)
        discriminator = Discriminator(data.size, args.norm)
        both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        generator_ddp, discriminator_ddp = (
            DDP(run.prepare(network), device_ids=[device] if cuda else None)
            for network in (generator, discriminator)
        )
        generator_optimizer, discriminator_optimizer = (
            Adam(network.parameters(), args.lr, betas=(0.5, 0.99), fused=cuda)
            for network in (generator, discriminator)
        )
        run.resume(
            model=both,
            generator_optimizer=generator_optimizer,
            discriminator_optimizer=discriminator_optimizer,
        )
        warm_up_buckets(generator_ddp)  # a resumed run then adds gradients in the same order
        warm_up_buckets(discriminator_ddp)
        # With the rule, or a way to break it: one forward and one backward, in rule.py.
        discriminate = partial(
            discriminator_backward, args.break_the_rule, discriminator_ddp, run.autocast
        )

        for epoch in run.epochs(args.epochs):
            sampler.set_epoch(epoch)  # without this, every epoch has the same order
            for pixels, _ in run.steps(loader):  # [B, 1, H, W], bytes
                # The sampler pads the last batch with repeated images, at the end: cut them off.
                batch_samples, local_samples = run.batch_share()
                reals = scaled(run.amp.to_device(pixels[:local_samples]))
                latent = noise(batch_samples, args.latent, args.seed, run.state.step)
                # DDP averages over the ranks: this makes it the mean over the global batch.
                scale = world_size / batch_samples
                with run.autocast():
                    fakes = generator_ddp(run.amp.to_device(latent[rank::world_size])).float()
                discriminator_optimizer.zero_grad()
                loss = discriminate(reals, fakes.detach(), scale)
                discriminator_optimizer.step()
                # The generator's loss goes through the bare discriminator: DDP's has had its
                # turn, and would send gradients that nobody uses. Frozen, it computes none.
                discriminator.requires_grad_(False)
                with run.autocast():
                    logits = discriminator(fakes).float()
                discriminator.requires_grad_(True)
                generator_optimizer.zero_grad()
                fooled = F.softplus(-logits).sum() * scale
                fooled.backward()  # the generator's one backward, after its one forward above
                generator_optimizer.step()
                run.log(loss, discriminator=loss, generator=fooled)
            metrics = evaluate(both, args, epoch, data)
            run.end_epoch(metrics, best="frechet_distance", smaller_is_better=True)
        side_by_side(args.out, args.epochs)
        run.finish()


def evaluate(both: nn.ModuleDict, args: Args, epoch: int, data: ImageData) -> dict[str, float]:
    """Draw generated images, and return their distance to the test set. Every rank calls this.

    Raises:
        CheckError: the replicas differ: a broken rule shows here.
    """
    broadcast_buffers(both)  # BatchNorm's statistics: each rank has its own since its last forward
    check_replicas(both)
    images = generate(both["generator"], noise(1000, args.latent, args.seed, 0, 0))
    if dist.get_rank() == 0:
        draw(images[:100], picture(args.out, epoch + 1))
    distance = broadcast_object(lambda: frechet_distance(images, scaled(data.test.pixels)))
    return {"frechet_distance": distance}


if __name__ == "__main__":  # the same as python -m examples.gan_ddp
    runpy.run_module("examples.gan_ddp", run_name="__main__")
