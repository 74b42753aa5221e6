"""Let the ranks of a job join, and report their errors. docs/en/launchers.md lists exit codes."""

import contextlib
import faulthandler
import functools
import hashlib
import multiprocessing
import os
import platform
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from joblib import cpu_count

from common import hang, launch
from common.launch import LOST, STOP_SIGNALS, NodeArgs, Place, RunArgs, UserError, place

# Substrings of gloo and NCCL errors when a process exits or does not respond within --timeout.
LOST_WORDS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "imed out", "imeout"),
    *("Failed to recv", "remote process exited", "communicator was aborted"),
)

joined: dist.Store | None = None  # `record` uses it to select the rank that reports an error


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
        store=wait_for_ranks(here, args.timeout),
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
    shared = here.local_world_size > devices and not (devices == 1 and launch.launched_by_srun())
    if wanted == "gloo" or (wanted == "auto" and shared):
        return device, "gloo"
    return device, "cpu:gloo,cuda:nccl"  # collectives on CPU tensors use gloo


def wait_for_ranks(here: Place, seconds: float) -> dist.Store:
    """Wait until all ranks have joined, and return their store. Every rank calls this.

    Raises:
        TimeoutError: ranks are missing after `seconds`; the message names them.
        UserError: the port is in use, or the ranks were started with different world sizes.
    """
    global joined
    if here.world_size == 1:
        return dist.HashStore()
    joined = _join(_connect(here, seconds), here, seconds)
    return joined


def _connect(here: Place, seconds: float) -> dist.Store:
    if here.init_method.startswith("file://"):
        return dist.FileStore(here.init_method.removeprefix("file://"), here.world_size)
    host, _, port = here.init_method.removeprefix("tcp://").rpartition(":")
    address, timeout = (host.strip("[]"), int(port)), timedelta(seconds=seconds)
    is_host = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_host:
        _await_host(address, seconds)
    try:
        return dist.TCPStore(*address, is_master=is_host, timeout=timeout, wait_for_workers=False)
    except dist.DistNetworkError:
        raise UserError(f"port {port} is already in use; choose a different port") from None


def _await_host(address: tuple[str, int], seconds: float) -> None:
    """Wait until the store's host accepts connections; the host's DNS name may not exist yet."""
    for _ in _attempts(seconds):  # TCPStore also waits, but prints C++ frames on failure
        with contextlib.suppress(OSError):
            return socket.create_connection(address, timeout=1).close()
    text = f"node 0 did not accept connections at {address[0]}:{address[1]} within {seconds:g} s"
    raise TimeoutError(f"{text}; check the address, the port and the firewall")


def _attempts(seconds: float) -> Iterator[None]:
    """Yield at growing intervals for the given number of seconds."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
        pause = min(0.5, 2 * pause)


def _join(store: dist.Store, here: Place, seconds: float) -> dist.Store:
    """Join the current attempt to run the job; return a view of the store for this attempt.

    torchrun keeps one store across all restarts, so the store still contains addresses of exited
    processes. Each process therefore registers under a random ID, and rank 0 publishes the list of
    IDs. Once every rank has acknowledged a list, that list defines the job.
    """
    own_id = f"{secrets.token_hex(8)}/{here.world_size}"
    keys = expected = [f"participant/{rank}" for rank in range(here.world_size)]
    store.set(keys[here.rank], own_id)
    for _ in _attempts(seconds):
        if here.rank == 0 and store.check(keys):
            store.set("participants", b" ".join(store.multi_get(keys)).decode())
        ids = store.get("participants").split() if store.check(["participants"]) else []
        if own_id.encode() in ids:
            _check_world_sizes(ids)
            job = hashlib.sha256(b" ".join(ids)).hexdigest()[:16]
            expected = [f"{job}/{rank}" for rank in range(here.world_size)]
            store.set(expected[here.rank], f"{platform.node()} {os.getpid()}")  # for hang.py
            if store.check(expected):
                return dist.PrefixStore(job, store)
    _check_world_sizes(store.multi_get([key for key in keys if store.check([key])]))
    missing = ", ".join(str(rank) for rank, key in enumerate(expected) if not store.check([key]))
    raise TimeoutError(f"rank {missing} of {here.world_size} did not join within {seconds:g} s")


def _check_world_sizes(ids: list[bytes]) -> None:
    sizes = sorted({int(participant.rpartition(b"/")[2]) for participant in ids})
    if len(sizes) > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:  # elastic jobs may be resized
        raise UserError(f"world sizes differ: {sizes}; use the same flags on all nodes")


def local_batch_size(batch_size: int, ranks: int) -> int:
    """Return the samples per rank; the global batch size must be divisible by `ranks`."""
    if batch_size % ranks:
        near = -(-batch_size // ranks) * ranks
        raise UserError(f"--batch-size {batch_size} is not divisible by {ranks} ranks; use {near}")
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
            silent = joined is None and local_rank > 0
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
        if text.startswith("DataLoader timed out"):
            what = "the data loader does not respond; check the disk, --workers and --timeout"
        found = hang.after_loss(reports, error, joined) if joined is not None else []
        return "\n".join([f"error: rank {rank}: {what}", *found]), LOST
    return f"error: rank {rank}: {''.join(traceback.format_exception(error))}", 1


def _is_first_error() -> bool:
    """Return True if no other rank has reported an error; later errors are only consequences."""
    key = f"error/{os.environ.get('GROUP_RANK', '')}"  # under torchrun, each node has its own log
    with contextlib.suppress(RuntimeError):
        return joined is None or joined.add(key, 1) == 1
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
