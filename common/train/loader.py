"""Loaders: a rank's share of a batch, the rest of an epoch, and worker processes.

Nothing here communicates.
"""

import atexit
import functools
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from common.launch.device import core_share
from common.launch.errors import UserError
from common.launch.flags import equal_parts
from common.launch.parent import end_with_parent
from common.launch.place import current
from common.train.seed import random_state, restore_random_state
from common.train.seen import Counts, Seen, seen
from common.train.state import TrainState

Item = TypeVar("Item")


def local_samples(batch_samples: int, rank: int, world_size: int) -> int:
    """How many of a global batch's samples a rank gets, the padding not counted."""
    return len(range(rank, batch_samples, world_size))


def local_batch(batch_size: int, parts: int | None = None, what: str | None = None) -> int:
    """The samples in each of the equal parts of a global batch.

    Args:
        batch_size: the flag of this name: samples in a global batch.
        parts: how many parts; by default the world size.
        what: the parts in words, for the message; by default "N ranks".

    Raises:
        UserError: the number of parts does not divide the batch.
    """
    return equal_parts(batch_size, dist.get_world_size() if parts is None else parts, what)


def rest_of_epoch(
    loader: Any, seed: int, state: TrainState, batch_size: int, shard: tuple[int, int]
) -> tuple[Iterator[Any], Seen]:
    """The batches that are left of an epoch, and what was trained on before them.

    Batches that the resumed run has trained on are skipped: by the sampler if it can (`skip`),
    else by loading them, without a change of the random numbers that follow.

    Args:
        loader: whose batches end with the samples' indices.
        seed: of the run.
        state: the epoch, the batches that are done, and what the checkpoint knows of them.
        batch_size: samples in a global batch.
        shard: number of this rank's shard, and how many there are.

    Returns:
        The batches, and the note of the samples that this rank has trained on in this epoch.

    Raises:
        UserError: batches do not end with the samples' indices.
    """
    samples, done = len(loader.dataset), state.batch
    before = state.seen if done else []
    noted = seen(samples, before)
    if isinstance(loader, DataLoader):
        _give_generator(loader, hash((seed, dist.get_rank(), state.epoch)))
    sampler = getattr(loader, "batch_sampler", None)
    if hasattr(sampler, "skip"):
        sampler.skip(done)
        if isinstance(noted, Counts):
            noted.counts = sampler.seen()
        return _numbered(unwrapped(loader), samples, full=False), noted
    full = done == 0 and samples >= batch_size
    random, batches = random_state(), _numbered(unwrapped(loader), samples, full)
    for batch in range(done):
        left = samples - batch * batch_size
        *_, indices = next(batches)
        if not before:  # else the checkpoint's sums hold them
            noted.add(indices, local_samples(min(batch_size, left), *shard))
    if done:
        restore_random_state(random)
    return batches, noted


def _numbered(batches: Iterator[Any], samples: int, full: bool) -> Iterator[Any]:
    """The batches; see that their last items are indices: of a full batch, no two are the same."""
    for number, batch in enumerate(batches):
        last = batch[-1] if isinstance(batch, (list, tuple)) and len(batch) > 1 else None
        right = isinstance(last, Tensor) and last.dtype == torch.int64 and last.dim() == 1
        if right and number == 0 and len(last):
            inside = 0 <= int(last.min()) <= int(last.max()) < samples
            right = inside and (not full or len(last.unique()) == len(last))
        if not right:
            raise UserError(
                f"a sample's last item must be its number in the dataset, from 0 to {samples - 1}: "
                f"Run counts by it that each sample is trained on once; see docs/en/your-model.md"
            )
        yield batch


def _give_generator(loader: "DataLoader[Any]", seed: int) -> None:
    """Give a loader a generator: drawing from the global one would make resuming inexact."""
    loader.generator = loader.generator or torch.Generator()
    loader.generator.manual_seed(seed)


def default_workers(device: torch.device) -> int:
    """Loader processes per rank: with a GPU, its share of the cores minus one.

    On a CPU, where training needs the cores itself, one per eight cores.
    """
    if device.type == "cuda":
        return max(1, min(16, core_share() - 1))
    return core_share() // 8


def start_worker(_: int) -> None:
    """A DataLoader's `worker_init_fn`: leaves signals to the worker's rank, and ends with it.

    torch has seeded its own generator, Python's and NumPy's by then, from the loader's `generator`.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        # both reach whole process groups: Ctrl-C, `timeout`, SLURM
        signal.signal(signum, signal.SIG_IGN)
    end_with_parent()  # torch watches the server that the worker was forked from, which stays


def unwrapped(batches: Iterable[Item]) -> Iterator[Item]:
    """The batches of a loader; a user's mistake found by a worker comes without its traceback.

    Workers get what the program has left at the defaults: a time-out and a start.

    Raises:
        UserError: a worker has found a mistake of the user, or no batch came in time.
    """
    _end_loader_workers_at_exit()
    _wait_before_forks()
    if isinstance(batches, DataLoader) and batches.num_workers:
        batches.timeout = batches.timeout or current().flags.timeout
        batches.worker_init_fn = batches.worker_init_fn or start_worker
    try:
        iterator = iter(batches)
        # With pinned memory, torch's loader has registered a wait of 5 s for each worker, which it
        # does not tell to end. What is registered later runs earlier.
        atexit.unregister(end_loader_workers)
        atexit.register(end_loader_workers)
        yield from iterator
        return
    except UserError as error:
        last_line = str(error).strip().splitlines()[-1]
        mistake = UserError(last_line.partition("UserError: ")[2] or str(error))
    except RuntimeError as error:
        found = re.match(r"DataLoader timed out after ([\d.]+?)(\.0)? seconds", str(error))
        if not found:
            raise
        mistake = UserError(
            f"no batch came from the loader's workers within {found[1]} s: see what they printed "
            f"above; in a container, /dev/shm may be too small (--shm-size 1g), and --workers 0 "
            f"needs none"
        )
    # Nothing may hold the loader's frames any more: when it is gone, so are its workers and its
    # semaphores. An exception and the frame that raised it hold each other.
    gc.collect()
    try:
        raise mistake
    finally:
        # A loader that the garbage collector finds cannot tell its workers to end, since their
        # queues are taken down before it: it would wait 5 s for each of them, and again.
        del mistake


@functools.cache
def _wait_before_forks() -> None:
    if sys.version_info < (3, 12):
        os.register_at_fork(before=wait_for_threads)


def wait_for_threads(longest: float = 0.25) -> None:
    """Wait until no other thread of this process computes, so that none holds a lock at a fork.

    After a collective has returned, its thread still releases the tensors. For this it enters
    Python's list of threads, and a child that is forked just then inherits the list locked. In
    Python 3.11 the child waits for that lock without end; Python 3.12 makes a new lock first.

    Args:
        longest: in seconds; a thread of the user may compute all the time.
    """
    end = time.monotonic() + longest
    while time.monotonic() < end:
        time.sleep(0.01)  # gives up Python's lock, for which a thread may wait as well
        if not any(map(_computes, Path("/proc/self/task").glob("*/stat"))):
            return


def _computes(stat: Path) -> bool:
    # only Linux forks; there, proc(5): the number of the thread, its (name), its state
    try:
        number, _, rest = stat.read_text().partition(" ")
    except OSError:  # it has ended
        return False
    return int(number) != threading.get_native_id() and rest.rpartition(")")[2].split()[0] == "R"


@functools.cache
def _end_loader_workers_at_exit() -> None:
    # Before `multiprocessing` ends a process, it asks its children with SIGTERM to end, and waits
    # for them: but they leave that signal to the rank, or have inherited its handler.
    util.Finalize(None, end_loader_workers, exitpriority=1)


def end_loader_workers() -> None:
    """End those that still wait for work: a rank that failed does not take its loader down.

    A loader that is taken down itself asks its workers to end, and can wait seconds for each.
    """
    # The handler of torch's loader would complain of killed workers.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
