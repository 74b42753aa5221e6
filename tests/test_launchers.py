"""Programs from nothing: every launcher starts the same training, and ends it in the same way."""

import json
import re
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1
from typing import Any

import pytest

from tests import programs, ranks
from tests.hooks import At
from tests.programs import PYTHON, TORCHRUN, Program
from tests.reference import Case, cases

EXAMPLE = "examples.mnist_ddp_spawn"
FLAGS = ["--epochs", "2", "--device", "cpu", "--precision", "fp32", "--checkpoint-every", "4"]
SPAWN = (*PYTHON, EXAMPLE, "--nproc", "2", *FLAGS, "--out")


def torchrun(*options: str, nproc: int = 2, module: str = EXAMPLE) -> list[str]:
    """Return a torchrun command; its port is free, so that tests can run side by side."""
    return [*TORCHRUN, str(nproc), "--master-port", str(ranks.free_port()), *options, "-m", module]


def slurm(task: int) -> dict[str, str]:
    """Return the variables of a task of `srun --ntasks 2 --nodes 1`."""
    names = {"JOB_ID": str(ranks.free_port()), "STEP_NODELIST": "localhost"}
    names |= {"PROCID": str(task), "LOCALID": str(task), "GTIDS": "0,1", "STEP_NUM_TASKS": "2"}
    return {f"SLURM_{name}": value for name, value in names.items()}


def parameter_hash(out: Path) -> str:
    return json.loads((out / "result.json").read_text())["parameter_hash"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the same training in forked ranks."""
    out = tmp_path_factory.mktemp("expected") / "out"
    run = ranks.run("mnist_ddp_spawn", 2, FLAGS, out=out).done()
    return run.result["parameter_hash"]


# --------------------------------------------------------------------------------------- starts


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
@pytest.mark.parametrize("case", [case for case in cases() if case.number == 0], ids=str)
def test_example_starts_from_nothing(case: Case, launcher: str, data: Path, tmp_path: Path) -> None:
    module = f"examples.{case.example}"
    command = [*PYTHON, module] if launcher == "python" else torchrun(nproc=1, module=module)
    flags = [*case.flags(data / str(case)), "--device", "cpu", "--epochs", "1"]
    programs.run(*command, *flags, "--out", tmp_path / "out").done()
    assert (tmp_path / "out/result.json").exists()


def test_spawn(expected: str, tmp_path: Path) -> None:
    program = programs.run(*SPAWN, tmp_path / "out").done()
    assert program.stdout.startswith("starting 2 process(es)")
    assert program.stderr == ""
    assert parameter_hash(tmp_path / "out") == expected


def test_torchrun(expected: str, tmp_path: Path) -> None:
    programs.run(*torchrun(), *FLAGS, "--out", tmp_path / "out").done()
    assert parameter_hash(tmp_path / "out") == expected


def test_torchrun_by_variables(expected: str, tmp_path: Path) -> None:
    """Kubernetes' training operators set PET_* variables instead of torchrun's flags."""
    env = {"PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": str(ranks.free_port())}
    command = [*PYTHON, "torch.distributed.run", "-m", EXAMPLE, *FLAGS, "--out", tmp_path / "out"]
    programs.run(*command, env=env).done()
    assert parameter_hash(tmp_path / "out") == expected


def test_srun(expected: str, tmp_path: Path) -> None:
    command = [*PYTHON, EXAMPLE, *FLAGS, "--out", str(tmp_path / "out")]
    first, second = slurm(0), slurm(1)
    second["SLURM_JOB_ID"] = first["SLURM_JOB_ID"]
    for program in programs.run_all(command, command, env=[first, second]):
        program.done()
    assert parameter_hash(tmp_path / "out") == expected


def test_two_nodes_by_hand(expected: str, tmp_path: Path) -> None:
    url = f"tcp://localhost:{ranks.free_port()}"
    node = [*PYTHON, EXAMPLE, *FLAGS, "--out", str(tmp_path / "out"), "--world-size", "2"]
    node += ["--dist-url", url, "--rank"]
    for program in programs.run_all([*node, "1"], [*node, "0"], env=[{}, {}]):
        program.done()
    assert parameter_hash(tmp_path / "out") == expected


def test_torchrun_restarts_after_a_worker_was_killed(expected: str, tmp_path: Path) -> None:
    command = torchrun("--max-restarts", "2")
    fault = At(1, 7, SIGKILL)
    program = programs.run(*command, *FLAGS, "--out", tmp_path / "out", fault=fault).done()
    assert "resumed from" in program.stdout
    assert parameter_hash(tmp_path / "out") == expected


# ----------------------------------------------------------------------------------------- ends


def errors(program: Program) -> list[str]:
    return re.findall("^error: (.*)", program.stderr, re.MULTILINE)


def test_killed_rank_is_named(tmp_path: Path) -> None:
    program = programs.run(*SPAWN, tmp_path / "out", fault=At(1, 6, SIGKILL))
    assert program.code == 137, program.stderr
    assert "error: local rank 1 was killed by SIGKILL" in program.stderr
    assert "Traceback" not in program.stderr


@pytest.mark.parametrize(
    ("signal", "to", "code"), [(SIGTERM, "launcher", 143), (SIGINT, "group", 130)]
)
def test_signal_saves_a_checkpoint(signal: int, to: str, code: int, tmp_path: Path) -> None:
    """SIGTERM as from a scheduler; Ctrl-C as from a terminal, which signals all processes."""
    program = programs.run(*SPAWN, tmp_path / "out", fault=At(0, 2, signal, to))
    assert program.code == code, program.stderr
    assert len(program.stderr.splitlines()) == 1, program.stderr
    assert "saved" in program.stderr
    assert list((tmp_path / "out/checkpoints").glob("step-*.pt"))


def test_usr1_to_all_processes_changes_nothing(expected: str, tmp_path: Path) -> None:
    """A scheduler can send it before the time limit; here it asks for a report of hanging ranks."""
    programs.run(*SPAWN, tmp_path / "out", fault=At(1, 6, SIGUSR1, "group")).done()
    assert parameter_hash(tmp_path / "out") == expected


def test_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    """`programs.run` returns when all processes have closed their output."""
    program = programs.run(*SPAWN, tmp_path / "out", fault=At(0, 6, SIGKILL, "launcher"))
    assert program.code == -9


def test_killed_torchrun_leaves_no_rank(tmp_path: Path) -> None:
    fault = At(0, 6, SIGKILL, "launcher")
    program = programs.run(*torchrun(), *FLAGS, "--out", tmp_path / "out", fault=fault)
    assert program.code == -9


MISTAKES = [
    ["--batch-size", "121"],
    ["--device", "cuda"],
    ["--timeout", "-1"],
    ["--epochs", "two"],
    ["--no-such-flag"],
]


@pytest.mark.parametrize("flags", MISTAKES, ids=" ".join)
def test_mistake_is_reported_once(flags: list[str], tmp_path: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    program = programs.run(*SPAWN, tmp_path / "out", *flags, env=env)
    assert program.code == 2, program.stderr
    lines = program.stderr.splitlines()
    assert lines.count(lines[0]) == 1, program.stderr
    assert len(errors(program)) == (not lines[0].startswith("╭")), program.stderr
    assert "Traceback" not in program.stderr


def test_help_is_quick_to_import(tmp_path: Path) -> None:
    """`--help` does not import torch: an import of it would fail here."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch')\n")
    env: dict[str, Any] = {"PYTHONPATH": f"{tmp_path}:{programs.SITE}"}
    program = programs.run(*PYTHON, EXAMPLE, "--help", env=env).done()
    assert "--batch-size" in program.stdout
