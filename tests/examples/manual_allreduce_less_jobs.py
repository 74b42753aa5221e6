"""Jobs for test_manual_allreduce_less.py: `python -m tests.examples.manual_allreduce_less_jobs NAME`."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.launch.args import start
from common.launch.place import Place
from common.launch.record import record
from common.launch.spawn import launch
from examples.manual_allreduce_sgd import train
from examples.manual_allreduce_sgd.averaging import Averaging
from examples.manual_allreduce_sgd.compress import ErrorFeedback, PowerSgd, TopK
from tests.examples.manual_allreduce_jobs import CPU, Args, cut_off_and_resumed, options, put, run_job

STEPS = 6
LESS = {
    "top-k": ("ring", {"compress": "top-k"}),
    "powersgd": ("ring", {"compress": "powersgd"}),
    "local-sgd": ("local-sgd", {}),
    "diloco": ("diloco", {}),
}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 8))


def gradients(step: int, rank: int, model: nn.Module) -> list[Tensor]:
    """Those of a rank, which any rank can compute."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def flat(tensors: list[Tensor]) -> Tensor:
    """In the order in which `Averaging` has the parameters."""
    return torch.cat([tensor.flatten() for tensor in tensors[::-1]])


def applied(way: Averaging, given: list[Tensor], model: nn.Module) -> Tensor:
    """What `average` makes of gradients."""
    for parameter, gradient in zip(model.parameters(), given, strict=True):
        parameter.grad = gradient.clone()
    way.average()
    return flat([p.grad for p in model.parameters() if p.grad is not None])


def nothing_is_lost(args: Args) -> None:
    """What was applied, and what the ranks still hold back, are the true means."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for kind, setting in ((TopK, 0.05), (PowerSgd, 1)):
        model = small_model()
        way: ErrorFeedback = kind(model, setting)  # ty: ignore[invalid-argument-type]
        total, true = torch.zeros_like(way.error), torch.zeros_like(way.error)
        for step in range(STEPS):
            mean = torch.stack([flat(gradients(step, other, model)) for other in range(size)]).mean(0)
            done = applied(way, gradients(step, rank, model), model)
            assert (done - mean).abs().max() > 0.1, "a part of it"
            total, true = total + done, true + mean
        held = way.error.clone()
        dist.all_reduce(held)
        torch.testing.assert_close(total + held / size, true, rtol=1e-4, atol=1e-5)


def exact(args: Args) -> None:
    """All elements are the gradient; and so is one thin product, if the gradient is one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_model()
    given = [gradients(0, other, model) for other in range(size)]
    mean = torch.stack([flat(one) for one in given]).mean(0)
    torch.testing.assert_close(applied(TopK(model, 1.0), given[rank], model), mean)
    for one in given:  # matrices whose columns are the same on all ranks: so is their mean's
        for number in (0, 2):
            one[number] = torch.outer(given[0][number][:, 0], one[number][0])
    mean = torch.stack([flat(one) for one in given]).mean(0)
    found = applied(PowerSgd(model, 2), given[rank], model)
    torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-5)


def largest(args: Args) -> None:
    """Top-k equals a loop over all ranks' gradients in one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_model()
    way = TopK(model, 0.1)
    held = [torch.zeros_like(way.error) for _ in range(size)]
    for step in range(STEPS):
        total = torch.zeros_like(way.error)
        for other in range(size):
            wanted = held[other] + flat(gradients(step, other, model))
            largest = wanted.abs().argsort(descending=True)[: way.k]
            total[largest] += wanted[largest]
            wanted[largest] = 0
            held[other] = wanted
        torch.testing.assert_close(applied(way, gradients(step, rank, model), model), total / size)
        torch.testing.assert_close(way.error, held[rank])


def layout(args: Args) -> None:
    """A gradient lies in memory as its parameter does: the fused SGD goes through both in the order of the memory."""
    torch.manual_seed(0)  # the same on all ranks
    for kind, setting in ((TopK, 1.0), (PowerSgd, 1)):
        model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        expected = model.weight.detach() * 2
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 2
        kind(model, setting).average()  # ty: ignore[invalid-argument-type]
        assert model.weight.grad is not None
        assert model.weight.grad.stride() == model.weight.stride()
        if kind is TopK:
            torch.testing.assert_close(model.weight.grad, expected)


def trainings(args: Args) -> None:
    """The four ways; and settings with which they equal another one."""
    momentum = {"outer_lr": 1.0, "outer_momentum": 0.0}
    runs = {
        **LESS,
        "ring": ("ring", {}),
        "meets at every step": ("local-sgd", {"every": 1}),
        "outer steps of 1": ("diloco", momentum),
    }
    for name, (way, flags) in runs.items():
        train.train(replace(options(args, way, **flags), out=args.folder / name), CPU)


def resumes(args: Args) -> None:
    """Each way: undisturbed, and cut off in the middle of H steps and resumed."""
    for name, (way, flags) in LESS.items():
        cut_off_and_resumed(args, name, way, **flags)


def checks(args: Args) -> None:
    """What needs no training."""
    for check in (nothing_is_lost, exact, largest, layout):
        check(args)
    dist.barrier()
    if dist.get_rank() == 0:
        put("holds")


JOBS = {"checks": checks, "trainings": trainings, "resumes": resumes}


def main(place: Place, args: Args) -> None:
    """Run the job in every process."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of a job."""
    run_job(JOBS, local_rank, place, args)


if __name__ == "__main__":
    start(Args, "tests.examples.manual_allreduce_less_jobs:main")
