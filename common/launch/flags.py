"""The flags that every program has, and what flags are checked with. No torch here."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from tyro.conf import arg

from common.launch.errors import UserError

MAY_CHANGE = "may change"
"""In a flag's `Annotated`: a resumed run may have another value. All other flags are compared."""
SPLIT = "split over the ranks"
"""In a flag's `Annotated`: a global batch, of which each rank takes an equal part."""
LONGEST = 1e9
"""The longest --timeout, in seconds: sockets and clocks take no more."""


@dataclass(frozen=True)
class MustExist:
    """In a flag's `Annotated`: it names a file or folder, which must be there.

    Attributes:
        names: what may be given in place of a path.
        remedy: what to do, in words.
    """

    names: tuple[str, ...] = ()
    remedy: str = "give the path of one that is there"


IDX = MustExist(
    ("digits", "mnist", "fashion-mnist"),
    "give digits, mnist, fashion-mnist, or a folder with idx files",
)


@dataclass(frozen=True)
class Launch:
    """Processes: who starts them, and how they find each other."""

    nproc: Annotated[int | None, arg(metavar="N", aliases=["--nproc-per-node"]), MAY_CHANGE] = None
    """Processes to start on this machine (default: 1)."""
    multiprocessing_distributed: Annotated[bool, MAY_CHANGE] = False
    """Start one process per device of this machine (on a CPU: one)."""
    world_size: Annotated[int, arg(metavar="NODES", aliases=["--nnodes"]), MAY_CHANGE] = -1
    """Nodes, each started by hand with the same --dist-url (default: WORLD_SIZE, else 1)."""
    rank: Annotated[int, arg(metavar="NODE", aliases=["--node-rank"]), MAY_CHANGE] = -1
    """Number of this node, from 0 (default: RANK, else 0)."""
    dist_url: Annotated[str | None, arg(metavar="URL"), MAY_CHANGE] = None
    """Where nodes meet: tcp://HOST:PORT of node 0, or env:// for MASTER_ADDR and MASTER_PORT."""
    dist_backend: Annotated[Literal["auto", "nccl", "gloo"], MAY_CHANGE] = "auto"
    """Backend of the collectives; auto is nccl on CUDA devices and gloo on the CPU."""
    device: Annotated[Literal["auto", "cuda", "cpu"], MAY_CHANGE] = "auto"
    """Device to train on; auto is CUDA when there is a device."""
    gpu: Annotated[int | None, arg(metavar="N"), MAY_CHANGE] = None
    """The one CUDA device to use, for a single process (default: that of the local rank)."""
    no_accel: Annotated[bool, MAY_CHANGE] = False
    """The same as --device cpu."""
    timeout: Annotated[float, arg(metavar="SECONDS"), MAY_CHANGE] = 120.0
    """Longest wait for another process, in seconds, before the run ends with an error."""
    threads: Annotated[int, arg(metavar="N"), MAY_CHANGE] = 0
    """CPU threads per process; 0 shares the cores of a machine among the processes on it."""

    def __post_init__(self) -> None:
        if self.nproc is not None and self.nproc < 1:
            raise UserError(f"--nproc {self.nproc}: at least 1 process is needed")
        if self.world_size != -1 and self.world_size < 1:
            raise UserError(f"--world-size {self.world_size}: the number of nodes is at least 1")
        if self.rank < -1:
            raise UserError(f"--rank {self.rank}: nodes are numbered from 0")
        if self.no_accel and (self.device == "cuda" or self.gpu is not None):
            raise UserError("--no-accel contradicts --device cuda and --gpu: leave one out")
        if self.gpu is not None and ((self.nproc or 1) > 1 or self.multiprocessing_distributed):
            raise UserError(
                f"--gpu {self.gpu} is for a single process; "
                f"CUDA_VISIBLE_DEVICES chooses devices for several"
            )
        if not 0 < self.timeout <= LONGEST:
            raise UserError(
                f"--timeout {self.timeout:g}: give a positive number of seconds, at most "
                f"{LONGEST:g}"
            )
        if self.gpu is not None and self.gpu < 0:
            raise UserError(f"--gpu {self.gpu}: devices are numbered from 0")
        if self.threads < 0:
            raise UserError(
                f"--threads {self.threads}: give a positive number, or 0 to share the cores"
            )
        if self.dist_backend == "nccl" and (self.device == "cpu" or self.no_accel):
            raise UserError(
                "--dist-backend nccl --device cpu: nccl moves CUDA tensors only; "
                "use gloo on the CPU"
            )

    @property
    def patience(self) -> timedelta:
        """The longest wait for another process: what `init_process_group` takes as `timeout`."""
        return timedelta(seconds=self.timeout)


@dataclass(frozen=True)
class Repeat:
    """Repeating and recording a run."""

    config: Annotated[Path | None, arg(metavar="FILE"), MAY_CHANGE] = None
    """Take flags from this YAML or JSON file, or from the result.json of a run; flags that are
    typed win."""
    save_config: Annotated[Path | None, arg(metavar="FILE"), MAY_CHANGE] = None
    """Write the flags of this run to this YAML file."""
    profile: Annotated[int, arg(metavar="STEPS"), MAY_CHANGE] = 0
    """Record so many steps of all ranks, after two: one trace, and what their time went into."""

    def __post_init__(self) -> None:
        at_least(0, profile=self.profile)


@dataclass(frozen=True)
class Watch(Repeat):
    """Watching, repeating and recording a run."""

    track: Annotated[Literal["no", "wandb", "mlflow"], MAY_CHANGE] = "no"
    """Send what metrics.jsonl holds to Weights & Biases or MLflow, too."""
    limit_steps: Annotated[int, arg(metavar="N"), MAY_CHANGE] = 0
    """End after this many optimizer steps, as a trial; 0 trains to the end."""
    print_freq: Annotated[
        int, arg(aliases=["-p", "--log-interval", "--log-step"], metavar="STEPS"), MAY_CHANGE
    ] = 0
    """Steps between lines with loss and speed; 0: a line per epoch."""
    keep: Annotated[int, arg(metavar="N"), MAY_CHANGE] = 2
    """Checkpoints that stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, limit_steps=self.limit_steps, print_freq=self.print_freq)
        at_least(1, keep=self.keep)


def at_least(least: int, **values: float | None) -> None:
    """Check flags (by their field names) against a lower bound.

    None, a default still to be chosen, passes; not-a-number does not.

    Raises:
        UserError: a flag is below the bound.
    """
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value}: give at least {least}")


def check_cpu_only(launch: Launch) -> None:
    """Refuse flags that choose a GPU, for a program that has nothing to do on one.

    Raises:
        UserError: one of them is given.
    """
    if launch.device == "cuda" or launch.gpu is not None or launch.dist_backend == "nccl":
        raise UserError(
            "this program works on the CPU, with gloo: leave out --device cuda, --gpu and "
            "--dist-backend nccl"
        )


def share(**values: float) -> None:
    """Check flags (by their field names) that are shares: from 0 to below 1.

    Raises:
        UserError: a flag is not a share.
    """
    for name, value in values.items():
        if not 0 <= value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: give a number from 0 to below 1")


def equal_parts(batch_size: int, parts: int, what: str | None = None) -> int:
    """The samples in each of the equal parts of a global batch.

    Args:
        batch_size: the flag of this name: samples in a global batch.
        parts: how many parts.
        what: the parts in words, for the message; by default "N ranks".

    Raises:
        UserError: the number of parts does not divide the batch.
    """
    if batch_size < 1 or batch_size % parts:
        nearest = max(1, round(batch_size / parts)) * parts
        raise UserError(
            f"--batch-size {batch_size} (global) cannot be divided by {what or f'{parts} ranks'}; "
            f"use {nearest}, for example"
        )
    return batch_size // parts


def fixed_flags(args: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the flags that a resumed run must have like the run before it.

    A new flag is one of them unless its type says `MAY_CHANGE`, so that none can be forgotten.

    Args:
        args: an instance of a flag class; nested flag classes are included.
    """
    hints = get_type_hints(type(args), include_extras=True)
    for field in fields(args):
        value = getattr(args, field.name)
        if is_dataclass(value):
            yield from fixed_flags(value)
        elif MAY_CHANGE not in getattr(hints[field.name], "__metadata__", ()):
            yield field.name, value if isinstance(value, (int, float, bool)) else str(value)
