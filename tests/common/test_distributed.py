"""Processes that meet, agree, fail and stop together."""

import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from common.launch import cgroup, device, place, rendezvous
from common.launch import muster as meeting
from common.launch.console import listed
from common.launch.errors import NOTES, UserError
from common.launch.flags import Launch
from common.launch.muster import muster, not_there
from common.launch.place import Place
from common.launch.who import watcher
from tests.conftest import Programs
from tests.machine import here

JOBS = ("-m", "tests.common.jobs")
TORCHRUN = ("-m", "torch.distributed.run")


def ranks(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d+/\d+ threads \d+", output))


@pytest.mark.parametrize("nproc", [1, 3])
def test_spawned_processes_form_a_world(programs: Programs, nproc: int) -> None:
    done = programs.run(*JOBS, "place", "--nproc", nproc)
    assert [line.split(" t")[0] for line in ranks(done.stdout)] == [f"rank {rank}/{nproc}" for rank in range(nproc)]
    assert done.stderr == ""


def test_a_process_alone_is_a_world_of_one(programs: Programs) -> None:
    assert len(ranks(programs.run(*JOBS, "place").stdout)) == 1


def test_slurm_starts_the_processes(programs: Programs, free_port: int) -> None:
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "here",
        "MASTER_PORT": str(free_port),
    }
    tasks = [
        programs.start(*JOBS, "place", env=common | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
        for task in range(2)
    ]
    assert sorted(ranks(programs.finish(task).stdout)[0].split(" t")[0] for task in tasks) == ["rank 0/2", "rank 1/2"]


def test_threads_are_shared_by_who_is_on_the_machine(programs: Programs, free_port: int) -> None:
    """Two nodes on one machine, two spawned processes and torchrun's use as many threads each."""
    spawned = programs.run(*JOBS, "digest", "--nproc", 2).stdout
    url = ("--dist-url", f"tcp://127.0.0.1:{free_port}", "--world-size", 2)
    nodes = [programs.start(*JOBS, "digest", *url, "--rank", node) for node in range(2)]
    tcp = "".join(programs.finish(node).stdout for node in nodes)
    agent = programs.run(*TORCHRUN, "--standalone", "--nproc-per-node", 2, *JOBS, "digest").stdout
    assert len(set(re.findall("machine .*", spawned + tcp + agent))) == 1
    chosen = programs.run(*JOBS, "digest", "--threads", 3, env={"OMP_NUM_THREADS": "2"}).stdout
    assert re.findall(r"threads (\d+)", chosen) == ["3"]
    chosen = programs.run(*JOBS, "digest", env={"OMP_NUM_THREADS": "5"}).stdout
    assert re.findall(r"threads (\d+)", chosen) == ["5"]


@pytest.mark.parametrize("nproc", [2, 3])
def test_predictions_return_to_dataset_order(programs: Programs, nproc: int) -> None:
    programs.run(*JOBS, "ordered", "--nproc", nproc)


def test_local_rank0_first(programs: Programs, tmp_path: Path) -> None:
    programs.run(*JOBS, "first", "--nproc", 3, "--folder", tmp_path)


def test_the_first_of_each_node_works(programs: Programs, tmp_path: Path, free_port: int) -> None:
    """On two nodes with a folder each; nobody waits for the first of the other node."""
    url = ("--nproc", 2, "--dist-url", f"tcp://127.0.0.1:{free_port}", "--world-size", 2)
    folders = [tmp_path / str(node) for node in range(2)]
    for folder in folders:
        folder.mkdir()
    nodes = [
        programs.start(*JOBS, "first_of_two", *url, "--rank", node, "--folder", folder)
        for node, folder in enumerate(folders)
    ]
    for node in nodes:
        programs.finish(node)
    assert [{path.name for path in folder.iterdir()} for folder in folders] == [{"done", "slow"}] * 2


def test_a_failure_of_the_first_reaches_all(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(*JOBS, "first_fails", "--nproc", 3, "--folder", tmp_path, code=2)
    assert done.stderr == "error: the download failed\n"


@pytest.mark.parametrize(("job", "nproc"), [("mistake", 2), ("mistake", 4), ("signalled_at_its_end", 2)])
def test_a_mistake_that_all_meet_is_one_line(programs: Programs, job: str, nproc: int) -> None:
    """Also while one of them is still connecting (gloo would have it that the others are gone), and with a signal."""
    done = programs.run(*JOBS, job, "--nproc", nproc, code=2)
    assert done.stderr == "error: --colour: not a colour\n"


@pytest.mark.parametrize(
    ("job", "code", "line"),
    [("mistake", 2, "error: --colour: not a colour"), ("stops", 143, r"stopped by SIGTERM: after step \d+")],
)
def test_one_line_is_said_where_rank_0_hosts_the_store(
    programs: Programs, tmp_path: Path, free_port: int, job: str, code: int, line: str
) -> None:
    """It ends last: the others could not ask whether somebody has said it."""
    common = {
        "SLURM_NTASKS": "3",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "here",
        "MASTER_PORT": str(free_port),
    }
    envs = [common | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(3)]
    tasks = [programs.start(*JOBS, job, "--folder", tmp_path, env=env) for env in envs]
    said = "".join(programs.finish(task, code).stderr for task in tasks)
    assert re.fullmatch(f"{line}\n", said), said


def test_ranks_that_disagree_stop(programs: Programs) -> None:
    started = time.monotonic()
    done = programs.run(*JOBS, "disagree", "--nproc", 3, code=2)
    assert time.monotonic() - started < here(10), "with starting"
    assert done.stderr.startswith(
        "error: the ranks disagree on the step to resume from (rank 0: 0, rank 1: 1, rank 2: 0)"
    )
    assert done.stderr.count("\n") == 1


def test_an_exception_in_one_rank_ends_all(programs: Programs) -> None:
    started = time.monotonic()
    done = programs.run(*JOBS, "raises", "--nproc", 3, code=1)
    assert time.monotonic() - started < here(10), "with starting"
    assert done.stderr.count("Traceback") == 1
    assert "rank 2" in done.stderr
    assert "a bug in one rank" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("NCCL communicator was aborted on rank 1.\nmore", 75, "lost another process ("),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(", 75, "lost another process ("),
        (
            "NCCL error\nncclRemoteError: remote process exited or there was a network error",
            75,
            "lost another process (",
        ),
        ("NCCL error\nDuplicate GPU detected : rank 0 and rank 1 both on 1a", 1, "Duplicate GPU detected : rank 0"),
        (
            "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set",
            1,
            "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation",
        ),
    ],
)
def test_what_nccl_and_kernels_say_is_one_line_and_an_exit_code(
    programs: Programs, tmp_path: Path, words: str, code: int, line: str
) -> None:
    """`docker/entrypoint.py` reads the notes: 75 is a cause that lies elsewhere."""
    notes = tmp_path / "notes"
    notes.touch()
    done = programs.run(*JOBS, "says", "--nproc", 2, env={"WORDS": words, NOTES: str(notes)}, code=1)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]  # below the table of ranks
    assert errors[0].startswith(f"error: rank 1: {line}")
    assert "Traceback" not in done.stderr
    assert notes.read_text().splitlines()[0].split()[1] == str(code)


def test_too_little_memory_is_named(programs: Programs) -> None:
    done = programs.run(*JOBS, "greedy", "--nproc", 3, code=1)
    (line,) = done.stderr.splitlines()
    assert re.match(
        r"error: rank 2: .*can't allocate memory: you tried to allocate \d+ bytes.*smaller --batch-size", line
    )


def test_a_killed_rank_ends_all(programs: Programs) -> None:
    done = programs.run(*JOBS, "dies", "--nproc", 3, code=1)
    assert "local rank 2 was ended by SIGKILL (out of memory?)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_ends_itself_is_named(programs: Programs, tmp_path: Path) -> None:
    (notes := tmp_path / "notes").touch()
    done = programs.run(*JOBS, "aborts", "--nproc", 2, env={NOTES: str(notes)}, code=1)
    assert re.search(r"error: .* local rank 1 was ended by SIGABRT; .* See what it printed\n", done.stderr)
    assert "Traceback" not in done.stderr
    assert not any(line.split()[2] == "1" for line in notes.read_text().splitlines())


def test_whoever_watches_imports_nothing(programs: Programs) -> None:
    """The main thread may be importing torch._dynamo, for a second: one of the two would find half of it."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2)
    done = programs.run(*torchrun, *JOBS, "quiet", cold=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


@pytest.mark.parametrize("launcher", [("--nproc", 2), ("torchrun",)])
def test_a_rank_that_the_watchdog_of_nccl_ends_has_lost_another(
    programs: Programs, tmp_path: Path, launcher: tuple[object, ...]
) -> None:
    """The watchdog aborts the process: the line and the exit code are those of every lost process."""
    (notes := tmp_path / "notes").touch()
    flags = ("--timeout", round(here(2)))
    words = (*JOBS, "abandoned", *flags, *launcher)
    if launcher == ("torchrun",):
        words = ("-m", "torch.distributed.run", "--nproc-per-node", 2, *JOBS, "abandoned", *flags)
    done = programs.run(*words, env={NOTES: str(notes)}, code=1)
    line = next(line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert re.match(r"error: rank 1: lost another process.*: all_?reduce \d+ did not end within --timeout$", line)
    assert "ended by SIGABRT" not in done.stderr
    attempt, code, _, *_ = notes.read_text().split()
    assert (attempt, code) == ("0", "75"), "docker/entrypoint.py ends with it"


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_signal_stops_all_ranks_after_the_same_step(programs: Programs, tmp_path: Path, nproc: int) -> None:
    done = programs.run(*JOBS, "stops", "--nproc", nproc, "--folder", tmp_path, code=143)
    steps = {file.read_text() for file in tmp_path.glob("stopped-*")}
    assert len(list(tmp_path.glob("stopped-*"))) == nproc
    assert len(steps) == 1
    assert done.stderr == f"stopped by SIGTERM: after step {steps.pop()}\n"


@pytest.mark.parametrize(
    ("signum", "code", "terminal", "flags"),
    [
        (signal.SIGINT, 130, True, ("--nproc", 2)),  # a terminal signals every process
        (signal.SIGTERM, 143, False, ("--nproc", 2)),
        (signal.SIGINT, 130, False, ()),
    ],
)
def test_a_signal_before_training(
    programs: Programs, signum: signal.Signals, code: int, terminal: bool, flags: tuple[object, ...]
) -> None:
    process = programs.start(*JOBS, "ignores", *flags)
    assert process.stdout is not None
    for _ in range(2 if flags else 1):  # ranks
        assert process.stdout.readline() == "sleeping\n"
    (os.killpg if terminal else os.kill)(process.pid, signum)
    done = programs.finish(process, code, limit=20)
    assert re.fullmatch(rf"stopped by {signum.name}: outside of training, nothing to save\n", done.stderr), done.stderr


def test_a_signal_in_a_call_that_does_not_return(programs: Programs) -> None:
    process = programs.start(*JOBS, "waits", "--nproc", 2)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.3)  # it comes to the call
    os.killpg(process.pid, signal.SIGINT)
    done = programs.finish(process, 130, limit=20)  # a launcher's patience is 30 s
    assert done.stderr == "stopped by SIGINT: outside of training, nothing to save\n"


SIGNALLED_WHILE_READING_FLAGS = """
import os, signal
from dataclasses import dataclass
from common.launch.args import start
from common.launch.flags import Launch

@dataclass(frozen=True)
class Args:
    launch: Launch = Launch()

    def __post_init__(self):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except SystemExit:  # some libraries do the same
            pass

start(Args, "tests.common.jobs:main")
"""

SIGNALLED_WHILE_STARTING = """
import os, signal
from common.launch.record import record
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.kill(os.getpid(), signal.SIGINT)

@record
def main_worker():
    print("goes on")

main_worker()
"""


SIGNALLED_IN_A_LIBRARY = """
import os, signal
from common.launch.record import record

@record
def main_worker():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except Exception as error:  # torch does so around a backend's import
        raise RuntimeError("the library's own error") from error

main_worker()
"""


@pytest.mark.parametrize("program", [SIGNALLED_WHILE_READING_FLAGS, SIGNALLED_IN_A_LIBRARY, SIGNALLED_WHILE_STARTING])
def test_a_signal_at_a_bad_moment(programs: Programs, program: str) -> None:
    done = programs.run("-c", program, code=130)
    assert (done.stdout, done.stderr) == ("", "stopped by SIGINT: outside of training, nothing to save\n")


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (signum - 1) & 1)


@pytest.mark.parametrize("after", [0.0, 0.2, 0.3, 0.4, 1.0])
def test_ctrl_c_during_start_up(
    programs: Programs, after: float, eventually: Callable[[Callable[[], object], float, str], None]
) -> None:
    """At any moment after `start` has set its handlers, that of SIGTERM last."""
    process = programs.start(*JOBS, "ignores", "--nproc", 2)
    eventually(lambda: catches(process.pid, signal.SIGTERM), 60, "its handlers")
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    done = programs.finish(process, 130, limit=20)
    assert "Traceback" not in done.stderr
    assert programs.gone()


def test_an_exception_before_the_frame_is_reported(programs: Programs) -> None:
    done = programs.run(*JOBS, "early", "--nproc", 2, code=1)
    assert "before the frame" in done.stderr


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_cpu_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None
) -> None:
    """In both versions of control groups; the end-to-end tests see it in a container."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cgroup, "GROUPS", tmp_path)
    assert cgroup.cpu_quota() == quota


@pytest.mark.parametrize(
    ("request_", "quota", "found"),
    [("2", "max", 2), ("2", "300000", 2), ("3", "200000", 2), ("0", "300000", 3), ("", "max", 8), ("9", "max", 8)],
)
def test_cores_follow_the_request_of_a_pod_where_it_is_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: str, quota: str, found: int
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    monkeypatch.setattr(cgroup, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("CPU_REQUEST", request_)
    assert cgroup.cores() == found


def test_a_host_name_on_one_node(programs: Programs, free_port: int) -> None:
    url = f"tcp://{socket.gethostname()}:{free_port}"
    assert len(ranks(programs.run(*JOBS, "place", "--nproc", 2, "--dist-url", url).stdout)) == 2


@pytest.mark.parametrize("start", ["spawn", "torchrun"])
def test_a_killed_launcher_leaves_no_worker(programs: Programs, start: str) -> None:
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", 2, *JOBS, "ignores")
    process = programs.start(*(torchrun if start == "torchrun" else (*JOBS, "ignores", "--nproc", 2)))
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()  # not for the end of its output, which workers that are left would hold open
    assert programs.gone(within=5)
    process.communicate()


def test_checks(programs: Programs) -> None:
    done = programs.run(*JOBS, "checks", "--nproc", 2)
    assert done.stdout.count("rank(s) 1 hold other parameters than rank 0") == 2
    assert done.stdout.count("4 were lost and 0 trained on more than once") == 2
    assert done.stdout.count("0 were lost and 4 trained on more than once") == 2


@pytest.mark.parametrize("nproc", [2, 3])
def test_resuming_is_bit_identical_with_dropout_and_batchnorm(programs: Programs, tmp_path: Path, nproc: int) -> None:
    done = programs.run(*JOBS, "resumes", "--nproc", nproc, "--folder", tmp_path)
    assert done.stdout.split() == ["identical"] * nproc


def test_without_warm_buckets_three_ranks_resume_differently(programs: Programs, tmp_path: Path) -> None:
    """The mutation: if this ever passes with `identical`, `warm_up_buckets` is not needed any more."""
    done = programs.run(*JOBS, "resumes", "--nproc", 3, "--folder", tmp_path, "--no-warm-up")
    assert done.stdout.split() == ["different"] * 3


def test_an_epochs_loss_is_that_of_all_its_steps_wherever_it_was_resumed(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(*JOBS, "losses_of_an_epoch", "--nproc", 2, "--folder", tmp_path)
    assert re.findall(r"^epoch 1/1  (loss \S+)", done.stdout, re.MULTILINE) == ["loss 2.25"] * 5, done.stdout
    assert re.findall(r"resumed from .* at step (\d)", done.stdout) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("how", ["plain", "spawn", "tcp"])
def test_one_node_listens_on_loopback_only(
    programs: Programs,
    tmp_path: Path,
    free_port: int,
    how: str,
    eventually: Callable[[Callable[[], object], float, str], None],
) -> None:
    flags = {"plain": [], "spawn": ["--nproc=2"], "tcp": ["--nproc=2", f"--dist-url=tcp://127.0.0.1:{free_port}"]}[how]
    process = programs.start(*JOBS, "sockets", "--folder", tmp_path, *flags)
    size = 1 if how == "plain" else 2
    eventually(lambda: len(list(tmp_path.glob("ready-*"))) == size, 60, "ready")
    addresses = [address for address, _ in programs.ports()]
    (tmp_path / "enough").touch()
    programs.finish(process)
    assert len(addresses) >= size  # gloo's own; the store's where there is one
    assert set(addresses) == {"0100007F"}, "127.0.0.1, as the kernel writes it"


def test_a_port_in_use_is_named(programs: Programs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        started = time.monotonic()
        done = programs.run(*JOBS, "place", "--nproc", 2, "--dist-url", f"tcp://127.0.0.1:{port}", code=2)
        assert time.monotonic() - started < here(10), "with starting"
    assert done.stderr.startswith(f"error: port {port} cannot be used (Address already in use)")
    assert done.stderr.count("\n") == 1


def test_a_missing_node_is_named(programs: Programs, free_port: int) -> None:
    patience = round(here(2))
    url = ("--dist-url", f"tcp://127.0.0.1:{free_port}", "--world-size", 2, "--timeout", patience)
    started = time.monotonic()
    done = programs.run(*JOBS, "place", *url, "--rank", 0, "--nproc", 2, code=2)
    assert time.monotonic() - started < patience + here(10), "with starting"
    assert done.stderr.startswith(
        f"error: 2 of 4 processes joined within {patience} s; missing: rank 2, 3. "
        f"This is node 0 of 2; they meet at 127.0.0.1:{free_port}. Start the others with this address, correct --nnodes"
    )
    assert done.stderr.count("\n") == 1


def test_a_missing_first_node_is_named(programs: Programs, free_port: int) -> None:
    url = ("--dist-url", f"tcp://127.0.0.1:{free_port}", "--world-size", 2, "--timeout", 6)
    done = programs.run(*JOBS, "place", *url, "--rank", 1, code=2)
    assert done.stderr.startswith(f"error: the first node, 127.0.0.1:{free_port}, cannot be reached within 6 s")
    assert "if this is the only node, leave out --nnodes" in done.stderr
    assert f"waiting for the first node, 127.0.0.1:{free_port}: Connection refused\n" in done.stdout
    assert done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------ meeting after a restart


Member = dict[str, object]


def member(rank: int, size: int, attempt: int) -> tuple[Member, int, int]:
    return {"name": secrets.token_hex(8), "size": size, "attempt": attempt}, rank, size


def joined(store: dist.Store, members: list[tuple[Member, int, int]], seconds: float = 10.0) -> list[tuple[str, int]]:
    """What the members of an attempt agree on: the name of their part of the store, and the restarts."""

    def one(entry: tuple[Member, int, int]) -> tuple[str, int]:
        part, roll = muster(store, *entry, seconds)
        part.set(f"from {entry[1]}", "x")
        name = next(key for key in store.list_keys() if key.endswith(f"from {entry[1]}"))
        store.delete_key(name)
        return name.partition("/from")[0], max(each["attempt"] for each in roll)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


class Turns:
    """A clock that moves when each rank, a thread, has had a turn, however long the machine takes for that."""

    def __init__(self, ranks: int) -> None:
        self.now, self.turn = 0.0, threading.Barrier(ranks, self.move, timeout=here(60))

    def move(self) -> None:
        self.now += 0.01

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.turn.wait()


def test_restarted_ranks_do_not_meet_the_dead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same store, whatever each agent counted, and however many they were before."""
    store = dist.HashStore()
    worlds = [joined(store, [member(rank, 3, 0) for rank in range(3)])]
    monkeypatch.setattr(meeting, "PATIENCE", 0.1)
    monkeypatch.setattr(meeting, "time", Turns(2))
    with pytest.raises(UserError, match=r"2 of 3 processes joined within 0\.3 s; missing: rank 2"):
        joined(store, [member(0, 3, 1), member(1, 3, 1)], 0.3)  # what rank 2 wrote is there, itself it is not
    assert capsys.readouterr().out == "waiting for rank 2 of 3, for up to 0.3 s\n", "by rank 0 alone, once"
    monkeypatch.undo()
    # rank 2 is on a node that came later
    worlds.append(joined(store, [member(0, 3, 1), member(1, 3, 2), member(2, 3, 0)]))
    worlds.append(joined(store, [member(0, 2, 3), member(1, 2, 3)]))  # a node is gone
    worlds.append(joined(store, [member(rank, 3, rank) for rank in range(3)]))  # and back
    assert [len(set(world)) for world in worlds] == [1, 1, 1, 1], "all members agree"
    assert len({world[0][0] for world in worlds}) == 4, "each attempt has a part of its own"
    assert [world[0][1] for world in worlds] == [0, 2, 3, 2]


def test_without_rank_0_the_others_say_so() -> None:
    """In the time that they have, not in that of the store."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=2))
    with pytest.raises(UserError, match=r"1 of 2 processes joined within 0\.2 s; missing: rank 0"):
        joined(store, [member(1, 2, 0)], 0.2)


def test_the_workers_count_the_most_restarts_of_any_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or those of a node that came later would train from the start, beside others that go on."""
    others = [
        member(rank, 3, attempt)[0] | {"machine": "", "backend": "", "who": None} for rank, attempt in ((1, 3), (2, 0))
    ]
    monkeypatch.setattr(place, "_current", Place("torchrun", 1, 0, 3, 1, 0, 0, "127.0.0.1", 0, Launch()))
    monkeypatch.setattr(rendezvous, "joined", None)
    monkeypatch.setattr(rendezvous, "_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(rendezvous, "muster", lambda store, me, *_: (store, [me, *others]))
    monkeypatch.setattr(device, "share_cores", lambda *_: None)
    monkeypatch.setattr(watcher, "watch", lambda roll, token, listening, patience: listening.close())
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", rendezvous.RESTARTS: "1"}.items():
        monkeypatch.setenv(name, value)
    next(iter(rendezvous._handler("job://", timedelta(seconds=9))))
    assert os.environ[rendezvous.RESTARTS] == "3"


def test_after_a_restart_rank_0_waits_for_all() -> None:
    """A roll for each of those that come, in which the others are the dead, would cost each rank as many readings."""
    store = dist.HashStore()
    joined(store, [member(rank, 4, 0) for rank in range(4)])
    with ThreadPoolExecutor(4) as pool:
        coming = []
        for rank in range(4):
            coming.append(pool.submit(muster, store, *member(rank, 4, 1), 10.0))
            time.sleep(0.1)
        rolls = [future.result()[1] for future in coming]
    assert all(roll == rolls[0] for roll in rolls)
    assert sum(key.endswith("/roll") for key in store.list_keys()) == 2


class Asked(dist.HashStore):
    """A store that notes how many keys each thread has asked for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: dict[int, list[int]] = {}

    def check(self, keys: list[str]) -> bool:
        self.questions.setdefault(threading.get_ident(), []).append(len(keys))
        return super().check(keys)


def test_what_a_rank_asks_does_not_grow_with_the_job() -> None:
    """Every rank asks for one key at a time: rank 0 for those of the others in turn, each once."""
    for size in (2, 16):
        store = Asked()
        joined(store, [member(rank, size, 0) for rank in range(size)])
        assert [max(questions) for questions in store.questions.values()] == [1] * size


def test_missing_ranks_are_found_by_few_questions() -> None:
    store, keys = Asked(), [f"hello/{rank}" for rank in range(512)]
    for number, key in enumerate(keys):
        if number not in (77, 300):
            store.set(key, "")
    assert not_there(store, keys) == [77, 300]
    (questions,) = store.questions.values()
    assert len(questions) <= 2 * 2 * 9 + 1, "two halves on each of nine levels, for each of the two"


def test_a_thousand_ranks_fit_a_line() -> None:
    assert listed([]) == ""
    assert listed([2, 3]) == "2, 3"
    assert listed([0, 2, 3, 4, 6, 8, 9]) == "0, 2-4, 6, 8, 9"
    assert listed(range(126, 1024)) == "126-1023"
