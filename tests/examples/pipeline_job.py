"""Every engine and schedule against the un-split model: `python -m tests.examples.pipeline_job --nproc P`.

Each case trains a few steps and compares loss, parameters and BatchNorm's statistics with a plain loop over the same
micro-batches. A line is printed per case.
"""

import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.optim import SGD
from torchvision.models.resnet import BasicBlock, Bottleneck
from tyro.conf import OmitArgPrefixes

from common.images.synthetic import SyntheticImages
from common.launch.args import start
from common.launch.collectives import gather_objects, print0
from common.launch.flags import Launch
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.amp import MixedPrecision
from common.train.precision import Precision
from examples.resnet_pipeline import costs, partition, stages
from examples.resnet_pipeline.args import PipelineArgs
from examples.resnet_pipeline.grid import Grid, average_over_replicas, make_grid
from examples.resnet_pipeline.model import NORMS
from examples.resnet_pipeline.operations import BY_HAND
from examples.resnet_pipeline.schedule import micro_batch_sizes
from examples.resnet_pipeline.stages import build_local_stages, make_pipeline
from examples.resnet_pipeline.timeline import Timeline

BATCH, STEPS, SIZE, CLASSES = 8, 2, 32, 10
BASE = PipelineArgs(arch="resnet18", norm="group", balance="even")
HAND = [
    *(
        replace(BASE, schedule=schedule, micro_batches=count)
        for schedule in BY_HAND
        for count in (1, 3, 4)  # 8 samples: 8; 3, 3, 2; 2, 2, 2, 2
    ),
    replace(BASE, norm="batch"),
    replace(BASE, norm="batch", micro_batches=3, balance="auto"),
    replace(BASE, norm="frozen"),
    replace(BASE, norm="batch", recompute=True),
    replace(BASE, norm="batch", micro_batches=3, schedule="interleaved", recompute=True),
    replace(BASE, arch="resnet50", norm="batch"),
    replace(BASE, arch="resnet50", schedule="interleaved", micro_batches=3),
    replace(BASE, arch="resnet50", schedule="zbv", norm="batch"),
]
SPLIT = [replace(BASE, schedule="zb-h1"), replace(BASE, schedule="zbv", micro_batches=3)]
TORCH_COUNTS = {
    "gpipe": (4, 5),
    "1f1b": (4, 5),
    "interleaved": (3, 4),
    "zero-bubble": (3, 4),
    "zbv": (3, 8),
    "dualpipev": (8,),
}
TORCH = [
    *(
        replace(BASE, engine="torch", schedule=schedule, micro_batches=count)
        for schedule, counts in TORCH_COUNTS.items()
        for count in counts
    ),
    replace(BASE, engine="torch", norm="batch"),
    replace(BASE, engine="torch", norm="batch", recompute=True),
    replace(BASE, arch="resnet50", engine="torch", schedule="zbv", micro_batches=8),
]
LAYOUT = [
    BASE,
    *(replace(BASE, schedule=name, micro_batches=3) for name in ("interleaved", "zbv")),
    replace(BASE, engine="torch", norm="batch"),
]
REPLICAS = [  # BatchNorm over two values only tells their order, and so amplifies rounding: one micro-batch of four
    replace(BASE, stages=2, micro_batches=count, norm=norm, engine=engine)
    for norm, count, engine in (("group", 2, "hand"), ("group", 2, "torch"), ("batch", 1, "hand"))
] + [replace(BASE, stages=2, micro_batches=2, schedule=schedule) for schedule in ("interleaved", "zbv")]


@dataclass(frozen=True)
class Args:
    """The flags of the job."""

    cases: Literal["all", "hand", "split", "replicas"] = "all"
    """Which cases."""
    launch: OmitArgPrefixes[Launch] = Launch()


def narrow(arch: str, classes: int, norm: str) -> nn.Module:
    """A ResNet with half the channels and few blocks: they are cut and computed the same, in a third of the time.

    It is built once with each seed and copied: building takes ten times as long.
    """
    model = copy.deepcopy(built(arch, classes, norm, torch.initial_seed()))
    return model.to(torch.get_default_device())


@cache
def built(arch: str, classes: int, norm: str, _seed: int) -> nn.Module:
    block, blocks = (Bottleneck, [2, 2, 1, 1]) if arch == "resnet50" else (BasicBlock, [2, 2, 2, 2])
    with torch.device("meta"):  # wide, and all of it is replaced: no time for its initial values
        model = torchvision.models.ResNet(block, blocks, num_classes=classes, norm_layer=NORMS[norm])
    model.inplanes = 32
    model.conv1, model.bn1 = nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), NORMS[norm](32)
    for number, stride in enumerate((1, 2, 2, 2)):
        layer = model._make_layer(block, 32 * 2**number, blocks[number], stride)  # type: ignore[arg-type]
        model.add_module(f"layer{number + 1}", layer)
    model.fc = nn.Linear(256 * block.expansion, classes)
    return model


def measure_once(model: nn.Module, images: Tensor, amp: MixedPrecision, repeats: int) -> tuple[costs.LayerCost, ...]:
    """Of equal models the costs are measured once: a sixth of the time of all cases."""
    key = str(model), images.shape, amp.channels_last, repeats
    if key not in MEASURED:
        MEASURED[key] = costs.measure(model, images, amp, repeats)
    return MEASURED[key]


MEASURED: dict[tuple[object, ...], tuple[costs.LayerCost, ...]] = {}
mock.patch.object(stages, "build", narrow).start()
mock.patch.object(partition, "measure", measure_once).start()


def optimizer(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, 0.05, 0.9, nesterov=True)


@cache
def reference(
    arch: str, norm: str, count: int, replicas: int, amp: MixedPrecision
) -> tuple[dict[str, Tensor], list[float]]:
    """The same training of the un-split model without distributed code: gradients add up over the micro-batches.

    BatchNorm's running statistics are the means of those that the replicas have after a step from common ones.
    """
    images, labels = samples()
    torch.manual_seed(7)
    model = amp.move(narrow(arch, CLASSES, norm)).train()
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
            for x, y in zip(amp.to_device(mine).split(sizes), theirs.split(sizes), strict=True):
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
    flags: PipelineArgs, grid: Grid, images: Tensor, labels: Tensor, amp: MixedPrecision
) -> tuple[dict[str, Tensor], list[float], int]:
    """Train by the example's code.

    Returns:
        This process's part of the state, its part of the mean loss over the replicas, and the micro-batches kept at
        most.
    """
    mine, theirs = (t[:, grid.dp_rank :: grid.dp_size] for t in (images, labels))
    sizes = micro_batch_sizes(mine.shape[1], flags.micro_batches)
    local = build_local_stages(flags, 7, CLASSES, amp.to_device(mine[0]), amp, grid)
    timeline = Timeline(dist.get_rank(), grid.device, range(STEPS))
    engine = make_pipeline(flags, local, grid, mine.shape[1:], timeline)
    sgd = optimizer(local.parameters)
    losses = []
    for x, y in zip(mine, theirs, strict=True):
        timeline.begin()
        loss = engine.step(amp.to_device(x), y, sizes, BATCH / grid.dp_size)
        losses.append(loss.item() / grid.dp_size)
        average_over_replicas(local.modules, grid)
        sgd.step()
        sgd.zero_grad()
    computed = [(e.kind, e.stage, e.micro) for e in timeline.steps[-1]]
    assert len(set(computed)) == len(computed) >= 2 * len(sizes), computed
    return {k: v for stage in local.modules for k, v in stage.state_dict().items()}, losses, engine.most_kept


def samples() -> tuple[Tensor, Tensor]:
    """Batches of all steps: images [S, B, 3, H, W] and labels [S, B]."""
    batches = [SyntheticImages(BATCH, SIZE, CLASSES, seed).__getitems__(range(BATCH)) for seed in range(STEPS)]
    images = torch.stack([batch.images for batch in batches]).float().sub_(127).div_(52)
    return images, torch.stack([batch.labels for batch in batches])


def check(flags: PipelineArgs, grid: Grid, amp: MixedPrecision) -> None:
    state, losses, kept = pipeline(flags, grid, *samples(), amp)
    held = gather_objects((state, losses, kept))
    if not held:
        return
    expected, losses = reference(flags.arch, flags.norm, flags.micro_batches, grid.dp_size, amp)
    whole = {name: tensor for part, _, _ in held for name, tensor in part.items()}
    assert whole.keys() == expected.keys()
    exact = all(torch.equal(whole[name], expected[name]) for name in expected)
    several = grid.dp_size > 1  # they add up in another order, and ReLU's kinks amplify rounding
    rtol, atol = (1e-2, 1e-3) if several else (1e-4, 1e-5)
    for name, tensor in expected.items():
        copies = [part[name] for part, _, _ in held if name in part]
        assert all(torch.equal(copy, whole[name]) for copy in copies), "the replicas differ"
        if not (torch.equal(whole[name], tensor) or (several and "tracked" in name)):  # one model saw all in turn
            torch.testing.assert_close(
                whole[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{flags}: {n}: {m}"
            )
    found = [sum(part[step] for _, part, _ in held) for step in range(STEPS)]
    torch.testing.assert_close(found, losses, rtol=rtol, atol=atol)
    if flags.norm != "batch":  # then micro-batches do not matter: also equal to the full batch
        full, _ = reference(flags.arch, flags.norm, 1, 1, amp)
        for name in full:
            torch.testing.assert_close(whole[name], full[name], rtol=1e-2, atol=1e-3)
    elif flags.micro_batches > 1:  # and here they do
        full, _ = reference(flags.arch, flags.norm, 1, 1, amp)
        assert any((whole[name] - full[name]).abs().max() > 1e-3 for name in full if name.endswith("weight"))
    most = [part[2] for part in held]
    print(
        f"equal{' bit for bit' if exact else ''}: {grid.dp_size} x {grid.pp_size}, {flags.engine} {flags.schedule}, "
        f"{flags.micro_batches} micro-batches, {flags.norm}{', recompute' if flags.recompute else ''}"
        f"{', ' + flags.arch if flags.arch != BASE.arch else ''}{', NHWC' if amp.channels_last else ''}, kept {most}",
        flush=True,
    )


def main(place: Place, args: Args) -> None:
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    place.export(local_rank)
    dist.init_process_group("gloo", init_method=JOB, timeout=args.launch.patience)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    plain, nhwc = (MixedPrecision(Precision(precision="fp32", channels_last=use), device) for use in ("no", "yes"))
    cases = {
        "all": [(flags, plain) for flags in HAND + TORCH] + [(flags, nhwc) for flags in LAYOUT],
        "hand": [(HAND[5], plain)],
        "split": [(flags, plain) for flags in SPLIT],
        "replicas": [(flags, plain) for flags in REPLICAS] + [(REPLICAS[0], nhwc)],
    }[args.cases]
    grid = make_grid(2 if args.cases == "replicas" else None, device, args.launch.patience)
    for flags, amp in cases:
        check(flags, grid, amp)
    print0(f"{len(cases)} cases")
    dist.destroy_process_group()


if __name__ == "__main__":
    start(Args, "tests.examples.pipeline_job:main")
