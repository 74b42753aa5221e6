"""The rule of gan_ddp: it is followed in train.py, and what DDP does where it is broken."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from examples.gan_ddp import train
from examples.gan_ddp.args import Args
from examples.gan_ddp.further.break_the_rule import WAYS, try_way
from examples.gan_ddp.networks import make_discriminator, make_generator
from examples.gan_ddp.samples import frechet_distance
from tests import ranks

PARAMETERS = sum(p.numel() for p in make_discriminator(8).parameters())


def try_all(batch_norm: bool) -> dict[str, Any]:
    norm = nn.BatchNorm2d(64) if batch_norm else nn.GroupNorm(1, 64)
    return {name: try_way(way, norm) for name, way in WAYS.items()}


@pytest.mark.parametrize("batch_norm", [False, True])
def test_what_ddp_does_where_the_rule_is_broken(tmp_path: Path, batch_norm: bool) -> None:
    one, other = ranks.call(try_all, batch_norm, folder=tmp_path, ranks=2)
    assert one == other
    name = "two forward passes, one backward pass"
    if isinstance(one[name], str):  # torch from 2.6 on: pytorch/pytorch issue 175024
        assert batch_norm
        assert "inplace operation" in one.pop(name)
    error, difference, _ = one.pop("two forward passes, two backward passes")
    assert error > 0.01, "the gradients of the second backward pass are not averaged"
    assert difference > 0.01, "the replicas drift apart"
    for name, (error, difference, sent) in one.items():
        assert error < 1e-6, name
        assert difference == 0, name
        twice = name.startswith("two passes") or name.endswith("through DDP")
        assert sent == 4 * PARAMETERS * (2 if twice else 1), name


def watch(out: str) -> tuple[list[list[int]], list[int]]:
    """Train for an epoch; return DDP's input shapes, and its backward passes."""
    shapes, backwards = list[list[int]](), list[int]()
    forward = DDP.forward

    def watched(self: DDP, inputs: torch.Tensor) -> torch.Tensor:
        outputs = forward(self, inputs)
        if len(inputs):  # not that of `warm_up_buckets`
            shapes.append(list(inputs.shape))
            outputs.register_hook(lambda _: backwards.append(len(shapes)))
        return outputs

    DDP.forward = watched
    args = Args(out=Path(out), epochs=1, batch_size=360, device="cpu", precision="fp32")
    train.main_worker(0, args)
    return shapes, backwards


def test_one_forward_and_one_backward_per_network_and_step(tmp_path: Path) -> None:
    """The discriminator gets real and generated images in one batch."""
    shapes, backwards = ranks.call(watch, str(tmp_path / "out"), folder=tmp_path / "log")
    assert shapes == [[360, 32], [720, 1, 8, 8]] * 3
    assert backwards == [2, 2, 4, 4, 6, 6]


def test_replicas_that_drift_apart_fail_the_run(tmp_path: Path) -> None:
    """Two passes in each direction: DDP does not report this, but `run.finish` does."""
    judge = "discriminator(torch.cat([real, fake.detach()])).float()"
    split = "on_real, on_fake = logits.split(local_batch)"
    twice = "discriminator(real).float(), discriminator(fake.detach()).float()"
    losses = "F.softplus(-on_real).mean(), F.softplus(on_fake).mean()"
    changes = [(judge, twice), (split, "on_real, on_fake = logits")]
    changes.append(("loss.backward()", f"[loss.backward() for loss in ({losses})]"))
    mutate = [("examples.gan_ddp.train", old, new) for old, new in changes]
    run = ranks.run("gan_ddp", 2, ["--epochs", "1"], out=tmp_path / "out", mutate=mutate)
    assert run.codes == [1, 1]
    assert "parameters of rank(s) [1] differ from rank 0" in run.text


def test_frechet_distance() -> None:
    torch.manual_seed(1)
    images = torch.rand(500, 1, 4, 4)
    assert frechet_distance(images, images) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(images, images + 0.5) == pytest.approx(16 * 0.25, rel=1e-4)
    # Two Gaussians with the same mean and commuting covariances: the sum of (s - t)^2.
    spread = torch.rand(500, 1, 4, 4).mul(3) + images.mean(0) - 1.5
    x, y = (torch.linalg.qr(one.flatten(1) - one.flatten(1).mean(0))[0] for one in (images, spread))
    same = frechet_distance(x.view(500, 1, 4, 4), 3 * y.view(500, 1, 4, 4))
    assert same == pytest.approx(16 * 2**2 / 499, rel=1e-4)


def test_training_leaves_samples_and_the_best_networks(tmp_path: Path) -> None:
    """It learns, and the best networks are those with the smallest distance."""
    run = ranks.run("gan_ddp", 2, ["--epochs", "10", "--seed", "4"], out=tmp_path / "out").done()
    name = "test/frechet_distance"
    distances = [point[name] for point in run.points() if name in point]
    assert distances[-1] < 0.6 * distances[0]
    assert run.result["best"] == pytest.approx(-min(distances))
    pictures = sorted(path.name for path in (run.out / "samples").iterdir())
    assert pictures == [f"epoch-{epoch:03}.png" for epoch in range(1, 11)]
    size = 10 * (4 * 8 + 2) + 2
    with Image.open(run.out / "samples" / pictures[-1]) as picture:
        assert picture.size == (size, size)
        assert picture.convert("L").getextrema()[1] == 255
    best = load_file(run.out / "best.safetensors")
    generator, discriminator = make_generator(8), make_discriminator(8)
    for name, network in (("generator", generator), ("discriminator", discriminator)):
        state = {key.partition(".")[2]: best[key] for key in best if key.startswith(name)}
        network.load_state_dict(state)
    noise = torch.randn(1000, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        samples = generator(noise)
    assert samples.std(0).mean() > 0.2, "the images differ"


def test_size_of_images() -> None:
    assert make_generator(28)(torch.randn(2, 32)).shape == (2, 1, 28, 28)
    assert make_discriminator(28)(torch.randn(2, 1, 28, 28)).shape == (2,)
