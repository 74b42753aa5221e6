"""The same faults done to every program: what the user reads, how soon, and how the run goes on."""

import contextlib
import hashlib
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, Programs
from tests.faults.jobs import IN_TURN, NPROC, PROGRAMS, TRAININGS, TURNED, Job, Jobs
from tests.machine import here
from tests.runs import Eventually, losses, mutated, newest_step, result, slow

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--monitor-interval", 0.1, "--nproc-per-node")


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


def by_ranks(done: subprocess.CompletedProcess[str]) -> str:
    """What was said before torchrun's agent says that a worker has ended, with a traceback of its own."""
    return done.stderr.partition("torch/distributed/elastic")[0]


def launched(job: Job, nproc: int, *flags: object) -> tuple[object, ...]:
    """A program with two ranks under torchrun, with three by itself."""
    return (*TORCHRUN, 2, *job.words, *flags) if nproc == 2 else (*job.words, "--nproc", nproc, *flags)


def newest(out: Path) -> Path:
    """The newest checkpoint: a file, or the largest file of the Trainer's folder."""
    paths = list((out / "checkpoints").glob("step-*.pt"))
    if not paths:
        (folder,) = (out / "checkpoints").glob(f"checkpoint-{newest_step(out)}")
        paths = list(folder.glob("*.safetensors"))
    return max(paths)


# Three ranks, and with two a program that averages gradients and one that hands on activations.
HARD_LIVES = [
    *((program, 3) for program in PROGRAMS),
    *(("mnist_ddp_spawn", 2), ("resnet_pipeline", 2), ("gan_ddp", 3), ("mnist_dataparallel", 2)),
]


@pytest.mark.timed
@pytest.mark.parametrize(("program", "nproc"), HARD_LIVES)
def test_killed_stopped_damaged_and_orphaned_it_ends_with_the_same_bits(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, nproc: int, eventually: Eventually
) -> None:
    """A run's hard life: one fault after the other, under torchrun and without it."""
    job, chance = jobs[program], random.Random(program)
    run = (*job.words, *job.every, "--resume", "auto", "--out", tmp_path)
    code = jobs.broken("slow", slow(0.03))  # it does not end before it is disturbed

    def until(step: int) -> None:
        eventually(lambda: newest_step(tmp_path) >= step, 60, f"step {step}")

    # SIGKILL of a rank: torchrun starts all again, and they go on.
    process = programs.start(*TORCHRUN, nproc, "--max-restarts", 1, *run, cwd=code)
    until(6)
    time.sleep(chance.uniform(0, 0.05))
    killed_at = newest_step(tmp_path)
    os.kill(programs.worker(chance.randrange(nproc)), signal.SIGKILL)
    until(newest_step(tmp_path) + 9)  # it has gone on while the rank was looked for
    # SIGTERM: one common step is saved.
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = programs.finish(process, 1)  # torchrun's own code; that of a container: tests/docker/test_entrypoint.py
    assert time.monotonic() - started < here(10)
    resumed = re.findall(r"resumed from .* at step (\d+)", done.stdout)
    assert len(resumed) == 1, done.stdout + done.stderr
    assert int(resumed[0]) >= killed_at, "less than one interval between checkpoints is done again"
    stopped = re.findall(r"stopped by SIGTERM: checkpoint at step (\d+); go on with --resume auto", done.stderr)
    assert stopped == [str(newest_step(tmp_path))]
    assert programs.gone(within=2)
    # That checkpoint is damaged: the one before it is used. SIGKILL of the agent: its workers end by themselves.
    damaged = newest(tmp_path)
    content = bytearray(damaged.read_bytes())
    if list(TRAININGS).index(program) % 2:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    else:
        del content[chance.randrange(len(content)) :]
    damaged.write_bytes(content)
    process = programs.start(*TORCHRUN, nproc, *run, cwd=code)
    until(int(stopped[0]) + 3)
    process.kill()
    assert programs.gone(within=5)
    said = "".join(process.communicate())
    why = r"truncated or altered" if damaged.suffix == ".pt" else r"model\.safetensors does not match its digest"
    name = rf"{tmp_path}/.*-0*{stopped[0]}\b\S*"
    assert re.search(rf"warning: checkpoint {name} is damaged \({why}\).*; trying the one", said), said
    # Ctrl-C, started in another way: one common step is saved, and it is where the next start goes on.
    process = programs.start(*run, "--nproc", nproc, cwd=code)
    until(newest_step(tmp_path) + 1)
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    done = programs.finish(process, 130)
    assert time.monotonic() - started < here(10)
    stopped = re.findall(r"stopped by SIGINT: checkpoint at step (\d+); go on with --resume auto", done.stderr)
    assert stopped == [str(newest_step(tmp_path))]
    # And to the end.
    done = programs.run(*run, "--nproc", nproc, cwd=job.code)
    assert re.search(rf"resumed from .* at step {stopped[0]}\n", done.stdout), "nothing is done again"
    whole = jobs.whole(program, nproc)
    assert result(tmp_path)["parameter_hash"] == result(whole)["parameter_hash"]
    assert result(tmp_path)["metrics"] == result(whole)["metrics"]
    assert losses(tmp_path) == losses(whole)


@pytest.mark.parametrize("flags", [(), ("--nproc", 2)])
def test_ctrl_c_twice_within_a_second_still_saves(
    programs: Programs, tmp_path: Path, jobs: Jobs, flags: tuple[object, ...], eventually: Eventually
) -> None:
    """As fingers do; a second one later means not to wait."""
    job = jobs["mnist_ddp_spawn"]
    process = programs.start(*job.endless, *flags, "--out", tmp_path, cwd=job.code)
    eventually(lambda: newest_step(tmp_path) >= 3, 60, "step 3")
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    done = programs.finish(process, 130)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert line == f"stopped by SIGINT: checkpoint at step {newest_step(tmp_path)}; go on with --resume auto"


WRITE, CLOSE = "        write(self.folder, step, state)\n", "            self._log.close(error)\n"
PAUSE = "import time; time.sleep(1)"
LATE = "import time; time.sleep(dist.get_rank() == 0); print('warning: closed', file=__import__('sys').stderr)"
AGAIN = f"import os; os.kill(os.getpid(), {signal.SIGINT:d})"


@pytest.mark.parametrize(
    ("file", "before", "after", "code"),
    [
        ("checkpoint", WRITE, f"        {PAUSE}; {AGAIN}; {PAUSE}\n{WRITE}", 130),
        ("checkpoint", WRITE, "        raise UserError('full')\n", 2),
        ("run", CLOSE, f"            {AGAIN}\n{CLOSE}", 130),
        ("run", CLOSE, f"            {LATE}\n{CLOSE}", 130),
    ],
    ids=["Ctrl-C while it is written", "it cannot be written", "Ctrl-C after it is written", "rank 0 ends later"],
)
def test_a_step_is_named_when_it_is_saved(
    programs: Programs, tmp_path: Path, jobs: Jobs, file: str, before: str, after: str, code: int
) -> None:
    """An impatient user's second Ctrl-C does not cut the writing off, and no rank says before that it is done."""
    stopped = ("common/train/stop.py", "self._signum = 0", f"self._signum = {signal.SIGINT:d}")
    broken = mutated(tmp_path / "code", stopped, (f"common/train/{file}.py", before, after))
    done = programs.run(*jobs["mnist_ddp_spawn"].endless, "--nproc", 2, "--out", tmp_path, cwd=broken, code=code)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    saved = f"stopped by SIGINT: checkpoint at step {newest_step(tmp_path)}; go on with --resume auto"
    assert line == done.stderr.splitlines()[-1] == (saved if code == 130 else "error: full")


@pytest.mark.parametrize(("program", "nproc"), IN_TURN)
def test_a_full_disk_is_named(
    programs: Programs, disk: Path, jobs: Jobs, program: str, nproc: int, eventually: Eventually
) -> None:
    """The run ends with one line; the last checkpoint stays, nothing half-written does, and it can go on."""
    job, out = jobs[program], disk / "out"
    run = (*job.endless, "--nproc", nproc, "--resume", "auto", "--out", out)
    process = programs.start(*run, cwd=job.code)
    eventually(lambda: newest_step(out) >= 6, 60, "step 6")
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12):
            while size in write(ballast.fileno(), size):
                pass
    done = programs.finish(process, 2, limit=60)
    assert len(errors(done)) == 1, done.stdout + done.stderr
    (line,) = errors(done)
    assert re.match(
        rf"error: {out}/\S+ cannot be written \(No space left on device.*\): [\d,]+ bytes needed, [\d,]+ free$", line
    ), line
    assert "Traceback" not in done.stderr
    left = [path.name for path in out.rglob("*") if path.name.endswith(".tmp")]
    left += [path.name for path in (out / "checkpoints").glob("checkpoint-*") if not (path / "seal.json").exists()]
    assert left == []
    kept = newest_step(out)
    (disk / "ballast").unlink()
    process = programs.start(*run, cwd=job.code)
    eventually(lambda: newest_step(out) > kept, 60, "another checkpoint")
    process.send_signal(signal.SIGTERM)
    assert f"at step {kept}\n" in programs.finish(process, 143).stdout


def write(descriptor: int, size: int) -> tuple[int, ...]:
    """Write so many bytes: their number, or nothing when the disk is full."""
    try:
        return (os.write(descriptor, bytes(size)),)
    except OSError:
        return ()


def returning_early(module: Path) -> tuple[str, str, str]:
    """A change to a program: rank 1 leaves before it trains."""
    line = re.search(r"^( *)run\.(?:resume|begin)\(.*\n", module.read_text(), re.MULTILINE)
    assert line
    return str(module.relative_to(ROOT)), line[0], f"{line[1]}if dist.get_rank() == 1: return\n{line[0]}"


RAISES = (  # after some steps
    "common/train/run.py",
    "state.step += 1\n",
    "state.step += 1\n"
    "        if state.step == 7 and dist.get_rank() == 1:\n"
    "            (self.args.out / 'raised').touch()\n"
    "            raise ValueError('a bug in one rank')\n",
)

IN_THE_TRAINER = (
    "examples/bert_dp/trainer_parts.py",
    "self.run.state.step = state.global_step\n",
    RAISES[2]
    .replace("state.step += 1", "self.run.state.step = state.global_step")
    .replace("if state.step == 7", "if state.global_step == 7")
    .replace("self.args", "self.run.args"),
)


@pytest.fixture(scope="module")
def broken(jobs: Jobs) -> Path:
    """The code with a bug in one rank of each program: an exception."""
    return jobs.broken("raises", RAISES, IN_THE_TRAINER)


GREEDY = [
    (file, line, change.replace("raise ValueError('a bug in one rank')", "torch.empty(1 << 50)"))
    for file, line, change in (RAISES, IN_THE_TRAINER)
]


@pytest.fixture(scope="module")
def greedy(jobs: Jobs) -> Path:
    """The code, of which one rank asks for more memory than any machine has."""
    return jobs.broken("greedy", *GREEDY)


@pytest.fixture(scope="module")
def leaving(jobs: Jobs) -> Path:
    """The code with another bug: one rank leaves before it trains."""
    names = (str(jobs[program].words[1]) for program in PROGRAMS)
    named = {name if name.count(".") > 1 else f"{name}.train" for name in names}
    modules = {ROOT / f"{name.replace('.', '/')}.py" for name in named}
    return jobs.broken("leaves", *(returning_early(module) for module in sorted(modules)))


@pytest.mark.timed
@pytest.mark.parametrize(("program", "nproc"), IN_TURN)
def test_an_exception_in_one_rank_ends_all_ranks(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, nproc: int, broken: Path, eventually: Eventually
) -> None:
    process = programs.start(*launched(jobs[program], nproc, "--out", tmp_path), cwd=broken)
    eventually((tmp_path / "raised").exists, 60, "the exception")
    raised_at = time.monotonic()
    done = programs.finish(process, 1)
    assert time.monotonic() - raised_at < here(5)
    assert by_ranks(done).count("Traceback") == 1, done.stderr
    assert errors(done)[0].startswith("error: rank 1: Traceback")
    assert "ValueError: a bug in one rank" in done.stderr
    assert programs.gone(within=0.5)


@pytest.mark.parametrize(("program", "nproc"), TURNED)
def test_a_rank_without_memory_is_named(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, nproc: int, greedy: Path
) -> None:
    done = programs.run(*jobs[program].words, "--nproc", nproc, "--out", tmp_path, cwd=greedy, code=1)
    (line,) = errors(done)
    assert re.match(r"error: rank 1: .*can't allocate memory: .* \(what may help: a smaller --batch-size", line), line
    assert "Traceback" not in done.stderr
    assert programs.gone(within=2)


@pytest.mark.timed
@pytest.mark.parametrize(("program", "nproc"), TURNED)
def test_a_rank_that_leaves_early_ends_the_others(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, nproc: int, leaving: Path
) -> None:
    run = launched(jobs[program], nproc, "--timeout", 8, "--out", tmp_path)
    started = time.monotonic()
    done = programs.run(*run, cwd=leaving, code=1)
    assert time.monotonic() - started < here(10), "with starting"
    (line,) = errors(done)
    assert re.match(r"error: rank [02]: lost another process \(.*no word from rank .*1", line), line
    assert "Traceback" not in by_ranks(done)
    assert not (tmp_path / "result.json").exists()


def node(programs: Programs, job: Job, port: int, number: int, out: Path, *more: object) -> "subprocess.Popen[str]":
    """One of two machines with one process each."""
    url = ("--world-size", 2, "--rank", number, "--dist-url", f"tcp://127.0.0.1:{port}")
    return programs.start(*job.words, *url, *more, "--out", out, cwd=job.code)


@pytest.mark.timed
@pytest.mark.parametrize("program", PROGRAMS)
def test_nodes_that_see_other_checkpoints_stop(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, free_port: int
) -> None:
    """Only the first node has the folder of the run that is to be resumed."""
    job, whole, outs = jobs[program], jobs.whole(program), (tmp_path / "0", tmp_path / "1")
    shutil.copytree(whole / "checkpoints", outs[0] / "checkpoints")
    started = time.monotonic()
    nodes = [
        node(programs, job, free_port, number, out, *job.every, "--resume", "auto") for number, out in enumerate(outs)
    ]
    done = [programs.finish(each, 2) for each in nodes]
    assert time.monotonic() - started < here(10), "with starting"
    (line,) = errors(done[0]) + errors(done[1])
    steps = rf"\(rank 0: {newest_step(whole)}, rank 1: 0\)"
    assert re.match(rf"error: the ranks disagree on the step to resume from {steps}: ", line), line
    left = ("result.json", "metrics.jsonl", "best.safetensors", "model")
    assert not [out / name for out in outs for name in left if (out / name).exists()], "before the first step"


OTHER_MODEL = {  # or another way to train it
    "mnist_ddp_spawn": ("batch_size", "-b", 60),
    "imagenet_ddp": ("arch", "-a", "resnet34"),
    "manual_allreduce_sgd": ("algorithm", "-a", "flat"),
    "resnet_pipeline": ("arch", "-a", "resnet34"),
    "bert_dp.train": ("hidden", "--hidden", 128),
    "bert_dp.trainer": ("hidden", "--hidden", 128),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_resuming_with_other_flags_is_refused(programs: Programs, tmp_path: Path, jobs: Jobs, program: str) -> None:
    """And another number of processes is not, but said."""
    job, out = jobs[program], tmp_path / "out"
    shutil.copytree(jobs.whole(program), out)
    run = (*job.words, *job.every, "--resume", "auto", "--out", out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    done = programs.run(*run, "--nproc", NPROC, "--seed", 7, cwd=job.code, code=2)
    (line,) = errors(done)
    assert re.match(r"error: checkpoint .* was made with seed = \d+, this run has 7: give the same flags", line), line
    name, *other = OTHER_MODEL[program]
    (line,) = errors(programs.run(*run, "--nproc", NPROC, *other, cwd=job.code, code=2))
    assert re.match(rf"error: checkpoint .* was made with {name} = .+, this run has .+: give the same", line), line
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    last = newest(out)
    shutil.rmtree(last.parent) if last.suffix == ".safetensors" else last.unlink()
    done = programs.run(*run, "--nproc", 2, cwd=job.code)
    assert "warning: continuing with 1 node(s), world 3 -> 2: the same samples follow in the same order" in done.stderr
    assert (result(out)["world_size"], result(out)["steps"]) == (2, result(jobs.whole(program))["steps"])


@pytest.mark.timed
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_port_in_use_and_a_peer_that_never_joins_are_named(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, free_port: int
) -> None:
    job = jobs[program]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        started = time.monotonic()
        url = ("--nproc", 2, "--dist-url", f"tcp://127.0.0.1:{port}")
        done = programs.run(*job.words, *url, "--out", tmp_path, cwd=job.code, code=2)
        assert time.monotonic() - started < here(10), "with starting"
    assert re.fullmatch(rf"error: port {port} cannot be used \(Address already in use\): .*\n", done.stderr)
    started = time.monotonic()
    done = programs.finish(node(programs, job, free_port, 0, tmp_path, "--timeout", 1), 2)
    assert time.monotonic() - started < here(1 + 10), "with starting"
    assert re.fullmatch(r"error: 1 of 2 processes joined within 1 s; missing: rank 1\. .*\n", done.stderr), done.stderr


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("program", PROGRAMS[:5])  # the Trainer's folders: tests/faults/test_trainer.py
def test_no_code_in_a_checkpoint_is_executed_by_a_program(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str
) -> None:
    """Its name holds the digest of its content, as whoever means harm can see to."""
    job, folder = jobs[program], tmp_path / "out" / "checkpoints"
    shutil.copytree(jobs.whole(program) / "checkpoints", folder)
    content = pickle.dumps(Payload(tmp_path / "executed"), 2)
    old = newest(tmp_path / "out")
    path = old.with_name(f"{old.name[:14]}{hashlib.sha256(content).hexdigest()[:16]}.pt")
    old.unlink()
    path.write_bytes(content)
    run = (*job.words, *job.every, "--nproc", NPROC, "--out", tmp_path / "out")
    done = programs.run(*run, "--resume", path, cwd=job.code, code=2)
    assert errors(done) == [f"error: {path} is not a checkpoint of this program: it holds something else than tensors"]
    assert not (tmp_path / "executed").exists()


# After a step, in which they are connected, the ranks wait for the end of what is done to them.
OWN, TRAINER = "            self._end_step(total)\n", "        self.run.state.step = state.global_step\n"
WAIT = "while state.{0} > 8 and ({1}.args.out / 'hold').exists():\n{2}__import__('time').sleep(0.05)\n"
HELD = (
    ("common/train/run.py", OWN, f"{OWN}{' ' * 12}{WAIT.format('step', 'self', ' ' * 16)}"),
    (
        "examples/bert_dp/trainer_parts.py",
        TRAINER,
        f"{TRAINER}{' ' * 8}{WAIT.format('global_step', 'self.run', ' ' * 12)}",
    ),
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_strangers_at_every_port_change_nothing(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, eventually: Eventually
) -> None:
    """2,000 connections with garbage to each port, of the store and of gloo."""
    job, code, hold = jobs[program], jobs.broken("held", *HELD), tmp_path / "out" / "hold"
    hold.parent.mkdir()
    hold.touch()
    process = programs.start(*job.words, *job.every, "--nproc", NPROC, "--out", tmp_path / "out", cwd=code)
    eventually(lambda: newest_step(tmp_path / "out") >= 3, 100, "step 3")
    ports = sorted(port for _, port in programs.ports())
    assert len(ports) >= 1 + NPROC, "the store's and one of each rank"
    made = 0
    for number in range(2000):
        for port in ports:
            with socket.socket() as stranger, contextlib.suppress(OSError):
                stranger.connect(("127.0.0.1", port))
                stranger.sendall((b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 64, b"")[number % 4])
                made += 1
    assert made > 0.99 * 2000 * len(ports)
    assert process.poll() is None, "still training"
    hold.unlink()
    done = programs.finish(process)
    assert errors(done) == []
    assert result(tmp_path / "out")["parameter_hash"] == result(jobs.whole(program))["parameter_hash"]


def test_parallel_starts_do_not_meet_at_one_port(programs: Programs, tmp_path: Path, jobs: Jobs) -> None:
    """Twenty jobs at once, each program several times."""
    started = []
    for number, program in enumerate((PROGRAMS * 4)[:20]):
        job = jobs[program]
        flags = ("--epochs", 1, "--nproc", 2, "--threads", 1, "--out", tmp_path / str(number))
        started.append(programs.start(*job.words, *flags, cwd=job.code))
    for number, process in enumerate(started):
        programs.finish(process, limit=200)
        assert result(tmp_path / str(number))["world_size"] == 2
