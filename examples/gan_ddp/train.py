"""gan_ddp: a GAN on several processes, and DDP's rule of one forward and one backward per network and iteration.

python -m examples.gan_ddp.train                                       # a world of one
python -m examples.gan_ddp.train --nproc 2                             # two processes on this machine
python -m examples.gan_ddp.train --nproc 2 --break-the-rule two-backwards   # ranks drift apart; the run fails
python -m examples.gan_ddp.train --multiprocessing-distributed         # one process per GPU
torchrun --nproc-per-node 2 -m examples.gan_ddp.train                  # started by torchrun
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from common.errors import Stopped
from common.flags import at_least, begin, leave
from common.launcher import Launch, Place
from common.precision import Precision


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    break_the_rule: Literal["no", "two-forwards", "two-passes", "two-backwards"] = "no"
    """Train the discriminator on real and generated images apart (rule.py says what happens then)."""
    norm: Literal["group", "batch"] = "group"
    """Normalisation in the discriminator; BatchNorm has buffers, which DDP sends before each forward."""
    dataset: str = "digits"
    """digits (embedded), mnist, fashion-mnist, or a folder with idx files."""
    data_dir: Path = Path("data")
    """Where the files of mnist and fashion-mnist are, or are downloaded to."""
    epochs: Annotated[int, arg(metavar="N")] = 60
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 120
    """GLOBAL batch size in real images (and as many generated ones), divided by the world size."""
    lr: float = 1e-3
    """Learning rate of both networks."""
    latent: Annotated[int, arg(metavar="N")] = 32
    """Length of the noise that an image is made from."""
    seed: int = 0
    """Seed of parameters, noise and sample order."""
    out: Path = Path("runs/gan_ddp")
    """Folder for everything that the run writes."""
    resume: str = "no"
    """auto (newest valid checkpoint in --out), a checkpoint's path, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS")] = 200
    """Optimizer steps between checkpoints (there is one after every epoch, too)."""
    launch: OmitArgPrefixes[Launch] = Launch()
    numbers: OmitArgPrefixes[Precision] = Precision()

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, checkpoint_every=self.checkpoint_every)
        at_least(1, latent=self.latent)
        at_least(0, lr=self.lr, seed=self.seed)


if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, workers start meanwhile
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler

from common.checkpoint import Checkpoints
from common.data import dealt, image_data, local_batch
from common.distributed import Stop, World, from_main, launch, settle, taking_part
from common.proof import prove_replicas_agree, prove_seen_once
from common.report import Report
from common.seed import seed_everything
from examples.gan_ddp.networks import Discriminator, Generator, draw, frechet_distance, generate, noise, scaled
from examples.gan_ddp.rule import discriminator_backward


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        train(args, world)


def train(args: Args, world: World) -> None:
    """Train both networks in turn; every rank runs this with its own share of the data."""
    batch = local_batch(args.batch_size, world)
    numerics = args.numbers.on(world.device)
    seed_everything(args.seed, world.rank, args.numbers.deterministic)
    with Report("gan_ddp", args.out, world) as report:
        data = image_data(args.dataset, args.data_dir, world)
        samples = len(data.train)
        report.introduce(f"{data.name} ({samples} train, {len(data.test)} test)", numerics, args.batch_size)
        sampler = DistributedSampler(data.train, world.size, world.rank, shuffle=True, seed=args.seed)
        loader = DataLoader(
            data.train, batch, sampler=sampler, collate_fn=list, pin_memory=world.device.type == "cuda",
            generator=torch.Generator(),
        )  # fmt: skip
        generator = numerics.prepare(Generator(data.size, args.latent))
        discriminator = numerics.prepare(Discriminator(data.size, args.norm))
        ids = [world.device] if world.device.type == "cuda" else None
        generator_ddp = DistributedDataParallel(numerics.compiled(generator), device_ids=ids)
        discriminator_ddp = DistributedDataParallel(numerics.compiled(discriminator), device_ids=ids)
        optimizers = [Adam(network.parameters(), args.lr, betas=(0.5, 0.99)) for network in (generator, discriminator)]
        both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        same = ("dataset", "batch_size", "epochs", "lr", "latent", "seed", "break_the_rule", "norm")
        config = {name: getattr(args, name) for name in same} | numerics.settings
        parts = {"model": both, "generator_optimizer": optimizers[0], "discriminator_optimizer": optimizers[1]}
        checkpoints = Checkpoints(args.out / "checkpoints", parts, config, world)
        start = checkpoints.load(args.resume)
        progress = start.progress if start else {"epoch": 0, "batch": 0, "step": 0, "best": -1e9, "metrics": {}}
        report.begin(progress["step"], start)
        with numerics.autocast():
            settle(generator_ddp, torch.zeros(batch, args.latent, device=world.device))
            settle(discriminator_ddp, numerics.images(torch.zeros(2 * batch, 1, data.size, data.size)))

        with checkpoints, Stop() as stop:
            for epoch in range(progress["epoch"], args.epochs):
                sampler.set_epoch(epoch)
                seen = torch.zeros(samples, dtype=torch.int32)
                # Trained on by the run that this one resumes, if it was interrupted in this epoch:
                seen[list(islice(sampler, min(progress["batch"] * batch, dealt(samples, world))))] = 1
                name, rest = f"epoch {epoch + 1}/{args.epochs}", islice(loader, progress["batch"], None)
                for pixels, _, indices in report.steps(rest, name, len(loader), progress["batch"]):
                    # DistributedSampler pads the last batch with repeated samples, which come last: cut them off.
                    total = min(args.batch_size, samples - progress["batch"] * args.batch_size)
                    mine = dealt(total, world)
                    scale = world.size / total  # DDP averages over the ranks: this makes it the mean over all images
                    reals = numerics.images(scaled(pixels[:mine]))
                    latent = noise(total, args.latent, args.seed, progress["step"])[world.rank :: world.size]
                    with numerics.autocast():
                        fakes = generator_ddp(latent.to(world.device)).float()  # the generator's one forward
                        optimizers[1].zero_grad()
                        loss = discriminator_backward(
                            args.break_the_rule, discriminator_ddp, reals, fakes.detach(), scale
                        )
                        optimizers[1].step()
                        # The generator's loss goes through the bare discriminator: DDP's has had its turn, and would
                        # send gradients that nobody uses. They are not even computed.
                        discriminator.requires_grad_(False)
                        fooled = F.softplus(-discriminator(fakes).float()).sum() * scale
                        discriminator.requires_grad_(True)
                    optimizers[0].zero_grad()
                    fooled.backward()  # the generator's one backward
                    optimizers[0].step()
                    seen[indices[:mine]] += 1
                    progress["batch"] += 1
                    progress["step"] += 1
                    report.loss(progress["step"], loss, total)
                    signum = stop.agreed()
                    if signum or progress["step"] % args.checkpoint_every == 0:
                        report.gather_losses()
                        checkpoints.save(progress)
                    if signum:
                        raise Stopped(signum, f"checkpoint at step {progress['step']}; go on with --resume auto")

                report.gather_losses()
                prove_seen_once(seen)
                for buffer in both.buffers():  # BatchNorm's statistics: each rank has its own since its last forward
                    dist.broadcast(buffer, 0)
                prove_replicas_agree(both, world)
                with report.evaluating():
                    made = generate(generator, noise(1000, args.latent, args.seed, 0, 0))  # [1000, 1, H, W]
                    distance = from_main(world, lambda made=made: frechet_distance(made, scaled(data.test.pixels)))
                    grid = args.out / "samples" / f"epoch-{epoch + 1:03}.png"
                    from_main(world, lambda made=made, grid=grid: draw(made[:100], grid))
                report.scalars(progress["step"], {"frechet/distance": distance})
                report.log(f"{name}: Frechet distance to the test images {distance:.3f}")
                progress |= {"epoch": epoch + 1, "batch": 0, "metrics": {"frechet_distance": distance}}
                progress["best"] = report.best(generator, -distance, progress["best"])
                checkpoints.save(progress)

        report.finish(
            **data.facts, epochs=args.epochs, steps=progress["step"], global_batch=args.batch_size,
            precision=numerics.name, metrics=progress["metrics"] | {"best_frechet_distance": -progress["best"]},
            parameter_hash=prove_replicas_agree(both, world),
        )  # fmt: skip


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
