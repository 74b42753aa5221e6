"""Compare training of ResNet-50 in two stages on two cores with training on one core.

    python -m benchmarks.pipeline

The program times the schedules of the example and of torch.distributed.pipelining, in bfloat16 if
the processor supports it. The baseline is the unsplit model on one core, with the whole batch or
with micro-batches, whichever is faster. The program also measures each stage's activation memory.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks import harness
from benchmarks.harness import Claim, Measurement, Result, Table, compare, on_ranks, timed
from common.precision import autocast
from examples.resnet_pipeline.further.torch_pipelining import SCHEDULES, stage_indices
from examples.resnet_pipeline.further.zero_bubble import FORMS
from examples.resnet_pipeline.pipeline import Pipeline, make_mesh
from examples.resnet_pipeline.stages import build_stage

STAGES, MICRO_BATCHES = 2, 4
CUTS = {"resnet50": ("layer2.3",), "resnet18": ()}  # both stages take about the same time
TORCH_SCHEDULES = ("gpipe", "1f1b", "interleaved")
WHOLE, SPLIT = "one core, whole batch", "one core, micro-batches"
FLOORS = {"1F1B": 1.55}
MEMORY = 0.35  # maximum for 1F1B relative to GPipe, which keeps 8 micro-batches instead of 2
BF16 = autocast("auto", torch.device("cpu"))
Step = Callable[[], object]


class ChannelsLast(nn.Module):
    """A stage with inputs and outputs [B, H, W, C], because torch sends only contiguous tensors.

    Messages are bfloat16, like in the example's pipeline.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the stage: activations [B, H, W, C], or logits."""
        y = self.stage(x.float().permute(0, 3, 1, 2))
        return y.permute(0, 2, 3, 1).contiguous().to(torch.bfloat16) if y.dim() == 4 else y


def optimized(modules: list[nn.Module], forward_backward: Step) -> Step:
    """Return a training step: zero the gradients, call a function, and update the parameters."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, 1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with BF16:
            forward_backward()
        optimizer.step()

    return step


def alone(arch: str, micro_batches: int, images: Tensor, labels: Tensor) -> Step:
    """Return a training step of the unsplit model on rank 0; the other rank does nothing."""
    if dist.get_rank() > 0:
        return lambda: None
    model = build_stage(arch, 10, "batch", 1, 0)

    def forward_backward() -> None:
        pairs = zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True)
        for x, y in pairs:
            loss = F.cross_entropy(model(x).float(), y, reduction="sum") / len(labels)
            loss.backward()

    return optimized([model], forward_backward)


def by_hand(name: str, arch: str, micro_batches: int) -> Pipeline:
    """Return a pipeline with one of the example's schedules. Every rank calls this."""
    form, schedule = FORMS[name]
    mesh = make_mesh("cpu", STAGES, 120.0)
    stage = build_stage(arch, 10, "batch", STAGES, mesh.get_local_rank("pp"), CUTS[arch])
    return form(stage, mesh, schedule, micro_batches, 120.0)


def by_torch(name: str, arch: str, images: Tensor, labels: Tensor) -> Step:
    """Return a training step that uses one of torch's schedules. Every rank calls this."""
    indices = stage_indices(name, dist.get_rank(), STAGES)
    count = len(indices) * STAGES
    cuts = CUTS[arch] if count == STAGES else ()
    modules: list[nn.Module] = [
        ChannelsLast(build_stage(arch, 10, "batch", count, index, cuts)) for index in indices
    ]
    built: Any = [
        pipelining.PipelineStage(module, index, count, torch.device("cpu"))
        for module, index in zip(modules, indices, strict=True)
    ]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, reduction="sum") / len(labels)

    schedule = SCHEDULES[name](
        built if len(built) > 1 else built[0],
        n_microbatches=MICRO_BATCHES,
        loss_fn=loss,
        scale_grads=False,
    )
    inputs = [images.permute(0, 2, 3, 1)] if 0 in indices else []
    target = {"target": labels} if count - 1 in indices else {}
    return optimized(modules, lambda: schedule.step(*inputs, **target))


def make_batch(batch: int, size: int) -> tuple[Tensor, Tensor]:
    """Bind this rank to a core, and return random images and labels."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    return images, torch.arange(batch) % 10


def compare_schedules(arch: str, batch: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Time a step with each schedule and on one core, in seconds. Every rank calls this."""
    images, labels = make_batch(batch, size)
    steps = {
        WHOLE: alone(arch, 1, images, labels),
        SPLIT: alone(arch, MICRO_BATCHES, images, labels),
    }
    for name in FORMS:
        pipeline = by_hand(name, arch, MICRO_BATCHES)
        steps[name] = optimized([pipeline], partial(pipeline.step, images, labels))
    for name in TORCH_SCHEDULES:
        steps[f"torch {name}"] = by_torch(name, arch, images, labels)
    return compare({name: partial(timed, step) for name, step in steps.items()}, rounds)


def kept_megabytes(step: Step, parameters: Iterable[Tensor]) -> float:
    """Return the peak memory of the tensors saved for backward, excluding parameters, in MiB."""
    users, now, most = Counter(p.untyped_storage().data_ptr() for p in parameters), 0, 0

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal now, most
            self.tensor = tensor.detach()
            self.storage = tensor.untyped_storage()
            users[self.storage.data_ptr()] += 1
            if users[self.storage.data_ptr()] == 1:
                now += self.storage.nbytes()
                most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            users[self.storage.data_ptr()] -= 1
            if not users[self.storage.data_ptr()]:
                now -= self.storage.nbytes()

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        step()
    return most / 2**20


def compare_memory(arch: str, batch: int, size: int) -> dict[str, list[float]]:
    """Return the memory of the activations that each stage keeps, in MiB. Every rank calls this."""
    images, labels = make_batch(batch, size)
    found = {}
    for name in ("GPipe", "1F1B"):
        kept = [0.0] * STAGES
        pipeline = by_hand(name, arch, 2 * MICRO_BATCHES)
        own = kept_megabytes(partial(pipeline.step, images, labels), pipeline.parameters())
        dist.all_gather_object(kept, own)
        found |= {f"{name}, stage {stage}": [value] for stage, value in enumerate(kept)}
    return found


def measure(args: Measurement) -> Result:
    """Compare the speed of all schedules with one core, and the memory of 1F1B with GPipe."""
    arch, batch, size, rounds = "resnet50", 32, 224, args.rounds
    if args.quick:
        arch, batch, size, rounds = "resnet18", 8, 64, 1
    seconds = on_ranks(STAGES, compare_schedules, arch, batch, size, rounds)
    core = [min(pair) for pair in zip(seconds[WHOLE], seconds[SPLIT], strict=True)]
    speeds = {n: [o / v for v, o in zip(s, core, strict=True)] for n, s in seconds.items()}
    memory = on_ranks(STAGES, compare_memory, arch, batch, size)
    tables = {
        "Speed of a step": Table("times one core", speeds),
        "Activations kept, 8 micro-batches, float32": Table("MiB", memory),
    }
    medians = harness.medians(speeds)
    claims = [
        Claim(f"{arch} in two stages, {name}, faster than one core", medians[name], floor)
        for name, floor in FLOORS.items()
    ]
    kept = harness.ratio(memory, "1F1B, stage 0", "GPipe, stage 0")
    text = "activations of the first of two stages, 1F1B, relative to GPipe"
    claims.append(Claim(text, kept, MEMORY, at_most=True))
    inputs = {"model": arch, "images": batch, "pixels": f"{size}x{size}", "cuts": CUTS[arch]}
    inputs |= {"micro-batches": MICRO_BATCHES, "seconds of one core": median(core)}
    return Result(inputs, tables, claims)


if __name__ == "__main__":
    harness.main("pipeline", measure)
