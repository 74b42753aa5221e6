"""From a command line and a launcher's variables to a place in the job."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common import launch
from common.launch import NodeArgs, Place, RunArgs, UserError, launched, place, read_args

FILE = {"INIT_METHOD": "file:///tmp/rendezvous"}
URL = "tcp://node0:1234"
TORCHRUN = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "node0", "MASTER_PORT": "1234", "GROUP_RANK": "1"}
SRUN = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_GTIDS": "8,9,10", "SLURM_NTASKS": "11"}
SRUN |= {"SLURM_STEP_NUM_TASKS": "11", "SLURM_JOB_ID": "4200123", "SLURM_CPUS_PER_TASK": "7"}
SRUN |= {"SLURM_STEP_NODELIST": "gpu[03-04],login"}
# A shell of `srun --pty` or `salloc --ntasks 4`: one task, whatever the job has.
SHELL = SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TWO_NODES: Any = {"world_size": 2, "rank": 1, "nproc": 3, "dist_url": URL}


@pytest.mark.parametrize(
    ("args", "local_rank", "env", "expected"),
    [
        (RunArgs(), 0, {}, Place(0, 0, 1, 1, "")),
        (RunArgs(nproc=3), 2, FILE, Place(2, 2, 3, 3, "file:///tmp/rendezvous")),
        (NodeArgs(nproc=3), 1, FILE, Place(1, 1, 3, 3, "file:///tmp/rendezvous")),
        (NodeArgs(**TWO_NODES), 1, {}, Place(4, 1, 6, 3, URL)),
        (NodeArgs(**TWO_NODES), 1, FILE, Place(4, 1, 6, 3, URL)),
        (RunArgs(), 0, TORCHRUN, Place(2, 0, 4, 2, URL)),
        (NodeArgs(**TWO_NODES), 0, TORCHRUN, Place(2, 0, 4, 2, URL)),
        (RunArgs(), 0, TORCHRUN | SRUN, Place(2, 0, 4, 2, URL)),
        (RunArgs(), 1, SRUN, Place(9, 1, 11, 3, "tcp://gpu03:20123")),
        (RunArgs(), 1, SRUN | {"MASTER_PORT": "1"}, Place(9, 1, 11, 3, "tcp://gpu03:1")),
        (
            RunArgs(),
            0,
            SRUN | {"SLURM_STEP_NODELIST": "a-1,b", "SLURM_GTIDS": "9", "MASTER_ADDR": "::1"},
            Place(9, 1, 11, 1, "tcp://::1:20123"),
        ),
        (RunArgs(nproc=2), 1, SHELL | FILE, Place(1, 1, 2, 2, "file:///tmp/rendezvous")),
        (RunArgs(), 0, {"RANK": "", "WORLD_SIZE": ""}, Place(0, 0, 1, 1, "")),
    ],
)
def test_place(
    args: RunArgs,
    local_rank: int,
    env: dict[str, str],
    expected: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", environment := dict(env))
    assert launched() == (env.keys() >= TORCHRUN.keys() or env.get("SLURM_STEP_NUM_TASKS") == "11")
    assert place(args, local_rank) == expected
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [int(environment[name]) for name in names] == list(expected[:4])
    by_srun = env.get("SLURM_STEP_NUM_TASKS") == "11" and "RANK" not in env
    assert environment.get("OMP_NUM_THREADS") == ("7" if by_srun else None)


def test_incomplete_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and WORLD_SIZE, set by hand or left over, without the rest of torchrun's variables."""
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0"})
    with pytest.raises(UserError, match="LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT"):
        place(RunArgs(), 0)


@dataclass(frozen=True)
class Args(NodeArgs):
    """A program."""

    out: Path = Path("~/run")
    """Folder."""
    data_dir: Path | None = None
    """Folder."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def read(*flags: str, **env: str) -> Any:
        monkeypatch.setattr(os, "environ", {"HOME": "/home/user", **env})
        monkeypatch.setattr("sys.argv", ["program", *flags])
        return read_args(Args, "examples.program")

    return read


def test_flags(read: Callable[..., Any]) -> None:
    args = read("-b", "12", "--nproc", "3", "-p", "5", "--seed", "-1")
    assert (args.batch_size, args.nproc, args.log_every, args.seed) == (12, 3, 5, -1)
    assert args.out == Path("/home/user/run")
    assert read("--out", "'quoted'/~").out == Path("'quoted'/~")
    args = read("--out=~/a", "--data-dir", "~/b", "--resume=~/c.pt")
    assert (args.out, args.data_dir) == (Path("/home/user/a"), Path("/home/user/b"))
    assert args.resume == "/home/user/c.pt"
    assert read().resume == "no"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch-size", "0"], "error: --batch-size must be positive, got 0"),
        (["--timeout", "-1"], "error: --timeout must be positive, got -1.0"),
        (["--checkpoint-every", "0"], "error: --checkpoint-every must be positive"),
        (["--nproc", "0"], "error: --nproc must be positive"),
        (["--world-size", "2", "--rank", "2", "--dist-url", URL], "error: --rank must be from"),
        (["--world-size", "2", "--rank", "1"], "error: --world-size needs --dist-url"),
        (["--epochs", "two"], "--epochs"),
    ],
)
def test_only_the_first_rank_reports_a_mistake(
    flags: list[str],
    words: str,
    read: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other ranks of torchrun and srun wait until the launcher ends them."""
    waits = list[float]()
    monkeypatch.setattr(launch.time, "sleep", waits.append)
    node = {"GROUP_RANK": "1", "RANK": "2", "LOCAL_RANK": "0"}  # torchrun keeps a log per node
    for env in ({}, {"SLURM_PROCID": "0"}, node, {"RANK": ""}):
        with pytest.raises(SystemExit) as exit_:
            read(*flags, **env)
        assert exit_.value.code == 2
        assert words in capsys.readouterr().err
    assert not waits
    for env in ({"SLURM_PROCID": "1"}, {"RANK": "1"}, node | {"LOCAL_RANK": "1"}):
        with pytest.raises(SystemExit):
            read(*flags, **env)
        assert capsys.readouterr().err == ""
    assert len(waits) == 3


@pytest.mark.parametrize("env", [TORCHRUN | {"LOCAL_RANK": "0"}, SRUN | {"SLURM_PROCID": "0"}])
def test_nproc_is_not_ignored(env: dict[str, str], read: Callable[..., Any], capsys: Any) -> None:
    """RANK and WORLD_SIZE may also be left over in a shell."""
    with pytest.raises(SystemExit):
        read("--nproc", "2", **env)
    assert "error: --nproc has no effect" in capsys.readouterr().err
    assert read("--nproc", "2", **SHELL).nproc == 2


@pytest.mark.parametrize("flags", [["--nproc", "2"], ["--workers", "1"], []], ids=" ".join)
def test_long_name_of_the_temporary_folder(
    flags: list[str], read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The sockets of multiprocessing lie there; their names have at most 107 bytes."""
    monkeypatch.setattr("tempfile.tempdir", "/数" * 18)
    if not flags:
        assert read().nproc == 1
        return
    with pytest.raises(SystemExit):
        read(*flags)
    assert "error: TMPDIR" in capsys.readouterr().err
