"""Initialize a rank and report its errors. docs/en/launchers.md lists the exit codes."""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from joblib import cpu_count

from common import hang, rendezvous
from common.launch import LOST, STOP_SIGNALS, NodeArgs, Place, RunArgs, UserError, place

# Substrings of gloo and NCCL errors when a process exits or does not respond within --timeout.
LOST_WORDS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "imed out", "imeout"),
    *("Failed to recv", "remote process exited", "communicator was aborted"),
)


class Stopped(BaseException):
    """Raised when a signal stops the run; not an `Exception`, which libraries may catch."""

    def __init__(self, signum: int, saved: str = "nothing to save") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}: {saved}")
        self.signum = signum


def init_distributed(args: RunArgs, local_rank: int) -> torch.device:
    """Join the process group and return this rank's device. Every rank calls this."""
    here = place(args, local_rank)
    device, backend = choose_device(args, here)
    dist.init_process_group(
        backend,
        store=rendezvous.wait_for_ranks(here, args.timeout),
        rank=here.rank,
        world_size=here.world_size,
        timeout=timedelta(seconds=args.timeout),
        device_id=device if "nccl" in backend else None,  # NCCL connects now, not in step 1
    )
    return device


def choose_device(args: RunArgs, here: Place) -> tuple[torch.device, str]:
    """Return this rank's device and backend, and set its number of CPU threads."""
    # More threads than cores slow a rank down. The number affects the last bits of a sum, so it
    # must not depend on the launcher: torchrun's default, OMP_NUM_THREADS=1, is ignored.
    variable = os.environ.get("OMP_NUM_THREADS", "")
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and here.local_world_size > 1
    ignored = not variable.isdigit() or (variable == "1" and by_torchrun)
    threads = cpu_count() // here.local_world_size if ignored else int(variable)
    torch.set_num_threads(max(1, threads))
    if here.local_world_size == here.world_size:  # use no socket that other machines can reach
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    wanted = args.dist_backend if isinstance(args, NodeArgs) else "auto"
    devices = 0 if args.device == "cpu" else torch.cuda.device_count()
    if args.device == "cuda" and not devices:
        raise UserError("--device cuda: torch found no CUDA device; use --device cpu")
    if wanted == "nccl" and not devices:
        raise UserError("--dist-backend nccl requires CUDA devices; use gloo")
    if not devices:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", here.local_rank % devices)
    torch.cuda.set_device(device)
    # NCCL rejects two ranks on one device. Under srun, each rank may see only its own device.
    shared = here.local_world_size > devices and not (devices == 1 and "SLURM_PROCID" in os.environ)
    if wanted == "gloo" or (wanted == "auto" and shared):
        return device, "gloo"
    return device, "cpu:gloo,cuda:nccl"  # collectives on CPU tensors use gloo


def local_batch_size(batch_size: int, ranks: int) -> int:
    """Return the samples per rank; the global batch size must be divisible by `ranks`."""
    if batch_size % ranks:
        near = -(-batch_size // ranks) * ranks
        raise UserError(
            f"--batch-size {batch_size} is not divisible by {ranks} ranks; use {near}, for example"
        )
    return batch_size // ranks


def print0(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def record(main_worker: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a rank's main function, to print an error once per job and set the exit code."""

    @functools.wraps(main_worker)
    def recorded(local_rank: int, args: Any) -> Any:
        faulthandler.enable()  # gloo aborts a rank that receives a message of an unexpected size
        reports = args.out / "hang"
        threading.Thread(target=_watch, args=(hang.install(reports), reports), daemon=True).start()
        # Forked loader workers share the dataset with their rank and exit with it.
        multiprocessing.set_start_method("fork", force=True)
        try:
            for signum in STOP_SIGNALS:
                signal.signal(signum, _stop)
            # The fork server blocks these signals; one may already be pending.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            return main_worker(local_rank, args)
        except (Exception, Stopped) as error:
            # Before they join, all ranks on this machine fail in the same way. Local rank 0 reports
            # the error; then the launcher's signal kills the other ranks.
            silent = rendezvous.joined is None and local_rank > 0
            for signum in STOP_SIGNALS:
                signal.signal(signum, signal.SIG_DFL if silent else lambda *_: None)
            # Limit the time: if the store's host is frozen, requests block.
            threading.Timer(30, os._exit, (LOST,)).start()
            message, code = _explain(error, reports)
            if silent and code > 128:
                os._exit(code)
            if silent:
                time.sleep(min(15, args.timeout / 2))
            if _is_first_error():
                print(message, file=sys.stderr, flush=True)
            if os.environ.get("WORLD_SIZE", "1") != "1":
                time.sleep(1)  # the others may still read rank 0's store; `error` keeps it open
            sys.stdout.flush()
            # sys.exit would run a process group's destructors, which may wait for other ranks.
            os._exit(code)

    return recorded


def _stop(signum: int, _: FrameType | None) -> None:
    # Ctrl-C arrives twice: from the terminal and the launcher. With SIG_IGN, Python would warn
    # about a signal that is already pending.
    signal.signal(signum, lambda *_: None)
    raise Stopped(signum)


def _explain(error: BaseException, reports: Path) -> tuple[str, int]:
    """Return the message and the exit code for an error."""
    if isinstance(error, UserError):  # a loader worker's message follows its traceback
        return f"error: {str(error).splitlines()[-1].split('UserError: ')[-1]}", 2
    if isinstance(error, Stopped):
        return str(error), 128 + error.signum
    if isinstance(error, TimeoutError):
        return f"error: {error}", LOST
    rank, text = os.environ.get("RANK", "?"), str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in LOST_WORDS):
        timed_out = "imed out" in text or "imeout" in text
        first = text.splitlines()[0]
        what = "the other ranks do not respond" if timed_out else f"lost a connection: {first}"
        found = hang.after_loss(reports, error, rendezvous.joined)
        return "\n".join([f"error: rank {rank}: {what}", *found]), LOST
    return f"error: rank {rank}: {''.join(traceback.format_exception(error))}", 1


def _is_first_error() -> bool:
    """Return True if no other rank has reported an error; later errors are only consequences."""
    store = rendezvous.joined
    key = f"error/{os.environ.get('GROUP_RANK', '')}"  # under torchrun, each node has its own log
    with contextlib.suppress(RuntimeError):
        return store is None or store.add(key, 1) == 1
    return True  # the store's host has exited: reporting twice is better than not at all


def _watch(signals: int, reports: Path) -> None:
    """Answer SIGUSR1; exit when the parent is killed, because nothing else would end this rank."""
    parent, agent = multiprocessing.parent_process(), os.getppid()
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    while True:
        if select.select([signals], [], [], 0.5)[0]:
            hang.answer(signals, reports)
        if not parent.is_alive() if parent else elastic and os.getppid() != agent:
            os._exit(1)
