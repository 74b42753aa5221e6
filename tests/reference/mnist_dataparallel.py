"""mnist_dataparallel in one process, on one device: the training of mnist_ddp_spawn."""

import tyro

from examples.mnist_dataparallel.args import Args
from tests.reference import Reference, mnist_ddp_spawn

CASES = [
    # Local batches of 84, 42, 28 and 21 on 4 devices: the last one is split into 6, 6, 6 and 3.
    ["--device-ids", "0", "1", "2", "3", "--epochs", "2", "--batch-size", "84", "--seed", "3"],
]


def train(flags: list[str]) -> Reference:
    found = mnist_ddp_spawn.fit(tyro.cli(Args, args=flags), lr=0.2)
    metrics = {name: found.metrics[name] for name in ("loss", "accuracy")}
    return Reference(found.losses, found.state, metrics)
