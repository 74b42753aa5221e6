"""Programs from nothing: `python -m examples.NAME`, torchrun; nothing is preloaded."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.hooks import At
from tests.ranks import HANG

ROOT = Path(__file__).parents[1]
SITE = f"{ROOT / 'tests' / 'site'}{os.pathsep}{ROOT}"
PYTHON = (sys.executable, "-m")
TORCHRUN = (*PYTHON, "torch.distributed.run", "--nproc-per-node")
IGNORED = (
    "PYTHONUNBUFFERED",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "SLURM_",
    "TORCHELASTIC_",
    "PET_",
)


@dataclass(frozen=True)
class Program:
    """The end of a program. All its pipes were closed, so none of its processes is left."""

    code: int
    stdout: str
    stderr: str

    def done(self) -> "Program":
        """Return this program if it exited with 0."""
        assert self.code == 0, f"{self.code}\n{self.stdout}\n{self.stderr}"
        return self


def run(
    *words: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    fault: At | None = None,
    mutate: Sequence[Sequence[str]] = (),
) -> Program:
    """Run a program until it and all processes that it started have closed their output.

    Args:
        env: more environment variables.
        fault: see hooks.py.
        mutate: see hooks.py.

    Raises:
        subprocess.TimeoutExpired: a process hangs, or was left behind.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(IGNORED)}
    own["PYTHONPATH"] = SITE
    own["TESTS_HOOK"] = json.dumps([list(mutate), fault and astuple(fault)])
    own["TESTS_PROGRAM"] = mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [str(word) for word in words],
        cwd=cwd,
        env=own | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=HANG)
    finally:
        _kill(f"TESTS_PROGRAM={mark}".encode())
        process.wait()
    return Program(process.returncode, stdout, stderr)


def run_all(*commands: Sequence[str | Path], env: Sequence[Mapping[str, str]]) -> list[Program]:
    """Run programs side by side, such as the nodes of a job."""
    with ThreadPoolExecutor(len(commands)) as pool:
        futures = [pool.submit(run, *words, env=more) for words, more in zip(commands, env)]
        return [future.result() for future in futures]


def _kill(mark: bytes) -> None:
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
