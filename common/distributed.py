"""Processes that form a world: started, joined, watched, stopped together.

An example that is about something else than starting processes calls `launch(main_worker, place, args)`.
`examples/mnist_ddp_spawn` writes out the same steps with the pieces below.
"""

import contextlib
import datetime
import json
import multiprocessing as std_mp
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from common.errors import RETRY, Absent, Lost, Stopped, UserError, note
from common.flags import fail
from common.launcher import Launch, Place
from common.seed import random_state, restore_random_state

__all__ = [
    "Launch",
    "Stop",
    "World",
    "agree",
    "end_with_parent",
    "from_main",
    "gather",
    "launch",
    "main_first",
    "meet",
    "say",
    "settle",
    "supervise",
    "taking_part",
]

Value = TypeVar("Value")
STOPPING = (signal.SIGINT, signal.SIGTERM)
# What the backends' errors say when another process died, or was silent for longer than --timeout.
LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "timeout caused pair closure")
# What else can be said in a line: words of the error's message, and what to do.
REMEDIES = {
    "shared memory": "more shared memory (a container's --shm-size), or --workers 0",
    "DataLoader worker (pid": "more memory, or --workers 0",
    "out of memory": "a smaller --batch-size, or more processes",
    "allocate memory": "a smaller --batch-size, or more processes",
}
# Seconds that workers get to finish a step and save after a signal, before they are killed; torchrun obeys the same.
GRACE = float(os.environ.get("PET_SHUTDOWN_TIMEOUT", 30))


@dataclass(frozen=True)
class World:
    """What one process knows about the job that it is part of."""

    rank: int
    size: int
    local_rank: int
    node: int
    nodes: int
    device: torch.device
    backend: str
    """`gloo`, or `nccl` (collectives on CPU tensors then still go through gloo)."""
    timeout: datetime.timedelta
    cores: int
    """CPU cores that this process may use, its share of the machine's."""
    store: dist.Store
    place: Place

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes, logs and draws."""
        return self.rank == 0

    @property
    def group_backend(self) -> str:
        """The backend argument of `init_process_group`: one per kind of device."""
        return "cpu:gloo,cuda:nccl" if self.backend == "nccl" else self.backend


# ---------------------------------------------------------------------------------------- starting processes


@contextlib.contextmanager
def meet(place: Place) -> Generator[Place]:
    """Host the store at which the workers of a job meet, in the process that spawns them.

    The socket is bound here and handed to the store: a store that binds by itself listens on all interfaces, and a
    free port that is looked up first can be taken before it is used. It listens on loopback when all processes
    are on one machine. Nodes other than the first only pass through.

    Raises:
        SystemExit: code 2, the port of `--dist-url` is in use.
    """
    if not place.spawns:
        yield place
        return
    if place.node != 0:
        with _signals_wait():
            yield place
        return
    try:
        listener = _listen(place)
    except UserError as error:
        fail(error)
    port, descriptor = listener.getsockname()[1], listener.detach()  # the store owns the descriptor from here on
    with _signals_wait():  # the store's thread, too, would take them
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        yield replace(place, port=port)
    del store


@contextlib.contextmanager
def _signals_wait() -> Generator[None]:
    """Hold signals back until `supervise` can pass them on: workers that are being started must not miss them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _listen(place: Place) -> socket.socket:
    address = "127.0.0.1" if place.loopback else ""
    try:
        return socket.create_server((address, place.port), backlog=512)
    except OSError as error:
        raise UserError(
            f"port {place.port} cannot be used ({os.strerror(error.errno or 0)}): another job may hold it; "
            f"choose another port in --dist-url, or leave it out on one machine"
        ) from None


def launch(worker: Callable[[int, Place, Any], None], place: Place, args: object) -> int:
    """Run `worker(local_rank, place, args)` in every process of this node and wait for them.

    The worker does its work inside `taking_part`.

    Returns:
        The exit code: 0, 2 after a user's mistake, 128 + n after signal n, 1 after anything else.
    """
    with meet(place) as here:
        if not here.spawns:
            worker(here.local_rank, here, args)
            return 0
        return supervise(
            mp.start_processes(worker, (here, args), here.local_size, join=False, start_method="forkserver")
        )


def supervise(context: mp.ProcessContext | None) -> int:
    """Wait for spawned workers; end all of them when one fails; pass SIGTERM and Ctrl-C on to them.

    Returns:
        The exit code of the node: that of the first worker that failed, 1 if it was killed.
    """
    assert context is not None
    processes = context.processes
    asked: list[float] = []  # when signals came
    first: list[int] = []  # and which

    def forward(signum: int, _: FrameType | None) -> None:
        asked.append(time.monotonic())
        first.append(signum)
        for process in processes:
            if process.is_alive():  # the second signal does not wait for a checkpoint
                os.kill(process.pid, signum if len(asked) == 1 else signal.SIGKILL)

    previous = {signum: signal.signal(signum, forward) for signum in STOPPING}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    alive = {process.sentinel: rank for rank, process in enumerate(processes)}
    failed: tuple[int, int] | None = None  # local rank and exit code of the first that failed
    deadline = float("inf")
    try:
        while alive:
            limit = min(deadline, asked[0] + GRACE if asked else float("inf"))
            wait = min(1.0, max(0.0, limit - time.monotonic()))
            for sentinel in multiprocessing.connection.wait(list(alive), timeout=wait):
                local_rank = alive.pop(sentinel)  # type: ignore[arg-type]
                processes[local_rank].join()
                code = processes[local_rank].exitcode
                if code != 0 and failed is None:
                    failed = local_rank, code
                    deadline = time.monotonic() + (GRACE if asked else 2.0)  # others may be printing their own error
                    if code < 0 and not asked:
                        name = signal.Signals(-code).name
                        why = " (out of memory?)" if name == "SIGKILL" else ""
                        _complain(
                            f"the process with local rank {local_rank} was ended by {name}{why}; the others end, too. "
                            + (
                                "See what it printed"
                                if name in ("SIGABRT", "SIGSEGV")
                                else "Start again with --resume auto to go on from the last checkpoint"
                            )
                        )
            if time.monotonic() >= limit:
                if alive and asked:
                    _complain(
                        f"local rank(s) {sorted(alive.values())} did not stop within {GRACE:g} s and were killed; "
                        f"what was saved is the last checkpoint"
                    )
                for process in processes:
                    process.kill()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if failed is None:
        return 0
    local_rank, code = failed
    if code < 0:
        return 128 + first[0] if asked else 1
    unreported = Path(context.error_files[local_rank])  # an exception outside of `taking_part`
    if unreported.exists():
        _complain(pickle.loads(unreported.read_bytes()))  # noqa: S301 - written by our own process
        unreported.unlink()
    return code


def _complain(line: str) -> None:
    _to_terminal(f"error: {line}")


def _to_terminal(message: str) -> None:
    """Print to stderr; on a terminal in place of the line of progress, which may be another process's."""
    print(f"\r\033[K{message}" if sys.stderr.isatty() else message, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------- being a process


def connect(place: Place) -> World:
    """Find this process's device and the job's store.

    Raises:
        UserError: a device or backend that this machine does not have.
        Absent: other processes did not come within --timeout.
    """
    flags = place.flags
    asked = flags.device == "cuda" or flags.gpu is not None
    cuda = asked or (flags.device == "auto" and not flags.no_accel and torch.cuda.is_available())
    if asked and not torch.cuda.is_available():
        flag = "--device cuda" if flags.gpu is None else f"--gpu {flags.gpu}"
        raise UserError(f"{flag}: this machine has no CUDA device that torch can use; try --device cpu")
    backend = flags.dist_backend if flags.dist_backend != "auto" else ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        raise UserError("--dist-backend nccl needs CUDA devices, and torch sees none; use --dist-backend gloo")
    devices = torch.cuda.device_count() if cuda else 0
    if backend == "nccl" and place.spawns and place.local_size > devices:  # a launcher may show one to each process
        raise UserError(
            f"{place.local_size} processes on {devices} CUDA device(s): nccl needs a device for each; "
            f"use --nproc {devices}, or --dist-backend gloo to share them"
        )
    if flags.gpu is not None and flags.gpu >= devices:
        raise UserError(f"--gpu {flags.gpu}: this machine has CUDA devices 0 to {devices - 1}")
    number = flags.gpu if flags.gpu is not None else place.local_rank % max(1, devices)
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # collectives and allocations without an explicit device go there
    timeout = datetime.timedelta(seconds=flags.timeout)
    store, members = _join(_store(place, timeout), place, flags.timeout)
    place = replace(place, attempt=max(member["attempt"] for member in members))
    neighbours = sum(member["machine"] == machine() for member in members)
    share = max(1, cores() // neighbours)
    torch.set_num_threads(flags.threads or _chosen_threads(place) or share)
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        node=place.node,
        nodes=place.nodes,
        device=device,
        backend=backend,
        timeout=timeout,
        cores=share,
        store=store,
        place=place,
    )


def _store(place: Place, timeout: datetime.timedelta) -> dist.Store:
    """The key-value store through which the processes of a job find each other."""
    if place.loopback:  # gloo takes the interface of the host name otherwise, which other machines can reach
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if place.launcher == "plain":
        return dist.HashStore()
    descriptor = None
    hosts = place.rank == 0 and not place.store_hosted
    if hosts:
        descriptor = _listen(place).detach()
    host = "127.0.0.1" if place.loopback else place.host  # of one node's names, only this is surely listened on
    if not hosts:
        _await_host(host, place.port, timeout.total_seconds())
    return dist.TCPStore(
        host, place.port, is_master=hosts, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


def _await_host(host: str, port: int, seconds: float) -> None:
    """Wait until the store's host answers: it may start later, and so may its name in the DNS."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise Absent(
                f"the first node, {host}:{port}, cannot be reached within {seconds:g} s ({error}): start it, and check "
                f"its name, the port and the firewall"
            ) from None
        return


def _join(store: dist.Store, place: Place, seconds: float) -> tuple[dist.Store, list[dict[str, Any]]]:
    """Wait until every rank has come, so that a missing one is named instead of a timeout without a word.

    torchrun keeps one store for all its restarts, so ranks would read the addresses of the dead; and its count of
    restarts is no name for an attempt, because a node that came later counts fewer. So every process introduces
    itself by a name that nobody had before, rank 0 publishes the names that it sees, and each rank answers when it
    finds its own among them. The list to which all have answered is the world.

    Returns:
        The part of the store that only this world uses, and what its members said of themselves, in rank order.

    Raises:
        Absent: some did not come in time.
    """
    me = {"name": secrets.token_hex(8), "size": place.size, "attempt": place.attempt, "machine": machine()}
    ranks = range(place.size)
    store.set(f"hello/{place.rank}", json.dumps(me))
    deadline, pause = time.monotonic() + seconds, 0.002
    world: dict[str, Any] = {"id": "", "members": []}
    while True:
        if place.rank == 0 and store.check([f"hello/{rank}" for rank in ranks]):
            members = [json.loads(store.get(f"hello/{rank}")) for rank in ranks]
            if members != world["members"] and all(member["size"] == place.size for member in members):
                world = {"id": secrets.token_hex(8), "members": members}
                store.set("world", json.dumps(world))
        elif place.rank != 0 and store.check(["world"]):
            world = json.loads(store.get("world"))
        prefix = f"world-{world['id']}"
        if place.rank < len(world["members"]) and world["members"][place.rank] == me:
            store.set(f"{prefix}/here/{place.rank}", "")
            if place.rank == 0 and store.check([f"{prefix}/here/{rank}" for rank in ranks]):
                store.set(f"{prefix}/complete", "")
            if store.check([f"{prefix}/complete"]):
                return dist.PrefixStore(prefix, store), world["members"]
        if time.monotonic() > deadline:
            sign = f"{prefix}/here" if world["id"] else "hello"
            missing = [str(rank) for rank in ranks if not store.check([f"{sign}/{rank}"])]
            raise Absent(
                f"{place.size - len(missing)} of {place.size} processes joined within {seconds:g} s; missing: rank "
                f"{', '.join(missing)}. Start the others, or give a longer --timeout"
            )
        time.sleep(pause)
        pause = min(0.5, 2 * pause)


def _chosen_threads(place: Place) -> int:
    """The user's OMP_NUM_THREADS, or 0 to share the cores of the machine among the job's processes on it.

    Two processes with a thread per core each are slower than one thread each, and the number of threads changes
    the last bits of a sum: so it follows from who shares the machine, not from the launcher. torchrun sets
    OMP_NUM_THREADS=1 by itself; that is no choice of the user's.
    """
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and (place.launcher, text) != ("torchrun", "1") else 0


def cores() -> int:
    """The CPU cores that this process may use: its affinity mask, cut to the quota of its container."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, int(_quota() or usable)))


def _quota(groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU limit of this container's control group, in cores; None without one ("max", in version 1 -1)."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((groups / file).read_text() for file in files).split()
            return int(quota) / int(period) if int(quota) > 0 else None
    return None


def machine() -> str:
    """A name for the set of cores that this process shares with others of the job."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if _quota():  # a container with cores of its own
            name += str(Path("/proc/self/ns/mnt").readlink())
    except OSError:
        name = socket.gethostname()
    return f"{name} {sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else ''}"


@contextlib.contextmanager
def taking_part(place: Place, local_rank: int) -> Generator[World]:
    """The frame around the work of one process: its world on entry, a clean end in every case.

    A user's mistake and an unexpected exception are printed by the first rank that meets them, once for the job.
    After an exception the process ends with exit code 1, without waiting for the others; after a mistake, which mostly
    all ranks meet, with 2, and after signal n in training, at which all stop, with 128 + n, together with them.
    """
    place = place.worker(local_rank)
    end_with_parent(agent=place.launcher == "torchrun")
    world: World | None = None
    again = False  # whether the cause lies elsewhere
    together = False  # whether all ranks come to this end
    try:
        for signum in STOPPING:
            signal.signal(signum, _stop_now)
        _stop_without_main_thread(place, lambda: _speaks_first(world, place, busy=True))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # one may have come already
        world = connect(place)
        yield world
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    except UserError as error:
        message, code, again, together = f"error: {error}", 2, isinstance(error, Absent), True
    except Stopped as stop:
        message, code, together = _stopped(stop), 128 + stop.signum, str(stop) != OUTSIDE
    except Exception as error:
        again = isinstance(error, Lost) or any(words in str(error) for words in LOST)
        _ignore_signals()  # torchrun stops the others when one has ended, while this one asks who it was
        where = f" {getattr(error, '__notes__', [''])[0]}".rstrip()
        cut_off = f"the host of the rendezvous, {place.host}:{place.port}, is gone, too,"
        who = f" ({_answer(lambda: _without_word(world, cut_off), cut_off)}{where})" if again and world else ""
        text = f"lost another process{who}: {str(error).splitlines()[0]}" if again else _explained(error)
        message, code = f"error: rank {place.rank}: {text}", 1
    _ignore_signals()  # one that comes now would be an exception outside of this frame
    if _answer(lambda: _speaks_first(world, place), True):
        _to_terminal(message)
    note(RETRY if again else code, place.local_size)
    sys.stdout.flush()
    if together and world:
        _answer(lambda: _end_together(world), None, 5.0)
    # Not sys.exit: the destructors of a process group whose peers are gone may wait for them.
    os._exit(code)


OUTSIDE = "outside of training, nothing to save"


def _stop_now(signum: int, _: FrameType | None) -> None:
    _ignore_signals()  # a terminal's Ctrl-C comes twice: from the terminal, and from the parent
    raise Stopped(signum, OUTSIDE)


def _ignore_signals() -> None:
    for signum in STOPPING:  # not SIG_IGN: of a signal that another thread is just taking, Python would complain
        signal.signal(signum, lambda *_: None)


def _stop_without_main_thread(place: Place, speaks_first: Callable[[], bool], patience: float = 2.0) -> None:
    """End this process after a signal that `_stop_now` does not get to see.

    Python runs handlers in the main thread, which may be in a collective, or meeting a process that has stopped.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what a loader's worker gets is not for us

    def watch() -> None:
        while True:
            signum = os.read(reading, 1)[0]
            if signum in STOPPING and signal.getsignal(signum) is _stop_now:
                time.sleep(patience)
                if signal.getsignal(signum) is _stop_now:
                    if _answer(speaks_first, True):
                        _to_terminal(_stopped(Stopped(signum, OUTSIDE)))
                    note(128 + signum, place.local_size)
                    os._exit(128 + signum)

    threading.Thread(target=watch, daemon=True).start()


def _stopped(stop: Stopped) -> str:
    return f"stopped by {signal.Signals(stop.signum).name}: {stop}"


def _speaks_first(world: World | None, place: Place, busy: bool = False) -> bool:
    """Whether no other rank has reported its end yet: the first one's reason is the cause of the others'."""
    if world is None:  # the store has not been reached: each node speaks for itself
        return place.local_rank == 0
    try:
        store = world.store.clone() if busy else world.store  # the main thread may wait for an answer on the other
        return bool(store.compare_set("end reported", "", str(place.rank)) == str(place.rank).encode())
    except (dist.DistError, RuntimeError):  # the host of the store is gone: better twice than not at all
        return True


def _explained(error: Exception) -> str:
    """One line where the cause can be told; else the traceback, which is for whoever has to find the bug."""
    text = f"out of memory: {error}" if isinstance(error, MemoryError) else str(error)
    if _of_semaphore(error):  # says "no space left on device", and not where
        text = f"no shared memory for a semaphore: {error}"
    for words, remedy in REMEDIES.items():
        if (isinstance(error, (MemoryError, RuntimeError)) or _of_semaphore(error)) and words in text:
            line = next(line for line in text.splitlines() if words in line)
            return f"{line.removeprefix('RuntimeError: ')} (what may help: {remedy})"
    return traceback.format_exc()


def _of_semaphore(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, OSError) and Path(frames[-1].filename).match("multiprocessing/synchronize.py")


def _without_word(world: World, cut_off: str) -> str:
    """The ranks that do not say within a second that they lost somebody, too: those that hang, or are gone."""
    try:
        silent = _silent(world, "still here", patience=1.0)
    except (dist.DistError, RuntimeError):
        return cut_off
    return f"no word from rank {', '.join(silent)}" if silent else "all are still here"


def _end_together(world: World) -> None:
    """Wait until all ranks have come to their end, but not long: where one alone met a mistake, the others wait for it.

    A rank that still connects when another one is gone would have gloo complain of it, beside the line that says what
    is wrong. Rank 0 ends last, since it may host the store.
    """
    with contextlib.suppress(dist.DistError, RuntimeError):
        if not _silent(world, "at its end", patience=min(3.0, world.timeout.total_seconds() / 2)):
            if world.is_main:
                _silent(world, "gone", patience=1.0)
            else:
                world.store.set(f"gone/{world.rank}", "")


def _silent(world: World, sign: str, patience: float) -> list[str]:
    """Give a sign, and wait for that of all others: the ranks that did not give it within `patience` seconds."""
    world.store.set(f"{sign}/{world.rank}", "")
    deadline = time.monotonic() + patience
    while True:
        silent = [str(rank) for rank in range(world.size) if not world.store.check([f"{sign}/{rank}"])]
        if not silent or time.monotonic() > deadline:
            return silent
        time.sleep(0.02)


def _answer(ask: Callable[[], Value], otherwise: Value, seconds: float = 3.0) -> Value:
    """Ask the store, but not for ever: an answer from the other side of a network that is cut never comes."""
    answers: list[Value] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else otherwise


def end_with_parent(agent: bool = False) -> None:
    """End this process at once when the one that spawned it is killed: nobody would wait for it any more.

    Args:
        agent: the parent is torchrun's agent, which `multiprocessing` does not know.
    """
    parent, pid = std_mp.parent_process(), os.getppid()
    if parent is None and not agent:
        return

    def watch() -> None:
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
        while parent is None and os.getppid() == pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ------------------------------------------------------------------------------------- agreeing with the others


class Stop:
    """Finds the step at which all ranks stop together after SIGTERM or Ctrl-C reached any of them.

    Every few steps, `agreed` starts a small asynchronous all-reduce and reads the result of the one before, so no
    step waits for it, and all ranks read the same answer in the same step. The distance follows the pace of the
    steps, which the ranks agree on in the same message. Use as a context manager around the training loop; outside
    of it a signal ends the process at once.

    Args:
        seconds: about how long a signal may wait for the next message; a third of it costs nothing measurable.
    """

    def __init__(self, seconds: float = 0.2) -> None:
        self._seconds = seconds
        self._signum = 0
        self._steps = 0  # since the last message
        self._distance = 1  # steps between messages
        self._sent = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None

    def __enter__(self) -> "Stop":
        self._previous = {signum: signal.signal(signum, self._remember) for signum in STOPPING}
        self._clock = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._work is not None and kind is None:
            self._work.wait()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _remember(self, signum: int, _: FrameType | None) -> None:
        self._signum = signum

    def agreed(self) -> int:
        """The signal on which all ranks stop after this step, or 0. Every rank calls this once per step."""
        self._steps += 1
        if self._steps < self._distance:
            return 0
        signum = 0
        if self._work is not None:
            self._work.wait()
            signum, slowness = self._sent.tolist()
            pace = round(self._seconds * 1e6 / max(1, slowness))
            self._distance = max(1, min(2 * self._distance, pace))  # the first steps may be no measure
        now = time.monotonic()
        microseconds = round(1e6 * (now - self._clock) / self._steps)  # per step; the slowest rank's counts
        self._clock, self._steps = now, 0
        self._sent = torch.tensor([self._signum, min(microseconds, 2**31 - 1)], dtype=torch.int32)
        self._work = dist.all_reduce(self._sent, dist.ReduceOp.MAX, async_op=True)
        return signum


@contextlib.contextmanager
def main_first(world: World, what: str, patience: float = 3600.0) -> Generator[None]:
    """Let one process per node do the body before the others of the node do it: downloads, caches.

    Args:
        world: this process's world.
        what: names the work in the store and in error messages; used once per run.
        patience: the longest wait for the first process, in seconds (longer than a collective's timeout).

    Raises:
        UserError: the first process failed; the others report the same.
    """
    key = f"first/{what}/{world.node}"
    if world.local_rank == 0:
        try:
            yield
        except UserError as error:
            world.store.set(key, f"mistake {error}")
            raise
        except BaseException as error:
            world.store.set(key, f"failure {error!r}")
            raise
        world.store.set(key, "done")
        return
    deadline = time.monotonic() + patience
    while not world.store.check([key]):  # not store.wait(): a signal could not interrupt it
        if time.monotonic() > deadline:
            raise UserError(f"{what}: the first process of this node is not done after {patience:g} s")
        time.sleep(0.01)
    outcome, _, message = world.store.get(key).decode().partition(" ")
    if outcome == "mistake":
        raise UserError(message)
    if outcome == "failure":
        raise RuntimeError(f"{what}: the first process of this node failed: {message}")
    yield


def say(world: World, line: str) -> None:
    """Print a line from the main rank only."""
    if world.is_main:
        print(line, flush=True)


def gather(world: World, value: Value) -> list[Value]:
    """The values of all ranks (anything that pickle takes) on the main rank, in rank order; elsewhere nothing."""
    everybody: list[Any] | None = [None] * world.size if world.is_main else None
    dist.gather_object(value, everybody)
    return everybody or []


def from_main(world: World, compute: Callable[[], Value]) -> Value:
    """Compute on the main rank only, while the others wait, and give the result to all."""
    shared: list[Any] = [compute() if world.is_main else None]
    dist.broadcast_object_list(shared)
    return shared[0]


def agree(world: World, value: Value, what: str, remedy: str = "do all nodes see the same files?") -> Value:
    """Check that all ranks hold the same value (a string or number) and return it.

    Raises:
        UserError: they do not; the values are named.
    """
    everybody: list[Any] = [None] * world.size
    dist.all_gather_object(everybody, value)
    if any(other != everybody[0] for other in everybody):
        shown = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(everybody))
        raise UserError(f"the ranks disagree on {what} ({shown}): {remedy}")
    return value


def settle(model: nn.Module, *inputs: Tensor) -> None:
    """Do one discarded forward and backward, after which DDP's buckets have their final layout.

    DDP lays its buckets out anew after the first step, in the order in which gradients became ready, and with 3
    or more ranks the layout changes the order of additions. A resumed run would so differ from an
    uninterrupted one in the last bits of its first step; with this step before the first one, neither does.
    Parameters, buffers and random numbers are left as they were.

    Args:
        model: the wrapped model.
        inputs: tensors as in training, of any batch size; the smallest that training will bring is tried best.

    Raises:
        UserError: the batch is too small for the model's BatchNorm, or a parameter gets no gradient.
    """
    random = random_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        model(*inputs).float().sum().backward()
    except ValueError as error:
        raise UserError(
            f"the last batch of an epoch brings a rank {len(inputs[0])} sample(s) at once, too few for this model "
            f"({error}): change --batch-size"
        ) from None
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused and not getattr(model, "find_unused_parameters", True):
        names = ", ".join(name.removeprefix("module.") for name in unused[:5])
        raise UserError(
            f"no gradient reaches {names}: use them in forward, freeze them, or give --find-unused-parameters"
        )
    for parameter in model.parameters():
        parameter.grad = None
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    restore_random_state(random)
