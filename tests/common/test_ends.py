"""Ends before the ranks have met, or against the will of ranks: one line each, and nobody is left."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from common.launch import last_words, place, rendezvous
from common.launch.console import say
from common.launch.flags import Launch
from common.launch.place import Place
from common.launch.spawn import _Watch
from common.train.stop import STOPPING, Stop
from tests.conftest import Programs
from tests.runs import Eventually, mutated

Value = TypeVar("Value")
JOBS = ("-m", "tests.common.jobs")
MNIST = "examples.mnist_ddp_spawn"
STARTS = {
    "spawn": ("-m", MNIST, "--nproc", 2),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", MNIST),
}
MEET = "    device, backend = choose_device"
ALONE = "    if local_rank == 1:\n        raise ValueError('as planned')\n"
ALL = "    raise ValueError('as planned')\n"
LATE = """    import time
    from common.launch.errors import UserError
    args.out.mkdir(exist_ok=True)
    while local_rank == 0 and not (args.out / 'ends').exists():
        time.sleep(0.01)
    if local_rank == 0:
        time.sleep(0.5)  # of the 2 s after which it would be killed
    (args.out / 'ends').touch()
    raise UserError('as planned')
"""


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("what", [ALONE, ALL, LATE], ids=["of rank 1 alone", "of all", "rank 0 comes later"])
def test_an_end_before_the_ranks_meet_is_said_once(programs: Programs, tmp_path: Path, start: str, what: str) -> None:
    """Local rank 0 speaks for all, whoever is the first to end; an error that it does not share is said, too."""
    code = mutated(tmp_path / "code", ("examples/mnist_ddp_spawn/train.py", MEET, f"{what}{MEET}"))
    mistake = what == LATE and start == "spawn"  # torchrun ends with 1 whatever the ranks end with
    done = programs.run(*STARTS[start], "--out", tmp_path / "out", cwd=code, code=2 if mistake else 1)
    said = [line for line in done.stderr.splitlines() if line.endswith(": as planned")]
    assert len(said) == 1, done.stderr


@pytest.mark.parametrize("start", STARTS)
def test_ranks_with_different_backends_are_named(programs: Programs, tmp_path: Path, start: str) -> None:
    """As where one node's driver is broken, and --device auto."""
    choice = ('chosen = _cuda_backend(flags) if cuda else "gloo"', 'chosen = ("nccl", "gloo")[local_rank]')
    code = mutated(tmp_path / "code", ("common/launch/device.py", *choice))
    done = programs.run(*STARTS[start], "--out", tmp_path / "out", cwd=code, code=2 if start == "spawn" else 1)
    line = "error: rank 0 has chosen nccl and rank 1 gloo, because it has no CUDA device of its own: look for its GPU"
    assert done.stderr.count(line) == 1, done.stderr
    assert "Traceback" not in done.stderr.partition("torch/distributed/elastic")[0]


def test_ranks_that_do_not_stop_are_killed_and_named_once(programs: Programs) -> None:
    process = programs.start(*JOBS, "deaf", "--nproc", 2, env={"PET_SHUTDOWN_TIMEOUT": "1"})
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["deaf\n"] * 2
    os.kill(process.pid, signal.SIGTERM)
    done = programs.finish(process, 143)
    assert done.stderr == (
        "error: local rank(s) 0, 1 did not stop within 1 s and were killed; what was saved is the last checkpoint\n"
    )
    assert programs.gone(within=2)


class Counted:
    """A store that counts the keys for which it is asked."""

    def __init__(self) -> None:
        self.store, self.asked = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def count(keys: Any, *more: Any) -> Any:
            self.asked += len(keys) if isinstance(keys, list) else 1
            return getattr(self.store, name)(keys, *more)

        return count


def test_what_a_rank_asks_at_its_end_does_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 ranks, one is missing: one other looks which it is, and tells the rest."""
    store, ranks, asked = Counted(), 64, Counter[int]()
    monkeypatch.setattr(rendezvous, "joined", store)

    def as_rank(rank: int, ask: Callable[[], Value]) -> Value:
        here = Place("spawn", 1, 0, ranks, ranks, rank, rank, "", 0, Launch())
        monkeypatch.setattr(place, "_current", here)
        monkeypatch.setattr(last_words, "_given", set())
        before = store.asked
        answered = ask()
        asked[rank] += store.asked - before
        return answered

    others = [rank for rank in range(ranks) if rank != 5]
    assert not any(as_rank(rank, lambda: last_words._all_give("here", patience=0)) for rank in others)
    assert all(as_rank(rank, lambda: last_words._who_gave_none("here")) == ["5"] for rank in others)
    (_, most), (_, next_to_it) = asked.most_common(2)
    assert most >= ranks, "one looks for all"
    assert next_to_it < 10
    assert as_rank(5, lambda: last_words._all_give("here", patience=0)), "it was only late"


def test_a_worker_that_has_just_ended_is_sent_no_signal() -> None:
    """Its number is nobody's any more; the parent went on to a traceback."""
    context: Any = SimpleNamespace(processes=[SimpleNamespace(sentinel=0, pid=2**22 + 1)])  # above all numbers
    watch = _Watch(context)
    watch._pass_on(signal.SIGTERM, None)
    assert watch.first == signal.SIGTERM


def test_one_worker_is_asked_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would print the table of all. It is the first that has not ended."""
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(os, "kill", lambda pid, signum: asked.append((pid, signum)))
    context: Any = SimpleNamespace(processes=[SimpleNamespace(sentinel=rank, pid=10 + rank) for rank in range(3)])
    watch = _Watch(context)
    watch._ask(signal.SIGUSR1, None)
    del watch.alive[0]
    watch._ask(signal.SIGUSR1, None)
    assert asked == [(10, signal.SIGUSR1), (11, signal.SIGUSR1)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stopped", [False, True])
def test_signals_are_theirs_again_after_training_unless_it_was_stopped(stopped: bool) -> None:
    """A second signal, of an impatient user, changes nothing; after training, one ends the process."""
    before = {signum: signal.getsignal(signum) for signum in STOPPING}
    try:
        with Stop() as stop:
            if stopped:
                os.kill(os.getpid(), signal.SIGTERM)
            assert [stop.agreed(), stop.agreed()] == [0, signal.SIGTERM if stopped else 0]
        after = {signum: signal.getsignal(signum) for signum in STOPPING}
        assert all((after[signum] is before[signum]) != stopped for signum in STOPPING)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize(("timeout", "wait"), [(600.0, 3.0), (2.0, 1.0)])
def test_a_rank_that_ends_alone_waits_a_few_seconds_at_most(
    monkeypatch: pytest.MonkeyPatch, timeout: float, wait: float
) -> None:
    clock = [0.0]
    slept = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda pause: clock.__setitem__(0, clock[0] + pause))
    monkeypatch.setattr(last_words, "time", slept)
    monkeypatch.setattr(last_words, "_given", set())
    monkeypatch.setattr(rendezvous, "joined", dist.HashStore())
    monkeypatch.setattr(place, "_current", Place("spawn", 1, 0, 2, 2, 1, 1, "", 0, Launch(timeout=timeout)))
    last_words.end_together()
    assert wait < clock[0] < wait + 1


def test_survivors_and_their_parent_say_once_that_they_stop(
    programs: Programs, tmp_path: Path, eventually: Eventually
) -> None:
    """A terminal's Ctrl-C reaches all of them, and again."""
    log = tmp_path / "log"
    words = ("-m", "examples.manual_allreduce_sgd.survive", "--nproc", 2, "--epochs", 500, "--out", tmp_path / "out")
    process = programs.start(*words, log=log)
    eventually(lambda: "epoch 1/" in log.read_text(), 100, "the first epoch")
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
    programs.finish(process, 130)
    assert log.read_text().count("stopped by SIGINT") == 1, log.read_text()
    assert programs.gone(within=2)


PINNED = """
import atexit
from torch.utils.data import DataLoader
from common.train.loader import start_worker, unwrapped

def wait(worker):
    worker.join(timeout=5)
    print(worker.exitcode)

class Pinned(DataLoader):
    def _get_iterator(self):
        made = super()._get_iterator()
        for worker in made._workers:
            atexit.register(wait, worker)
        return made

loaders = [Pinned(range(8), num_workers=2, persistent_workers=True, worker_init_fn=start_worker) for _ in "ab"]
for loader in loaders:
    for epoch in range(2):
        assert len(list(unwrapped(loader))) == 8
"""


def test_loader_workers_have_ended_when_torch_waits_for_them(programs: Programs) -> None:
    """With pinned memory, torch registers what this loader does: 5 s for each worker, which nobody has told to end."""
    assert programs.run("-c", PINNED).stdout.split() == ["-9"] * 4


FORKED = """
import hashlib, os, threading
from functools import partial
from types import SimpleNamespace
from torch.utils.data import DataLoader
from common.train import loader

loader.sys = SimpleNamespace(version_info=(3, 11))
loader.wait_for_threads = partial(loader.wait_for_threads, longest=60)
computing = threading.Thread(target=hashlib.sha256, args=[bytes(1 << 28)])  # without Python's lock
os.register_at_fork(before=lambda: print(computing.is_alive()))
computing.start()
assert len(list(loader.unwrapped(DataLoader(range(8), num_workers=2, multiprocessing_context="fork")))) == 8
"""


def test_workers_are_forked_when_no_thread_computes(programs: Programs) -> None:
    """With Python 3.11, a child that is forked while a thread starts to use Python never comes to run."""
    assert programs.run("-c", FORKED).stdout.split() == ["False"] * 2


EVALUATED = """
import signal
import torch
import torch.distributed as dist
from contextlib import nullcontext
from torch import nn
from torch.utils.data import DataLoader
from common.train.evaluate import evaluate

class Ones:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index == 0:
            print(signal.getsignal(signal.SIGTERM).name, flush=True)
        return torch.ones(2), 0, index

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
loader = DataLoader(Ones(), 2, num_workers=1)
evaluate(nn.Linear(2, 2), loader, 2, nullcontext)
print(loader.timeout)
"""


def test_workers_of_an_evaluation_have_what_those_of_training_have(programs: Programs) -> None:
    """A start that leaves signals to the rank, and a time-out."""
    assert programs.run("-c", EVALUATED).stdout.splitlines() == ["SIG_IGN", "120.0"]


def test_a_closed_terminal_does_not_end_a_training() -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert say("it is read", terminal)
        os.close(ours)
        assert not say("it is not", terminal)
        assert say("nor is what follows", terminal)
