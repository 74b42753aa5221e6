"""ResNet-50 on two devices in one process: first one device at a time, then both, by micro-batches.

1. un-split: the model on one device.
2. naive: the first half on one device, the second on another. One of them is always idle.
3. pipeline: the batch is cut by `--split-size`; while the second device works on one micro-batch, the first works on
   the next. On GPUs the host only queues the work and the devices run it asynchronously; on a CPU, where a call
   computes at once, each half has a worker thread (and a core).

All give the same gradients, which is checked. What is measured goes to `--out`: timeline.png, sweep.png, result.json.

    python -m examples.resnet_pipeline.micro_batches                         # 24 images, split by 4
    python -m examples.resnet_pipeline.micro_batches --sweep 2 4 6 8 12 24
    python -m examples.resnet_pipeline.micro_batches -b 120 --split-size 20 --image-size 128 --devices cuda:0 cuda:1
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from common.errors import UserError
from common.flags import at_least, fail, parse


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    arch: Annotated[Literal["resnet18", "resnet50"], arg(aliases=["-a"])] = "resnet50"
    """Model."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 24
    """Samples in a batch."""
    split_size: int = 4
    """Samples in a micro-batch."""
    sweep: tuple[int, ...] = ()
    """Split sizes to compare."""
    image_size: Annotated[int, arg(metavar="PIXELS")] = 160
    """Height and width of the images."""
    rounds: int = 3
    """Measurements of each; the median counts."""
    devices: tuple[str, str] | None = None
    """Devices of the two halves (default: two GPUs if there are, else the CPU twice)."""
    out: Path = Path("runs/micro_batches")
    """Folder for what is measured."""

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size, image_size=self.image_size, rounds=self.rounds)
        at_least(1, split_size=min((self.split_size, *self.sweep)))


if __name__ == "__main__":
    args = parse(Args, description=__doc__)

import copy
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.precision import Precision
from examples.resnet_pipeline.model import Stage, blocks, build
from examples.resnet_pipeline.plan import balanced, measure
from examples.resnet_pipeline.timeline import Event, Timeline, bubble, draw, merged
from examples.resnet_pipeline.toy import choose


class TwoHalves:
    """A ResNet on two devices, each with a thread that gives it work.

    Args:
        model: the un-split model.
        start: with which of its parts the second half begins.
        devices: of the halves.
    """

    def __init__(self, model: nn.Module, start: int, devices: tuple[torch.device, torch.device]) -> None:
        parts, self.devices = blocks(model), devices
        numerics = [Precision(precision="fp32").on(device) for device in devices]
        self.half1 = Stage(parts[:start], numerics[0]).to(devices[0])  # stem .. some block
        self.half2 = Stage(parts[start:], numerics[1]).to(devices[1])  # the other blocks, head
        self.timelines = [Timeline(row, device, range(0)) for row, device in enumerate(devices)]
        # On a CPU each thread computes with one core; on GPUs it only queues work.
        self.threads = [ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) for _ in devices]

    def step(self, images: Tensor, labels: Tensor, split_size: int) -> None:
        """Forward and backward of a batch in micro-batches; gradients add up.

        The halves are joined by hand at the cut: the input of the second half is a leaf, whose gradient the first
        half's backward begins with. So both devices can be at work in the backward pass, too.

        Args:
            images: [B, 3, H, W].
            labels: [B].
            split_size: samples of a micro-batch (the last one may be smaller); B is the naive way.
        """
        targets = labels.to(self.devices[1], non_blocking=True)  # labels where the output is
        total = len(labels)
        forwards, gradients, backwards = list[Future[Tensor]](), list[Future[Tensor]](), list[Future[None]]()
        for micro, x in enumerate(images.split(split_size)):
            forwards.append(self.threads[0].submit(self.forward1, x, micro))
        for micro, y in enumerate(targets.split(split_size)):
            gradients.append(self.threads[1].submit(self.forward_backward2, forwards[micro], y, total, micro))
        for micro, gradient in enumerate(gradients):
            backwards.append(self.threads[0].submit(self.backward1, forwards[micro], gradient, micro))
        for done in backwards:
            done.result()
        for device in {device for device in self.devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def forward1(self, x: Tensor, micro: int) -> Tensor:
        """Images [b, 3, H, W] to activations [b, C, H', W']."""
        with self.timelines[0].record("F", micro, 0):
            return self.half1(x.to(self.devices[0], non_blocking=True))

    def forward_backward2(self, activations: "Future[Tensor]", y: Tensor, total: int, micro: int) -> Tensor:
        """Activations, as soon as they are there, to the gradient of the loss by them."""
        x = activations.result().detach().to(self.devices[1], non_blocking=True).requires_grad_()
        with self.timelines[1].record("F", micro, 1):
            loss = F.cross_entropy(self.half2(x), y, reduction="sum") / total
        with self.timelines[1].record("B", micro, 1):
            loss.backward()
        assert x.grad is not None
        return x.grad

    def backward1(self, activations: "Future[Tensor]", gradient: "Future[Tensor]", micro: int) -> None:
        """The rest of the backward pass, on the first device."""
        arrived = gradient.result().to(self.devices[0], non_blocking=True)
        with self.timelines[0].record("B", micro, 0):
            activations.result().backward(arrived)

    def traced(self, images: Tensor, labels: Tensor, split_size: int) -> list[Event]:
        """One step, recorded."""
        for timeline in self.timelines:
            timeline.traced = range(timeline.count, timeline.count + 1)
            timeline.begin()
        self.step(images, labels, split_size)
        for timeline in self.timelines:
            timeline.recording = False
        return merged([timeline.steps[-1:] for timeline in self.timelines])[0]


def seconds(run: Callable[[], object], rounds: int) -> float:
    """The median time of a call, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def draw_sweep(path: Path, found: dict[int, float], batch: int, alone: float) -> None:
    """Time of a step by split size, with its optimum."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    best = min(found, key=lambda size: found[size])
    figure, axis = pyplot.subplots(figsize=(6, 3.6))
    axis.plot(list(found), [1e3 * value for value in found.values()], marker="o", label="two devices")
    axis.plot([best], [1e3 * found[best]], "o", markersize=12, fillstyle="none", color="C3", label=f"optimum: {best}")
    axis.axhline(1e3 * alone, color="grey", linestyle="--", label="un-split, one device")
    axis.set(xlabel=f"split size (batch {batch})", ylabel="milliseconds per step", ylim=(0, None))
    axis.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(args: Args) -> None:
    """Measure the three ways, check that they compute the same, and draw."""
    devices = choose(args.devices)
    torch.set_num_threads(1)  # a "device" of a CPU is a core
    torch.manual_seed(0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(0, 10, (args.batch_size,))
    unsplit = build(args.arch, 10, "batch").to(devices[0])
    for norm in (module for module in unsplit.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.ones_(norm.weight)  # residual blocks begin as identities: nothing would flow back through them
    on_first = images.to(devices[0])
    found = measure(unsplit, on_first[: args.split_size], Precision(precision="fp32").on(devices[0]))
    start = balanced([part.seconds for part in found], 2)[1]
    model = TwoHalves(copy.deepcopy(unsplit), start, devices)
    print(f"{args.arch}, batch {args.batch_size}, {args.image_size} px, on {devices[0]} and {devices[1]}, "
          f"cut before {found[start].first}")  # fmt: skip

    def alone(split_size: int) -> None:
        for x, y in zip(on_first.split(split_size), labels.to(devices[0]).split(split_size), strict=True):
            (F.cross_entropy(unsplit(x), y, reduction="sum") / len(labels)).backward()

    unsplit.zero_grad()
    alone(args.split_size)
    model.step(images, labels, args.split_size)
    halves = dict(model.half1.named_parameters()) | dict(model.half2.named_parameters())
    for name, parameter in unsplit.named_parameters():
        torch.testing.assert_close(halves[name].grad, parameter.grad, check_device=False, msg=f"{name}: wrong gradient")
    print("gradients equal those of the un-split model over the same micro-batches")

    single = seconds(lambda: alone(args.batch_size), args.rounds)
    print(f"un-split, one device         {1e3 * single:7.0f} ms")
    result, charts = {"unsplit": single}, {}
    sizes = sorted({*args.sweep, args.split_size, args.batch_size}, reverse=True)
    steps = {size: seconds(lambda size=size: model.step(images, labels, size), args.rounds) for size in sizes}
    for size, value in steps.items():
        count = -(-args.batch_size // size)
        events = model.traced(images, labels, size)
        name = "naive: one device at a time" if count == 1 else f"pipeline, split size {size}"
        idle = f"idle {bubble(events):.0%}, (P-1)/(M+P-1) = {1 / (count + 1):.0%}"
        print(f"{name:29}{1e3 * value:7.0f} ms, {single / value:.2f} times one device, {idle}")
        result[name] = value
        if size in (args.split_size, args.batch_size):
            charts[f"{name}: {idle}"] = events
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(
        json.dumps({"batch_size": args.batch_size, "seconds": result}, indent=2) + "\n"
    )
    draw(args.out / "timeline.png", charts, "device")
    draw_sweep(args.out / "sweep.png", dict(sorted(steps.items())), args.batch_size, single)
    print(f"pictures: {args.out / 'timeline.png'}, {args.out / 'sweep.png'}")


if __name__ == "__main__":
    try:
        main(args)
    except UserError as mistake:
        fail(mistake)
