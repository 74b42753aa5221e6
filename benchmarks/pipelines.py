"""Pipelines to measure: configurations, the bytes they keep, where their seconds go."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.ranks import Step
from common.train.amp import MixedPrecision
from common.train.precision import Precision
from examples.resnet_pipeline.args import PipelineArgs
from examples.resnet_pipeline.grid import make_grid
from examples.resnet_pipeline.operations import simulate
from examples.resnet_pipeline.schedule import Seconds, ideal_bubble, micro_batch_sizes
from examples.resnet_pipeline.stages import LocalStages, build_local_stages, make_pipeline
from examples.resnet_pipeline.timeline import Event, Timeline

PLACEMENTS = {"interleaved": "round", "zero-bubble": "round", "zbv": "V", "dualpipev": "V"}


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor that autograd keeps as long as it keeps this object."""

    tensor: Tensor


class Kept:
    """Counts the bytes that autograd keeps for the backward pass, without parameters.

    Args:
        parameters: not to be counted.

    Attributes:
        most: bytes that were kept at the same time at most; a storage counts once.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.ignored = {parameter.data_ptr() for parameter in parameters}
        self.holders = Counter[tuple[int, int]]()  # by address and size of a storage
        self.most = 0

    def counting(self) -> AbstractContextManager[None]:
        """Count in the body."""
        return torch.autograd.graph.saved_tensors_hooks(self.hold, lambda held: held.tensor)

    def hold(self, tensor: Tensor) -> Held:
        """Count a tensor until autograd drops what this returns."""
        storage, held = tensor.untyped_storage(), Held(tensor)
        key = storage.data_ptr(), storage.nbytes()
        if key[0] not in self.ignored:
            self.holders[key] += 1
            self.most = max(self.most, sum(size for _, size in +self.holders))
            weakref.finalize(held, self.holders.subtract, [key])
        return held


@dataclass(frozen=True)
class Made:
    """A configuration on this rank: its stages, its micro-batches, a step, what was computed."""

    local: LocalStages
    sizes: list[int]
    step: Step
    timeline: Timeline


class Pipelines:
    """Makes configurations; those with the same stages on this rank share them, to save memory."""

    def __init__(
        self,
        samples: int,
        image_size: int,
        precision: Precision,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.amp, self.grid = MixedPrecision(precision, device), make_grid(None, device, timeout)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(samples, 3, image_size, image_size, generator=generator)
        self.images, self.labels = self.amp.to_device(images), torch.arange(samples) % 10
        self.shared: dict[tuple[str, bool], tuple[LocalStages, SGD]] = {}

    def make(self, flags: PipelineArgs) -> Made:
        """A configuration. Every rank calls this."""
        placement = PLACEMENTS.get(flags.schedule, "one stage each")
        key = placement, flags.recompute
        if key not in self.shared:
            local = build_local_stages(flags, 0, 10, self.images, self.amp, self.grid)
            self.shared[key] = local, SGD(local.parameters, 0.01, 0.9)
        local, sgd = self.shared[key]
        timeline = Timeline(dist.get_rank(), self.amp.device, range(1, 1000))
        engine = make_pipeline(flags, local, self.grid, self.images.shape, timeline)
        samples = len(self.labels)
        sizes = micro_batch_sizes(samples, flags.micro_batches)

        def step() -> None:
            timeline.begin()
            engine.step(self.images, self.labels, sizes, samples)
            sgd.step()
            sgd.zero_grad()

        return Made(local, sizes, step, timeline)

    def alone(self, model: nn.Module, count: int, amp: MixedPrecision) -> Step:
        """A step of the un-split model in so many micro-batches. No other rank is needed."""
        amp.move(model)
        images, samples = amp.to_device(self.images), len(self.labels)
        sgd, sizes = SGD(model.parameters(), 0.01, 0.9), micro_batch_sizes(samples, count)

        def step() -> None:
            for x, y in zip(images.split(sizes), self.labels.split(sizes), strict=True):
                with amp.autocast():
                    logits = model(x).float()
                (F.cross_entropy(logits, y, reduction="sum") / samples).backward()
            sgd.step()
            sgd.zero_grad()

        return step


def losses(
    events: Sequence[Event],
    flags: PipelineArgs,
    processes: int,
    step: float,
    whole: float,
    cut: float,
) -> dict[str, float]:
    """Where the seconds of a step went.

    Args:
        events: of the step, of all stages.
        flags: of the pipeline.
        processes: each has one stage, or two.
        step: measured seconds of the pipeline.
        whole: of the baseline.
        cut: of the un-split model in as many micro-batches.
    """
    count = flags.micro_batches
    spent: dict[tuple[str, int], float] = defaultdict(float)
    for event in events:
        spent[event.kind, event.stage] += (event.end - event.start) / count
    stages = sorted({stage for _, stage in spent})
    seconds = [
        Seconds(spent["F", stage], spent["B", stage] + spent["I", stage], spent["W", stage])
        for stage in stages
    ]
    busy = count * sum(spent.values()) / processes
    simulated = simulate(flags.schedule, seconds, count, processes)
    idle = ideal_bubble(flags.schedule, count, processes)
    filling = busy * idle / (1 - idle)
    return {
        "ideal": whole / processes,
        "small micro-batches": (cut - whole) / processes,
        "shared machine": busy - cut / processes,
        "bubble": filling,
        "imbalance": simulated - busy - filling,
        "communication and rest": step - simulated,
    }
