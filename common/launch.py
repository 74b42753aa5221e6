"""Read the flags without importing torch, and start the ranks. See docs/en/launchers.md."""

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import tyro
from tyro.conf import arg

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOST = 75  # exit code: another process was lost or never joined
INIT_METHOD = "INIT_METHOD"  # environment variable: `start` passes the init method to its ranks


class UserError(Exception):
    """An error that the user can fix, printed as one line per job; the exit code is 2."""


@dataclass(frozen=True)
class RunArgs:
    """The flags that all examples share."""

    epochs: int = 10
    """Passes over the training set."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 128
    """GLOBAL batch size in samples, split evenly over the ranks."""
    nproc: Annotated[int, arg(metavar="N")] = 1
    """Processes to start on this machine; omit this flag under torchrun or srun."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto selects CUDA if torch finds a device."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto selects bf16 if the device supports it natively, else fp32."""
    deterministic: bool = False
    """Use deterministic CUDA kernels, at a cost in speed; CPU runs are always deterministic."""
    workers: Annotated[int, arg(aliases=["-j"])] = 0
    """Data-loading processes per rank; 0 loads data in the rank's own process."""
    seed: int = 0
    """Seed for the parameters and the sample order."""
    timeout: Annotated[float, arg(metavar="SECONDS")] = 120.0
    """Time to wait for another rank before the run fails."""
    out: Path = Path("runs/run")
    """Folder for checkpoints, metrics and the result."""
    resume: Annotated[str, arg(metavar="auto|PATH|no")] = "no"
    """auto (newest checkpoint in --out), the path of a checkpoint or weights file, or no."""
    checkpoint_every: Annotated[int, arg(metavar="STEPS")] = 200
    """Steps between checkpoints; every epoch also ends with a checkpoint."""
    log_every: Annotated[int, arg(metavar="STEPS", aliases=["-p", "--print-freq"])] = 0
    """Steps between printed losses; 0 prints only one line per epoch."""
    profile: Annotated[int, arg(metavar="STEPS")] = 0
    """Steps to trace with torch.profiler, after the first 10."""


@dataclass(frozen=True)
class NodeArgs(RunArgs):
    """The shared flags, and the multi-node flags from pytorch/examples."""

    world_size: Annotated[int, arg(metavar="NODES")] = 1
    """Number of nodes; start the program on each node with the same --dist-url."""
    rank: Annotated[int, arg(metavar="NODE")] = 0
    """Index of this node, starting at 0."""
    dist_url: Annotated[str, arg(metavar="tcp://HOST:PORT")] = "auto"
    """Address of node 0; auto uses a file on this machine."""
    dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto selects nccl if every rank has its own CUDA device, else gloo."""
    multiprocessing_distributed: bool = False
    """Start one process per CUDA device of this machine."""


class Place(NamedTuple):
    """The ranks and world sizes of a process, as torchrun defines them, and its init method."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    init_method: str


def launched() -> bool:
    """Return True if torchrun or srun started this process."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE")) or launched_by_srun()


def launched_by_srun() -> bool:
    """Return True if srun started this process as one of several tasks."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))  # 1 in a shell of `srun --pty`
    return tasks > 1 and "TORCHELASTIC_RUN_ID" not in os.environ


def place(args: RunArgs, local_rank: int) -> Place:
    """Return this process's ranks and world sizes, and set torchrun's environment variables.

    `local_rank` is this process's index on its machine; it is ignored under torchrun and srun.
    """
    env = os.environ
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if launched():
        if not env.get("RANK"):
            env |= _slurm_variables()
        if missing := [n for n in (*names, "MASTER_ADDR", "MASTER_PORT") if n not in env]:
            raise UserError(f"RANK is set without {', '.join(missing)}; use torchrun or unset RANK")
        url = f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    else:
        job = args if isinstance(args, NodeArgs) else NodeArgs()  # the default is a single node
        env |= {"RANK": str(job.rank * args.nproc + local_rank), "LOCAL_RANK": str(local_rank)}
        env |= {"WORLD_SIZE": str(job.world_size * args.nproc), "LOCAL_WORLD_SIZE": str(args.nproc)}
        url = env.get(INIT_METHOD, "") if job.dist_url == "auto" else job.dist_url
    return Place(*(int(env[name]) for name in names), url)


def _slurm_variables() -> dict[str, str]:
    """Return torchrun's variables for this task of srun."""
    env = os.environ
    if cores := env.get("SLURM_CPUS_PER_TASK"):  # srun may bind each rank to its own cores
        env.setdefault("OMP_NUM_THREADS", cores)
    # The first host of gpu[03-05,9],login is gpu03. The port is derived from the job ID, so that
    # two jobs on one host do not collide.
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]
    port = 20_000 + int(env["SLURM_JOB_ID"]) % 10_000
    return {
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(len(env["SLURM_GTIDS"].split(","))),  # this node's ranks: "0,1"
        "MASTER_ADDR": env.get("MASTER_ADDR", host),
        "MASTER_PORT": env.get("MASTER_PORT", str(port)),
    }


def start(args_class: type[RunArgs], module: str) -> NoReturn:
    """Read the flags, run the ranks on this machine, and exit with their exit code.

    `module` defines `main(args)`, which starts the ranks, and `main_worker(local_rank, args)`,
    which runs one. It imports torch, so it is imported after the flags are read.
    """
    args = read_args(args_class, module.removesuffix(".train"))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C while torch is imported
    local_rank = code = 0
    if launched():
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    else:
        if isinstance(args, NodeArgs) and args.multiprocessing_distributed:
            import torch  # importing it takes seconds; only this flag needs it here

            args = replace(args, nproc=max(1, torch.cuda.device_count()))
        print(f"starting {args.nproc} process(es) ...", flush=True)
    if args.nproc == 1:  # always true under torchrun and srun
        importlib.import_module(module).main_worker(local_rank, args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            # Use a file, because a port could be in use, or be accessible to other machines.
            os.environ[INIT_METHOD] = f"file://{folder}/rendezvous"
            _start_fork_server(module)
            code = _spawn(importlib.import_module(module), args)
    sys.stdout.flush()
    os._exit(code)  # freeing all Python objects would take 1.5 s


def read_args(args_class: type[RunArgs], program: str) -> Any:
    """Parse the command line into an instance of `args_class`; only rank 0 reports errors."""
    variable = "LOCAL_RANK" if "GROUP_RANK" in os.environ else "RANK"  # one log per torchrun node
    rank = int(os.environ.get(variable) or os.environ.get("SLURM_PROCID", "0"))
    try:
        with contextlib.redirect_stderr(io.StringIO() if rank else sys.stderr), one_line_errors():
            return _checked(tyro.cli(args_class, prog=f"python -m {program}"))
    except SystemExit as stop:
        if rank and stop.code:
            time.sleep(5)  # torchrun kills all ranks when one exits; let rank 0 report first
        raise


def _checked(args: Any) -> Any:
    for name in ("epochs", "batch_size", "nproc", "checkpoint_every", "timeout"):
        if vars(args)[name] <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be positive, got {vars(args)[name]}")
    if isinstance(args, NodeArgs) and not 0 <= args.rank < args.world_size:
        raise UserError(f"--rank must be from 0 to {args.world_size - 1}, got {args.rank}")
    if isinstance(args, NodeArgs) and args.world_size > 1 and args.dist_url == "auto":
        raise UserError("--world-size needs --dist-url tcp://HOST:PORT, the address of node 0")
    if args.nproc > 1 and launched():
        raise UserError("--nproc has no effect under torchrun or srun; remove it or unset RANK")
    if len(os.fsencode(tempfile.gettempdir())) > 70 and (args.nproc > 1 or args.workers):
        raise UserError("TMPDIR is longer than 70 bytes, too long for sockets; use TMPDIR=/tmp")
    return replace(expand_home(args), resume=str(Path(args.resume).expanduser()))


def expand_home(args: Any) -> Any:
    """Expand ~ in paths, because the shell does not expand it in quotes or in --out=~/runs."""
    paths = {name: path for name, path in vars(args).items() if isinstance(path, Path)}
    return replace(args, **{name: path.expanduser() for name, path in paths.items()})


@contextlib.contextmanager
def one_line_errors() -> Generator[None]:
    """Print a UserError as one line and exit with code 2, in code that `record` does not cover."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _start_fork_server(module: str) -> None:
    """Import torch in a server that forks all ranks; the import does not initialize CUDA."""
    multiprocessing.set_forkserver_preload([module, "torch._dynamo"])
    # Ctrl-C and `timeout` signal the whole process group, but the helper processes must outlive
    # the ranks. The helpers inherit the ignored signal and the signal mask set here.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    resource_tracker.ensure_running()  # before the mask, because ensure_running unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _spawn(program: ModuleType, args: RunArgs) -> int:
    """Start the ranks and wait for them; return the exit code of the rank that failed first."""
    from torch.multiprocessing import ProcessExitedException  # importing torch takes seconds

    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # the ranks report errors

    def forward(signum: int, _: FrameType | None) -> None:
        """Forward a signal to the ranks; on a stop signal, they save and exit."""
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signum)

    for signum in (*STOP_SIGNALS, signal.SIGUSR1):
        signal.signal(signum, forward)
    try:
        program.main(args)
    except ProcessExitedException as error:
        if error.signal_name == "SIGABRT":  # NCCL's watchdog, after a timeout
            return LOST
        if error.signal_name and -error.exit_code not in STOP_SIGNALS:
            text = f"local rank {error.error_index} was killed by {error.signal_name}"
            print(f"error: {text}; repeat the command with --resume auto", file=sys.stderr)
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0
