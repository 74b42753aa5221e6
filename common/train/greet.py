"""What a run says at its start, and how its log begins."""

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from common.launch.collectives import assert_same_on_all_ranks
from common.launch.config import all_flags
from common.launch.device import ranks_share_devices, used_devices
from common.launch.place import current

if TYPE_CHECKING:
    from common.train.run import Run


def program(args: Any) -> str:
    """The name of a program, from the package of its flags."""
    return str(type(args).__module__.split(".")[-2])


def backend() -> str:
    """The backend of the default group, in a word."""
    return "nccl" if "nccl" in str(dist.get_backend_config()) else str(dist.get_backend())


def too_large(batch_size: int, data: Any) -> str:
    """A warning, if the batch is larger than the data; otherwise nothing."""
    samples = getattr(data, "facts", {}).get("train_samples", batch_size)
    if batch_size <= samples:
        return ""
    return (
        f"batch {batch_size:,} is larger than the training set ({samples:,} samples): "
        f"an epoch is one step; give a smaller --batch-size"
    )


def greet(run: "Run") -> None:
    """Say in one line what a run uses. Every rank calls this.

    Raises:
        UserError: nodes would compute with different precisions.
    """
    remedy = "auto is what a node's processor computes natively: give one for all"
    assert_same_on_all_ranks(run.amp.name, "--precision", remedy)
    place, world_size, cuda = current(), dist.get_world_size(), run.device.type == "cuda"
    if not cuda and place.flags.device == "auto" and not place.flags.no_accel:
        run.warn("no CUDA device was found: training on the CPU, which is slower")
    for warning in place.warnings:
        run.warn(warning)
    if run.amp.deterministic and cuda:
        run.warn("--deterministic makes CUDA kernels repeatable, and the run considerably slower")
    device = torch.cuda.get_device_name(run.device) if cuda else "cpu"
    shared = cuda and ranks_share_devices()
    count = f"{world_size} ranks share {used_devices()}" if shared else f"{world_size}"
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    shares = run.options.shares or f"{ranks} x {run.batch_size // world_size}"
    run.print0(
        f"{program(run.args)}: {run.options.what or run.data}, {count} x {device} with "
        f"{torch.get_num_threads()} thread(s), {place.num_nodes} node(s), "
        f"launcher {place.launcher}, backend {backend()}, {run.amp.name}"
        f"{', channels last' if run.amp.channels_last else ''}, batch {run.batch_size} = {shares}"
    )


def begin(run: "Run", resumed: bool) -> None:
    """Begin the curves and the tracker, or go on with the curves of the run that is resumed."""
    log = run.meters.log
    if resumed and getattr(run.args, "init", None):
        run.warn(f"--init {run.args.init}: not used, because the run continues from a checkpoint")
    run.meters.last_step = run.args.watch.limit_steps or sys.maxsize
    log.start(run.state.step, resumed, run.state.evaluated == run.state.step)
    if log.active:
        name, kind = program(run.args), run.args.watch.track
        log.tracker.start(kind, name, used_arguments(run), log.out)


def used_arguments(run: "Run") -> dict[str, Any]:
    """All flags with the values that were used: a default that is chosen later is its choice."""
    flags = all_flags(run.args)
    chosen = getattr(run.data, "facts", {}) | run.config
    words = {True: "yes", False: "no"}  # of a flag that also knows auto
    for name in flags.keys() & chosen.keys():
        value = chosen[name]
        flags[name] = words[value] if isinstance(flags[name], str) and value in words else value
    return flags
