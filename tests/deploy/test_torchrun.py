"""docker/torchrun.py exits with the code of the cause, and the last line is the reason."""

import signal
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.hooks import At
from tests.ranks import free_port

SCRIPT = programs.ROOT / "docker" / "torchrun.py"
CODES = f"import runpy; print(runpy.run_path({str(SCRIPT)!r})['exit_code']({{}}))"


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([75, 2], 2),
        ([143, 1], 1),
        ([143, 75], 75),  # it lost another node; then torchrun stopped the other rank
        ([75, -9], 137),
        ([75, -6], 75),  # NCCL's watchdog aborted a rank after a timeout
        ([-6, -9], 137),
        ([-6, -15], 75),
        ([-11, 75, -15], 139),
        ([-15, 143], 143),
    ],
)
def test_the_cause_decides(codes: list[int], code: int) -> None:
    for order in (codes, codes[::-1]):
        done = programs.run(sys.executable, "-c", CODES.format(order)).done()
        assert int(done.stdout) == code


def run(
    *words: str | Path, env: dict[str, str] | None = None, fault: At | None = None
) -> list[str]:
    """Return the exit code and the last line."""
    done = programs.run(sys.executable, SCRIPT, *words, env=env, fault=fault)
    assert "Traceback" not in done.stderr
    return [str(done.code), done.stderr.splitlines()[-1]]


def two_ranks(*words: str | Path) -> list[str | Path]:
    return ["--nproc-per-node", "2", "--master-port", str(free_port()), *words]


@pytest.mark.parametrize(
    ("flags", "fault", "code", "reason"),
    [
        ("--batch-size 7", None, "2", "is not divisible by 2 ranks"),
        ("", At(0, 7, signal.SIGTERM, "launcher"), "143", "stopped by SIGTERM: "),
        ("", At(1, 7, signal.SIGKILL), "137", "a rank was killed by SIGKILL"),
    ],
)
def test_an_example(tmp_path: Path, flags: str, fault: At | None, code: str, reason: str) -> None:
    words = ["-m", "examples.mnist_ddp_spawn", "--device", "cpu", "--out", tmp_path]
    found, last = run(*two_ranks(*words, *flags.split()), fault=fault)
    assert (found, reason in last) == (code, True), last


def test_a_rank_that_never_arrives(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\n"
        "if os.environ['RANK'] == '1': signal.pause()\n"
        "from common.launch import RunArgs\n"
        "from common.rank import init_distributed, record\n"
        "record(lambda rank, args: init_distributed(args, rank))(0, RunArgs(timeout=3))\n"
    )
    assert run(*two_ranks(program)) == ["75", "error: rank 1 of 2 did not join within 3 s"]


def test_a_node_that_never_arrives() -> None:
    words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    code, last = run(*words, *two_ranks("-m", "this"), env={"PET_RDZV_CONF": "timeout=3"})
    assert (code, last.startswith("error: a node did not join: ")) == ("75", True)
