"""Time ResNet-50 on two devices in one process: one device at a time, then both, by micro-batches.

1. un-split: the model on one device.
2. naive: the first half on one device, the second on another. One of them is always idle.
3. textbook pipeline: a module whose forward cuts the batch by `--split-size`, and one backward
   (`two_devices.py`). It keeps both devices at work if they are GPUs, whose work is only queued.
4. pipeline: while the second device works on one micro-batch, the first works on the next; on a
   CPU, each half has a thread and a core (`two_halves.py`).

All give the same gradients, which is checked. The measurements go to `--out`: timeline.png,
sweep.png, result.json.

    python -m examples.resnet_pipeline.micro_batches                         # 24 images, split by 4
    python -m examples.resnet_pipeline.micro_batches --sweep 2 4 6 8 12 24
    python -m examples.resnet_pipeline.micro_batches -b 120 --split-size 20 --image-size 128 \
        --devices cuda:0 cuda:1
"""

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tyro.conf import arg

from common.launch.args import fail, parse
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.train.amp import MixedPrecision
from common.train.files import check_writable
from common.train.precision import Precision
from examples.resnet_pipeline.costs import measure
from examples.resnet_pipeline.model import build
from examples.resnet_pipeline.partition import balanced
from examples.resnet_pipeline.timeline import COLOURS, bubble, draw, span
from examples.resnet_pipeline.toy import two_devices
from examples.resnet_pipeline.two_devices import PipelineParallelResNet
from examples.resnet_pipeline.two_halves import TwoHalves


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
    """Folder for the measurements."""

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size, image_size=self.image_size, rounds=self.rounds)
        at_least(1, split_size=min((self.split_size, *self.sweep)))
        for size in (self.split_size, *self.sweep):
            last = (self.batch_size - 1) % min(size, self.batch_size) + 1
            if last == 1 and self.image_size <= 32:  # the last activations are 1x1
                raise UserError(
                    f"a batch of {self.batch_size} split by {size} has a micro-batch of one "
                    f"sample: BatchNorm cannot normalise over one value; choose another split size"
                )


class Unsplit:
    """The un-split model on one device, with a step like that of `TwoHalves`."""

    def __init__(self, arch: str, device: torch.device) -> None:
        self.model, self.device = build(arch, 10, "batch").to(device), device
        for norm in (m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)):
            # Residual blocks begin as identities: no gradient would flow back through them.
            nn.init.ones_(norm.weight)

    def step(self, images: Tensor, labels: Tensor, split_size: int) -> None:
        """Forward and backward of a batch in micro-batches; gradients add up."""
        images, labels = images.to(self.device), labels.to(self.device)
        for x, y in zip(images.split(split_size), labels.split(split_size), strict=True):
            (F.cross_entropy(self.model(x), y, reduction="sum") / len(labels)).backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Textbook:
    """`PipelineParallelResNet`, with a step like that of `TwoHalves`."""

    def __init__(self, model: nn.Module, devices: tuple[torch.device, torch.device]) -> None:
        self.model, self.devices = PipelineParallelResNet(model, *devices), devices

    def step(self, images: Tensor, labels: Tensor, split_size: int) -> None:
        """Forward of a batch in micro-batches, and one backward."""
        self.model.split_size = split_size
        logits = self.model(images.to(self.devices[0]))
        loss = F.cross_entropy(logits, labels.to(self.devices[1]), reduction="sum") / len(labels)
        loss.backward()
        for device in {device for device in self.devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)


def check_gradients(unsplit: nn.Module, textbook: nn.Module, halves: TwoHalves) -> None:
    """Check that a step has given all forms the same gradients."""
    by_name = dict(halves.half1.named_parameters()) | dict(halves.half2.named_parameters())
    in_order = textbook.parameters()
    for (name, parameter), other in zip(unsplit.named_parameters(), in_order, strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        wrong = f"{name}: wrong gradient"
        expected, found = parameter.grad.cpu(), by_name[name].grad
        assert found is not None
        # One backward adds up the micro-batches in the opposite order, so it is rounded otherwise;
        # on CUDA, so is every sum.
        largest = expected.abs().max()
        for grad in (found, other.grad):
            torch.testing.assert_close(grad.cpu() / largest, expected / largest, msg=wrong)
    print("gradients equal those of the un-split model over the same micro-batches")


def seconds(run: Callable[[], object], rounds: int) -> float:
    """The median time of a call, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def draw_sweep(path: Path, found: dict[int, float], batch: int, alone: float) -> None:
    """Draw the time of a step by split size, with its optimum; `alone` is one device's time."""
    import matplotlib  # a second, after the measurements

    matplotlib.use("agg")
    from matplotlib import pyplot  # as above

    best = min(found, key=lambda size: found[size])
    figure, axis = pyplot.subplots(figsize=(6, 3.6))
    times = [1e3 * value for value in found.values()]
    axis.plot(list(found), times, marker="o", color=COLOURS["F"])
    axis.axhline(1e3 * alone, color="grey", linestyle="--")
    ends = [(1e3 * alone, "un-split, one device", "grey"), (times[-1], "two devices", COLOURS["F"])]
    lowest = 0.0
    for height, name, colour in sorted(ends):
        at = (1.02, max(height, lowest))
        lowest = at[1] + 0.06 * max(times)  # where the next name does not touch this one
        axis.annotate(name, at, xycoords=("axes fraction", "data"), color=colour, va="center")
    gain = f"split size {best} is fastest: {alone / found[best]:.2f} times one device"
    axis.set_title(gain, loc="left", fontsize=10)
    label = f"split size (batch {batch})"
    axis.set(xlabel=label, ylabel="milliseconds per step", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(args: Args) -> None:
    """Measure the four ways, check that they compute the same, and draw."""
    devices = two_devices(args.devices)
    check_writable(args.out, "--out")
    torch.set_num_threads(1)  # a "device" of a CPU is a core
    torch.manual_seed(0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(0, 10, (args.batch_size,))
    unsplit = Unsplit(args.arch, devices[0])
    amp = MixedPrecision(Precision(precision="fp32"), devices[0])
    costs = measure(unsplit.model, images[: args.split_size].to(devices[0]), amp)
    unsplit.model.zero_grad()
    start = balanced([sum(cost.seconds) for cost in costs], 2)[1]
    halves = TwoHalves(copy.deepcopy(unsplit.model), start, devices)
    textbook = Textbook(copy.deepcopy(unsplit.model), devices)
    print(
        f"{args.arch}, batch {args.batch_size}, {args.image_size} px, on {devices[0]} and "
        f"{devices[1]}, cut before {costs[start].first}"
    )
    for form in (unsplit, halves, textbook):
        form.step(images, labels, args.split_size)
    check_gradients(unsplit.model, textbook.model, halves)
    compare(args, unsplit, textbook, halves, images, labels)


def compare(
    args: Args,
    unsplit: Unsplit,
    textbook: Textbook,
    halves: TwoHalves,
    images: Tensor,
    labels: Tensor,
) -> None:
    """Measure a step of each form, and write pictures and result.json."""

    def timed(form: Unsplit | Textbook | TwoHalves, size: int) -> float:
        return seconds(lambda: form.step(images, labels, size), args.rounds)

    single = timed(unsplit, args.batch_size)
    print(f"un-split, one device         {1e3 * single:7.0f} ms")
    result = {"unsplit": single, "textbook pipeline": timed(textbook, args.split_size)}
    speed = f"{single / result['textbook pipeline']:.2f} times one device"
    print(f"textbook pipeline            {1e3 * result['textbook pipeline']:7.0f} ms, {speed}")
    sizes = sorted({*args.sweep, args.split_size, args.batch_size}, reverse=True)
    steps, charts = {size: timed(halves, size) for size in sizes}, {}
    for size, value in steps.items():
        count = -(-args.batch_size // size)
        traced = [halves.traced(images, labels, size) for _ in range(args.rounds)]
        events = sorted(traced, key=span)[args.rounds // 2]
        name = "naive: one device at a time" if count == 1 else f"pipeline, split size {size}"
        idle = f"idle {bubble(events):.0%}, (P-1)/(M+P-1) = {1 / (count + 1):.0%}"
        print(f"{name:29}{1e3 * value:7.0f} ms, {single / value:.2f} times one device, {idle}")
        result[name] = value
        if size in (args.split_size, args.batch_size):
            charts[f"{name}: {idle}"] = events
    text = json.dumps({"batch_size": args.batch_size, "seconds": result}, indent=2)
    (args.out / "result.json").write_text(text + "\n")
    timeline, sweep = args.out / "timeline.png", args.out / "sweep.png"
    draw(timeline, charts, "device")
    draw_sweep(sweep, dict(sorted(steps.items())), args.batch_size, single)
    print(f"pictures: {timeline}, {sweep}")


if __name__ == "__main__":
    try:
        main(parse(Args, description=__doc__))
    except UserError as mistake:
        fail(mistake)
