"""Every engine and schedule against the un-split model: `python -m tests.examples.pipeline_job --nproc P`.

Each case trains a few steps and compares loss, parameters and BatchNorm's statistics with a plain loop over the same
micro-batches. A line is printed per case.
"""

import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from tyro.conf import OmitArgPrefixes

from common.flags import begin
from common.launcher import Launch, Place
from examples.resnet_pipeline.options import Cut


@dataclass(frozen=True)
class Args:
    """The flags of the job."""

    cases: Literal["all", "hand", "replicas"] = "all"
    """Which cases."""
    launch: OmitArgPrefixes[Launch] = Launch()


if __name__ == "__main__":
    args, place = begin(Args, __doc__)

from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.optim import SGD
from torchvision.models.resnet import BasicBlock, Bottleneck

from common.data import ImageData
from common.distributed import World, gather, launch, say, taking_part
from common.precision import Numerics, Precision
from examples.resnet_pipeline import parts
from examples.resnet_pipeline.grid import Grid, make_grid, sum_over_replicas
from examples.resnet_pipeline.images import draw
from examples.resnet_pipeline.model import NORMS
from examples.resnet_pipeline.parts import make_parts, make_pipeline, micro_batch_sizes
from examples.resnet_pipeline.timeline import Timeline

BATCH, STEPS, SIZE, CLASSES = 8, 2, 32, 10
BASE = Cut(arch="resnet18", norm="group", balance="even")
HAND = [
    *(
        replace(BASE, schedule=schedule, micro_batches=count)
        for schedule in ("gpipe", "1f1b", "interleaved")
        for count in (1, 3, 4)  # 8 samples: 8; 3, 3, 2; 2, 2, 2, 2
    ),
    replace(BASE, norm="batch"),
    replace(BASE, norm="batch", micro_batches=3, balance="auto"),
    replace(BASE, norm="frozen"),
    replace(BASE, norm="batch", recompute=True),
    replace(BASE, norm="batch", micro_batches=3, schedule="interleaved", recompute=True),
    replace(BASE, arch="resnet50", norm="batch"),
    replace(BASE, arch="resnet50", schedule="interleaved", micro_batches=3),
]
TORCH = [
    *(
        replace(BASE, engine="torch", schedule=schedule, micro_batches=count)
        for schedule, counts in {
            "gpipe": (4, 5), "1f1b": (4, 5), "interleaved": (3, 4), "zero-bubble": (3, 4), "zbv": (3, 8)
        }.items()
        for count in counts
    ),
    replace(BASE, engine="torch", norm="batch"),
    replace(BASE, engine="torch", norm="batch", recompute=True),
    replace(BASE, arch="resnet50", engine="torch", schedule="zbv", micro_batches=8),
]  # fmt: skip
LAYOUT = [BASE, replace(BASE, schedule="interleaved", micro_batches=3), replace(BASE, engine="torch", norm="batch")]
REPLICAS = [  # BatchNorm over two values only tells their order, and so amplifies rounding: one micro-batch of four
    replace(BASE, stages=2, micro_batches=count, norm=norm, engine=engine)
    for norm, count, engine in (("group", 2, "hand"), ("group", 2, "torch"), ("batch", 1, "hand"))
] + [replace(BASE, stages=2, micro_batches=2, schedule="interleaved")]


def narrow(arch: str, classes: int, norm: str) -> nn.Module:
    """A ResNet with half the channels and few blocks: they are cut and computed the same, in a third of the time."""
    block, blocks = (Bottleneck, [2, 2, 1, 1]) if arch == "resnet50" else (BasicBlock, [2, 2, 2, 2])
    model = torchvision.models.ResNet(block, blocks, num_classes=classes, norm_layer=NORMS[norm])
    model.inplanes = 32
    model.conv1, model.bn1 = nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), NORMS[norm](32)
    for number, stride in enumerate((1, 2, 2, 2)):
        layer = model._make_layer(block, 32 * 2**number, blocks[number], stride)  # type: ignore[arg-type]
        model.add_module(f"layer{number + 1}", layer)
    model.fc = nn.Linear(256 * block.expansion, classes)
    return model


mock.patch.object(parts, "build", narrow).start()


def optimizer(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, 0.05, 0.9, nesterov=True)


@cache
def reference(
    arch: str, norm: str, count: int, replicas: int, numerics: Numerics
) -> tuple[dict[str, Tensor], list[float]]:
    """The same training of the un-split model without distributed code: gradients add up over the micro-batches.

    BatchNorm's running statistics are the means of those that the replicas have after a step from common ones.
    """
    images, labels = samples()
    torch.manual_seed(7)
    model = numerics.prepare(narrow(arch, CLASSES, norm)).train()
    sgd = optimizer(list(model.parameters()))
    running = {name: buffer for name, buffer in model.named_buffers() if "running" in name}
    losses = []
    for step in range(STEPS):
        loss = 0.0
        before = {name: buffer.clone() for name, buffer in running.items()}
        after = []
        for replica in range(replicas):
            for name, buffer in running.items():
                buffer.copy_(before[name])
            mine, theirs = (t[step, replica::replicas] for t in (images, labels))
            sizes = micro_batch_sizes(len(mine), count)
            for x, y in zip(numerics.images(mine).split(sizes), theirs.split(sizes), strict=True):
                part = F.cross_entropy(model(x), y, reduction="sum") / BATCH
                part.backward()
                loss += part.item()
            after.append({name: buffer.clone() for name, buffer in running.items()})
        for name, buffer in running.items():
            buffer.copy_(torch.stack([each[name] for each in after]).mean(dim=0))
        sgd.step()
        sgd.zero_grad()
        losses.append(loss)
    return model.state_dict(), losses


def pipeline(
    cut: Cut, grid: Grid, images: Tensor, labels: Tensor, numerics: Numerics, world: World
) -> tuple[dict[str, Tensor], list[float], int]:
    """Train by the example's code.

    Returns:
        This process's part of the state, its losses, and the micro-batches kept at most.
    """
    mine, theirs = (t[:, grid.replica :: grid.replicas] for t in (images, labels))
    sizes = micro_batch_sizes(mine.shape[1], cut.micro_batches)
    data = ImageData("", draw(BATCH, SIZE, 0), draw(BATCH, SIZE, 0), CLASSES, 0.0, 1.0)
    held = make_parts(cut, 7, numerics.images(mine[0]), data, numerics, world, grid)
    timeline = Timeline(world.rank, world.device, range(STEPS))
    engine = make_pipeline(cut, held, grid, mine.shape[1:], timeline)
    sgd = optimizer([p for stage in held.stages.values() for p in stage.parameters()])
    losses = []
    for x, y in zip(mine, theirs, strict=True):
        timeline.begin()
        losses.append(engine.step(numerics.images(x), y, sizes, BATCH).item())
        sum_over_replicas(list(held.stages.values()), grid)
        sgd.step()
        sgd.zero_grad()
    computed = [(e.kind, e.stage, e.micro) for e in timeline.steps[-1]]
    assert len(set(computed)) == len(computed) >= 2 * len(sizes), computed
    return {k: v for s in held.stages.values() for k, v in s.state_dict().items()}, losses, engine.most_kept


def samples() -> tuple[Tensor, Tensor]:
    """Batches of all steps: images [S, B, 3, H, W] and labels [S, B]."""
    data = [draw(BATCH, SIZE, seed) for seed in range(STEPS)]
    return torch.stack([part.pixels for part in data]).float().sub_(90).div_(70), torch.stack([p.labels for p in data])


def check(cut: Cut, grid: Grid, numerics: Numerics, world: World) -> None:
    state, losses, kept = pipeline(cut, grid, *samples(), numerics, world)
    held = gather(world, (state, losses, kept))
    if not held:
        return
    expected, losses = reference(cut.arch, cut.norm, cut.micro_batches, grid.replicas, numerics)
    whole = {name: tensor for part, _, _ in held for name, tensor in part.items()}
    assert whole.keys() == expected.keys()
    exact = all(torch.equal(whole[name], expected[name]) for name in expected)
    several = grid.replicas > 1  # they add up in another order, and ReLU's kinks amplify rounding
    rtol, atol = (1e-2, 1e-3) if several else (1e-4, 1e-5)
    for name, tensor in expected.items():
        copies = [part[name] for part, _, _ in held if name in part]
        assert all(torch.equal(copy, whole[name]) for copy in copies), "the replicas differ"
        if not (several and "tracked" in name):  # one model saw all micro-batches in turn
            torch.testing.assert_close(
                whole[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{cut}: {n}: {m}"
            )
    found = [sum(part[step] for _, part, _ in held) for step in range(STEPS)]
    torch.testing.assert_close(found, losses, rtol=rtol, atol=atol)
    if cut.norm != "batch":  # then micro-batches do not matter: also equal to the full batch
        full, _ = reference(cut.arch, cut.norm, 1, 1, numerics)
        for name in full:
            torch.testing.assert_close(whole[name], full[name], rtol=1e-2, atol=1e-3)
    elif cut.micro_batches > 1:  # and here they do
        full, _ = reference(cut.arch, cut.norm, 1, 1, numerics)
        assert any((whole[name] - full[name]).abs().max() > 1e-3 for name in full if name.endswith("weight"))
    most = [part[2] for part in held]
    print(
        f"equal{' bit by bit' if exact else ''}: {grid.replicas} x {grid.stages}, {cut.engine} {cut.schedule}, "
        f"{cut.micro_batches} micro-batches, {cut.norm}{', recompute' if cut.recompute else ''}"
        f"{', ' + cut.arch if cut.arch != BASE.arch else ''}{', NHWC' if numerics.channels_last else ''}, kept {most}",
        flush=True,
    )


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    with taking_part(place, local_rank) as world:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        plain, nhwc = (Precision(precision="fp32", channels_last=use).on(world.device) for use in ("no", "yes"))
        cases = {
            "all": [(cut, plain) for cut in HAND + TORCH] + [(cut, nhwc) for cut in LAYOUT],
            "hand": [(HAND[5], plain)],
            "replicas": [(cut, plain) for cut in REPLICAS] + [(REPLICAS[0], nhwc)],
        }[args.cases]
        grid = make_grid(world, 2 if args.cases == "replicas" else None)
        for cut, numerics in cases:
            check(cut, grid, numerics, world)
        say(world, f"{len(cases)} cases")


if __name__ == "__main__":
    sys.exit(launch(main_worker, place, args))
