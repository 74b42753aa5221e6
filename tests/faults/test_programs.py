"""The same faults done to every program: what the user reads, how soon, and how the run goes on."""

import os
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
from tests.faults.jobs import NPROC, PROGRAMS, Job, Jobs
from tests.runs import Eventually, losses, newest_step, result

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", NPROC, "--monitor-interval", 0.1)


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


def newest(out: Path) -> Path:
    """The newest checkpoint: a file, or the largest file of the Trainer's folder."""
    paths = list((out / "checkpoints").glob("step-*.pt"))
    if not paths:
        (folder,) = (out / "checkpoints").glob(f"checkpoint-{newest_step(out)}")
        paths = list(folder.glob("*.safetensors"))
    return max(paths)


@pytest.mark.timed
@pytest.mark.parametrize("program", PROGRAMS)
def test_killed_stopped_damaged_and_orphaned_it_ends_with_the_same_bits(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, eventually: Eventually
) -> None:
    """A run's hard life: one fault after the other, under torchrun and without it."""
    job, chance = jobs[program], random.Random(program)
    run = (*job.words, *job.every, "--resume", "auto", "--out", tmp_path)

    def until(step: int) -> None:
        eventually(lambda: newest_step(tmp_path) >= step, 60, f"step {step}")

    # SIGKILL of a rank: torchrun starts all again, and they go on.
    process = programs.start(*TORCHRUN, "--max-restarts", 1, *run, cwd=job.code)
    until(6)
    time.sleep(chance.uniform(0, 0.05))
    killed_at = newest_step(tmp_path)
    os.kill(programs.worker(chance.randrange(NPROC)), signal.SIGKILL)
    until(killed_at + 9)
    # SIGTERM: one common step is saved.
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = programs.finish(process, 1)  # torchrun's own code; that of a container: tests/common/test_entrypoint.py
    assert time.monotonic() - started < 10
    resumed = re.findall(r"resumed from .* at step (\d+)", done.stdout)
    assert len(resumed) == 1, done.stdout + done.stderr
    assert int(resumed[0]) >= killed_at, "less than one interval between checkpoints is done again"
    stopped = re.findall(r"stopped by SIGTERM: checkpoint at step (\d+); go on with --resume auto", done.stderr)
    assert stopped == [str(newest_step(tmp_path))]
    assert programs.gone(within=2)
    # That checkpoint is cut: the one before it is used. SIGKILL of the agent: its workers end by themselves.
    damaged = newest(tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    process = programs.start(*TORCHRUN, *run, cwd=job.code)
    until(int(stopped[0]) + 3)
    process.kill()
    assert programs.gone(within=5)
    said = "".join(process.communicate())
    assert re.search(rf"warning: checkpoint {tmp_path}/.*-0*{stopped[0]}\b.* is damaged \(.*; trying the one", said)
    # And to the end, started in another way.
    done = programs.run(*run, "--nproc", NPROC, cwd=job.code)
    assert "resumed from" in done.stdout
    whole = jobs.whole(program)
    assert result(tmp_path)["parameter_hash"] == result(whole)["parameter_hash"]
    assert result(tmp_path)["metrics"] == result(whole)["metrics"]
    assert losses(tmp_path) == losses(whole)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_full_disk_is_named(programs: Programs, disk: Path, jobs: Jobs, program: str, eventually: Eventually) -> None:
    """The run ends with one line; the last checkpoint stays, nothing half-written does, and it can go on."""
    job, out = jobs[program], disk / "out"
    run = (*job.endless, "--nproc", NPROC, "--resume", "auto", "--out", out)
    process = programs.start(*run, cwd=job.code)
    eventually(lambda: newest_step(out) >= 6, 60, "step 6")
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12):
            while size in write(ballast.fileno(), size):
                pass
    done = programs.finish(process, 2, limit=60)
    assert len(errors(done)) == 1, done.stdout + done.stderr
    (line,) = errors(done)
    assert re.search(r"error: .* cannot be written \(.*\): [\d,]+ bytes needed, [\d,]+ free$", line), line
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
    line = re.search(r"^( *)report\.begin\(.*\n", module.read_text(), re.MULTILINE)
    assert line
    return str(module.relative_to(ROOT)), line[0], f"{line[1]}if world.rank == 1: return\n{line[0]}"


RAISES = (  # after some steps
    "common/report.py",
    "self._last_step = step\n",
    "self._last_step = step\n"
    "        if step == 7 and self.world.rank == 1:\n"
    "            (self.out / 'raised').touch()\n"
    "            raise ValueError('a bug in one rank')\n",
)


@pytest.fixture(scope="module")
def broken(jobs: Jobs) -> Path:
    """The code with a bug in one rank of each program: an exception."""
    return jobs.broken("raises", RAISES)


@pytest.fixture(scope="module")
def leaving(jobs: Jobs) -> Path:
    """The code with another bug: one rank leaves before it trains."""
    modules = {ROOT / f"{str(jobs[program].words[1]).replace('.', '/')}.py" for program in PROGRAMS}
    return jobs.broken("leaves", *(returning_early(module) for module in sorted(modules)))


@pytest.mark.timed
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_exception_in_one_rank_ends_all_ranks(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, broken: Path, eventually: Eventually
) -> None:
    process = programs.start(*jobs[program].words, "--nproc", NPROC, "--out", tmp_path, cwd=broken)
    eventually((tmp_path / "raised").exists, 60, "the exception")
    started = time.monotonic()
    done = programs.finish(process, 1)
    assert time.monotonic() - started < 5
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert errors(done)[0].startswith("error: rank 1: Traceback")
    assert "ValueError: a bug in one rank" in done.stderr
    assert programs.gone(within=0.5)


@pytest.mark.timed
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rank_that_leaves_early_ends_the_others(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, leaving: Path
) -> None:
    run = (*jobs[program].words, "--nproc", NPROC, "--timeout", 8, "--out", tmp_path)
    started = time.monotonic()
    done = programs.run(*run, cwd=leaving, code=1)
    assert time.monotonic() - started < 10, "with starting"
    (line,) = errors(done)
    assert re.match(r"error: rank [02]: lost another process \(.*no word from rank .*1", line), line
    assert "Traceback" not in done.stderr
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
    assert time.monotonic() - started < 10, "with starting"
    (line,) = errors(done[0]) + errors(done[1])
    steps = rf"\(rank 0: {newest_step(whole)}, rank 1: 0\)"
    assert re.match(rf"error: the ranks disagree on the step to resume from {steps}: ", line), line
    assert not [out for out in outs if (out / "result.json").exists()]


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
        assert time.monotonic() - started < 10, "with starting"
    assert re.fullmatch(rf"error: port {port} cannot be used \(Address already in use\): .*\n", done.stderr)
    started = time.monotonic()
    done = programs.finish(node(programs, job, free_port, 0, tmp_path, "--timeout", 1), 2)
    assert time.monotonic() - started < 1 + 10, "with starting"
    assert re.fullmatch(r"error: 1 of 2 processes joined within 1 s; missing: rank 1\. .*\n", done.stderr), done.stderr


@pytest.mark.parametrize("program", ["mnist_ddp_spawn", "resnet_pipeline", "bert_dp.trainer"])
def test_strangers_at_every_port_change_nothing(
    programs: Programs, tmp_path: Path, jobs: Jobs, program: str, eventually: Eventually
) -> None:
    """2,000 connections with garbage to the store and to gloo, by which all ranks sum, or neighbours exchange."""
    job = jobs[program]
    process = programs.start(*job.words, *job.every, "--nproc", NPROC, "--out", tmp_path, cwd=job.code)
    eventually(lambda: newest_step(tmp_path) >= 3, 100, "step 3")
    ports = sorted(port for _, port in programs.ports())
    assert len(ports) >= 1 + NPROC, "the store's and one of each rank"
    for number in range(2000):
        with socket.socket() as stranger:
            try:
                stranger.connect(("127.0.0.1", ports[number % len(ports)]))
                stranger.sendall((b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 64, b"")[number % 4])
            except OSError:
                continue
    assert process.poll() is None, "still training"
    done = programs.finish(process)
    assert errors(done) == []
    assert result(tmp_path)["parameter_hash"] == result(jobs.whole(program))["parameter_hash"]
