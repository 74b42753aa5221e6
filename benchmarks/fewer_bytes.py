"""What is lost when ranks send less: bytes against accuracy, by hand and by torch's own hooks.

    python -m benchmarks.fewer_bytes           # a few minutes; a busy machine does no harm
    python -m benchmarks.fewer_bytes --seeds 1 --epochs 1

Each way is `examples.manual_allreduce_sgd` with other flags, or with DistributedDataParallel and a
communication hook of torch. The seed decides parameters and order; all ways have the same seeds.
Bytes are those that a rank sends in a step, counted by the ways by hand; of torch's hooks, those of
a ring that carries what the hook sends. No time is measured: on one machine, nothing is saved.
"""

import contextlib
import io
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import RanksMeasurement, facts, medians, save
from benchmarks.ranks import on_ranks
from common.launch.args import start
from common.launch.flags import at_least
from common.launch.place import Place
from common.train import summary
from common.train.log import Log
from common.train.precision import Precision
from examples.manual_allreduce_sgd import train
from examples.manual_allreduce_sgd.averaging import Ddp

FULL = "ring, fp32"
BY_HAND: dict[str, dict[str, Any]] = {
    FULL: {},
    "ring, bf16": {"compress": "bf16"},
    "ring, fp16": {"compress": "fp16"},
    **{f"top-k, {100 * k:g} %": {"compress": "top-k", "share": k} for k in (0.1, 0.01, 0.001)},
    **{f"powersgd, rank {r}": {"compress": "powersgd", "matrix_rank": r} for r in (4, 2, 1)},
    **{f"local-sgd, {h} steps": {"algorithm": "local-sgd", "every": h} for h in (4, 15, 60)},
    **{f"diloco, {h} steps": {"algorithm": "diloco", "every": h} for h in (4, 15, 60)},
}
TORCHS = (
    "torch, DDP",
    "torch, bf16",
    "torch, powersgd 4",
    "torch, powersgd 2",
    "torch, powersgd 1",
)


@dataclass(frozen=True, kw_only=True)
class Args(RanksMeasurement):
    """The flags of this program."""

    seeds: int = 5
    """Trainings of each way."""
    epochs: int = 3
    """Passes over the training set of each."""
    ranks: int = 4
    """Processes."""
    dataset: str = "digits"
    """digits, or a folder with idx files."""
    batch: int = 24
    """GLOBAL batch size."""
    lr: float = 0.1
    """Learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, seeds=self.seeds, epochs=self.epochs, batch=self.batch)
        at_least(2, ranks=self.ranks)


class Hooked(Ddp):
    """DistributedDataParallel with a communication hook of torch, or with none."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__(model)
        ddp = cast("DistributedDataParallel", self.model)
        length = sum(parameter.numel() for parameter in self.parameters)
        self.per_step, self.state = 4.0 * length, None
        if "bf16" in name:
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
            self.per_step /= 2
        elif "powersgd" in name:
            self.state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=int(name[-1]), start_powerSGD_iter=2
            )
            ddp.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)

    def average(self) -> None:
        """Torch has done it; add what a ring would have carried."""
        if self.state is not None:
            _, _, sent = self.state.compression_stats()  # numbers since the start
            self.bytes_sent = round(4 * sent * 2 * (self.world_size - 1) / self.world_size)
        else:
            share = 2 * (self.world_size - 1) / self.world_size
            self.bytes_sent += round(self.per_step * share)


def measure(args: Args, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Accuracies, and bytes per step, of each way. Every rank calls this."""
    torch.set_num_threads(1)
    shared: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    found: dict[str, dict[str, list[float]]] = {}
    for name in (*BY_HAND, *TORCHS):
        for seed in range(args.seeds):
            out = Path(shared[0], f"{name}-{seed}")
            result = train_once(args, name, seed, out, device)
            if dist.get_rank() == 0:
                of = found.setdefault(name, {"accuracy": [], "bytes_per_step": []})
                of["accuracy"].append(result["metrics"]["accuracy"])
                of["bytes_per_step"].append(result["bytes_sent"] / result["steps"])
        if dist.get_rank() == 0:
            print(f"{name}: {medians(found[name], 4)}", flush=True)
    return found


def train_once(args: Args, name: str, seed: int, out: Path, device: torch.device) -> dict[str, Any]:
    """The result of one training. Every rank calls this."""
    flags = train.Args(
        dataset=args.dataset,
        epochs=args.epochs,
        batch_size=args.batch,
        lr=args.lr,
        seed=seed,
        out=out,
        amp=Precision("fp32"),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(summary, "draw_curves", lambda *_: None))
        stack.enter_context(patch.object(Log, "write_events", lambda _: None))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if name in TORCHS:
            hooked = lambda _args, model, *_: Hooked(model, name)  # noqa: E731
            stack.enter_context(patch.object(train, "chosen", hooked))
        train.train(replace(flags, **BY_HAND.get(name, {})), device)
    return json.loads((out / "result.json").read_text()) if dist.get_rank() == 0 else {}


def main(place: Place, args: Args) -> None:
    """Train in every way, and write the result."""
    result: dict[str, Any] = facts("torch") | {
        "ranks": args.ranks,
        "seeds": args.seeds,
        "epochs": args.epochs,
        "batch": args.batch,
        "dataset": args.dataset,
    }
    found: dict[str, dict[str, Any]] = on_ranks(args.ranks, place, measure, args)
    full = medians(found[FULL])["bytes_per_step"]
    for of in found.values():
        middle = medians(of, 4)
        of["medians"] = middle | {"times_fewer_bytes": round(full / middle["bytes_per_step"], 2)}
    result["ways"] = found
    save("fewer_bytes", result, args.out)


if __name__ == "__main__":
    start(Args, "benchmarks.fewer_bytes:main", ["benchmarks.harness"])
