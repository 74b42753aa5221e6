"""Jobs of several processes for test_manual_allreduce_sgd.py: `python -m tests.examples.manual_allreduce_jobs NAME`.

Starting processes takes seconds, and so each job does all that its processes can: every case, every algorithm.
"""

import contextlib
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from tyro.conf import OmitArgPrefixes, Positional

from common.launch.args import start
from common.launch.flags import Launch
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train import summary
from common.train.log import Log
from common.train.precision import Precision
from common.train.run import Run
from examples.manual_allreduce_sgd import allreduce, averaging, buckets, fast_ring, flat, train
from examples.manual_allreduce_sgd.args import Synchronous
from tests.examples.manual_allreduce_checks import DTYPES, MUTATIONS, Case, Checker, altered, check_gradients

WAYS = get_args(Synchronous)


@dataclass(frozen=True)
class Args:
    """The flags of the jobs."""

    name: Annotated[str, Positional]
    """Which job."""
    folder: Path = Path()
    """Where it may write."""
    dataset: Path = Path()
    """What it trains on."""
    launch: OmitArgPrefixes[Launch] = Launch()


def put(line: object) -> None:
    """Print a line at once."""
    os.write(1, f"{line}\n".encode())


def together(wrong: list[str]) -> list[str]:
    """What is wrong on any rank."""
    everybody: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, wrong)
    return [f"rank {rank}: {line}" for rank, lines in enumerate(everybody) for line in lines]


def properties(args: Args) -> None:
    """Hypothesis thinks out cases on rank 0, and all ranks compute them."""
    checker, world_size = Checker(), dist.get_world_size()
    if dist.get_rank() > 0:
        while True:
            shared: list[Any] = [None]
            dist.broadcast_object_list(shared)
            if shared[0] is None:
                return
            together(checker.check(shared[0]))
    sizes: set[int] = set()

    def ranks(size: int) -> Any:
        first = st.just(tuple(range(size)))
        return first | st.permutations(range(world_size)).map(lambda order: tuple(sorted(order[:size])))

    cases = st.builds(
        Case,
        ranks=st.integers(1, world_size).flatmap(ranks),
        length=st.integers(0, 9) | st.integers(0, 500),
        dtype=st.sampled_from(sorted(DTYPES)),
        layout=st.sampled_from(["flat", "column", "matrix", "transposed"]),
        seed=st.integers(0, 10**6),
        piece=st.sampled_from([8, 64, 1 << 22]),
    )

    @settings(max_examples=50, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases)
    def holds(case: Case) -> None:
        sizes.add(len(case.ranks))
        dist.broadcast_object_list([case])
        assert together(checker.check(case)) == []

    for size in range(1, world_size + 1):  # whatever hypothesis thinks of
        holds = example(Case(tuple(range(size)), 17, "float32", "flat", 1, 8))(holds)
    try:
        holds()
        assert sizes == set(range(1, world_size + 1))
        put(f"holds for {sorted(sizes)} ranks")
    finally:
        dist.broadcast_object_list([None])


def mutations(args: Args) -> None:
    """Every mutation is seen, and nothing is seen in the code as it is."""
    checker = Checker()
    everyone = tuple(range(dist.get_world_size()))
    cases = [Case(everyone, 24, "float64", layout, 1, 16) for layout in ("flat", "column")]
    ways = [way for way in WAYS if way != "ddp"]

    def wrong(name: str, module: types.ModuleType) -> list[str]:
        found: list[str] = []
        try:
            if name in ("allreduce", "fast_ring"):
                for case in cases:
                    found += checker.check(case, **{"textbook" if name == "allreduce" else "fast": module})
            else:
                for way in ways:
                    found += check_gradients(module, way)
        except AssertionError as error:
            found.append(f"assertion {error}")
        return together(found)

    for module in (allreduce, fast_ring, averaging, buckets, flat):
        name = module.__name__.rpartition(".")[2]
        assert wrong(name, module) == [], wrong(name, module)
    for title, name, old, new in MUTATIONS:
        seen = wrong(name, altered(name, old, new))
        if dist.get_rank() == 0:
            put(f"{'red' if seen else 'GREEN'}: {title}")


def options(args: Args, algorithm: Any, **others: Any) -> Any:
    """The flags of a small training."""
    defaults = train.Args(
        algorithm,
        dataset=str(args.dataset),
        epochs=3,
        batch_size=24,
        lr=0.1,
        bucket_mb=0.02 if algorithm == "bucketed" else 4.0,
        checkpoint_every=4,
        out=args.folder / algorithm,
        amp=Precision("fp32"),
    )
    return replace(defaults, **others)


CPU = torch.device("cpu")


def trainings(args: Args) -> None:
    """The same training by every algorithm, one after the other."""
    for way in WAYS:
        train.train(options(args, way), CPU)
    train.train(options(args, "ring", compress="bf16", out=args.folder / "bf16"), CPU)
    shared = args.folder / "shared-bf16"
    train.train(options(args, "shared-memory", compress="bf16", out=shared), CPU)


class CutOff(Exception):  # noqa: N818
    """The run is cut off."""


def cut(run: Run, loss: Tensor, original: Callable[[Run, Tensor], None] = Run.log) -> None:
    """Instead of `Run.log`: in step 15 the run is cut off."""
    original(run, loss)
    if run.state.step == 14:
        raise CutOff


def resumes(args: Args) -> None:
    """Each algorithm: undisturbed, and cut off in the middle of an epoch and resumed."""
    for way in WAYS:
        cut_off_and_resumed(args, way, way)


def cut_off_and_resumed(args: Args, way: str, algorithm: str, **flags: Any) -> None:
    """Train into the folder `way`; and, cut off in step 15 and resumed, into `way`-resumed."""
    train.train(options(args, algorithm, out=args.folder / way, **flags), CPU)
    out = args.folder / f"{way}-resumed"
    with contextlib.suppress(CutOff), patch.object(Run, "log", cut):
        train.train(options(args, algorithm, out=out, **flags), CPU)
    dist.barrier()
    train.train(options(args, algorithm, out=out, resume="auto", **flags), CPU)


def orders(args: Args) -> None:
    """In which order trainings with some seeds take the samples in each epoch."""
    original = train.partition_dataset
    for seed in (1, 1, 2):
        taken: list[Any] = []

        def partition_dataset(*settings: Any, taken: list[Any] = taken, **named: Any) -> Any:
            loader: Any = original(*settings, **named)
            taken.append(list(loader.batch_sampler))
            return loader

        with patch.object(train, "partition_dataset", partition_dataset):
            train.train(options(args, "flat", epochs=2, seed=seed), CPU)
        put(taken)


JOBS = {
    "properties": properties,
    "mutations": mutations,
    "trainings": trainings,
    "resumes": resumes,
    "orders": orders,
}


def main(place: Place, args: Args) -> None:
    """Run the job in every process."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of a job."""
    run_job(JOBS, local_rank, place, args)


def run_job(jobs: Mapping[str, Callable[[Args], None]], local_rank: int, place: Place, args: Args) -> None:
    """Join, and do what the job's name says."""
    place.export(local_rank)
    dist.init_process_group("gloo", init_method=JOB, timeout=args.launch.patience)
    # Every example draws and writes these, and is tested for it: half a second for each of these many runs.
    # In these processes only: whoever imports this module keeps them.
    undrawn = patch.object(summary, "draw_curves", lambda *_: None)
    with undrawn, patch.object(Log, "write_events", lambda _: None):
        jobs[args.name](args)
    dist.destroy_process_group()


if __name__ == "__main__":
    start(Args, "tests.examples.manual_allreduce_jobs:main")
