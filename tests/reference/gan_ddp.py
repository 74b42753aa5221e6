"""gan_ddp as a plain loop: one process, and the discriminator judges each kind of image apart."""

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from examples.gan_ddp.args import Args
from examples.gan_ddp.networks import make_discriminator, make_generator
from tests.reference import Reference, batches, digits

CASES = [["--epochs", "2", "--batch-size", "84", "--seed", "5"]]


def train(flags: list[str]) -> Reference:
    args = tyro.cli(Args, args=flags)
    images, test_images = (2 * part - 1 for part in digits()[::2])
    torch.manual_seed(args.seed)
    generator, discriminator = make_generator(8), make_discriminator(8)
    betas = (0.5, 0.99)
    generator_adam = torch.optim.Adam(generator.parameters(), 1e-3, betas)
    discriminator_adam = torch.optim.Adam(discriminator.parameters(), 1e-3, betas)
    losses = []
    for epoch in range(args.epochs):
        for batch in batches(len(images), args.batch_size, args.seed + epoch):
            seeded = torch.Generator().manual_seed(args.seed * 1_000_003 + len(losses))
            fake = generator(torch.randn(args.batch_size, 32, generator=seeded))
            loss = F.binary_cross_entropy_with_logits(
                discriminator(images[batch]), torch.ones(args.batch_size)
            ) + F.binary_cross_entropy_with_logits(
                discriminator(fake.detach()), torch.zeros(args.batch_size)
            )
            discriminator_adam.zero_grad()
            loss.backward()
            discriminator_adam.step()
            fooled = F.binary_cross_entropy_with_logits(
                discriminator(fake), torch.ones(args.batch_size)
            )
            generator_adam.zero_grad()
            fooled.backward()
            generator_adam.step()
            losses.append(loss.item())
    both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    noise = torch.randn(1000, 32, generator=torch.Generator().manual_seed(args.seed))
    with torch.no_grad():
        distance = frechet_distance(generator(noise), test_images)
    return Reference(losses, both.state_dict(), {"frechet_distance": distance})


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """Return the distance of two sets of images, from square roots of symmetric matrices."""
    x, y = (images.flatten(1).double().numpy() for images in (one, other))
    first, second = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    values, vectors = np.linalg.eigh(first)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    overlap = np.sqrt(np.linalg.eigvalsh(root @ second @ root).clip(min=0)).sum()
    gap = x.mean(0) - y.mean(0)
    return float(gap @ gap + np.trace(first) + np.trace(second) - 2 * overlap)
