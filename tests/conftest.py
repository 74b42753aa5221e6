"""Real processes for the tests: started in their own session, watched, and gone when the test ends."""

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import warm
from tests.machine import has_cuda, here, in_turns, large_pages, one_core_each
from tests.warm import MARK, PASSED_ON, name_of

one_core_each()
large_pages()
in_turns()
ROOT = Path(__file__).parent.parent
STARTED = weakref.WeakSet[subprocess.Popen[str]]()  # the programs of all tests


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without files that have no test for `-m timed`: importing them would take each worker 10 to 20 seconds."""
    if config.getoption("markexpr") == "timed" and collection_path.match("test_*.py"):
        return "mark.timed" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark what needs real data, and leave out what needs a GPU where there is none: pytest counts it as deselected.

    With `--dist loadgroup`, tests that look at the same run of a program stay with one worker; all others go to
    whoever has nothing to do, so that no core is idle while the last file's tests are run.
    """
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "real_data" in names:
            item.add_marker("data")
        if "shared_programs" in names and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    yield  # for -m and -k
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not has_cuda():
        items[:] = [item for item in items if item not in gpu]
        config.hook.pytest_deselected(items=gpu)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Path]:
    """For tests with bounds in seconds, a folder in memory: they do not measure the disk, or who else writes to it.

    A process cannot end before the disk has answered its last write, not even when it is killed; until then its
    connections are open, and other ranks wait. The price: nothing is kept after a failure.
    """
    memory = Path("/dev/shm")
    small = not memory.is_dir() or shutil.disk_usage(memory).free < 1 << 30  # 64 MiB, in a container that nobody told
    if small or not request.node.get_closest_marker("timed"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ddp-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give a test the time that the load at its start, not that of the collection, makes it take."""
    limit, marker = item.config.getoption("timeout"), item.get_closest_marker("timeout")
    limit = item.config.getini("timeout") if limit is None else limit
    limit = marker.args[0] if marker else limit
    item.add_marker(pytest.mark.timeout(here(float(limit))), append=False)
    return (yield)


@pytest.fixture(autouse=True)
def _environment_stays() -> Generator[None]:
    """What a test sets ends with it: a DDP_TEST_COLD that was left behind made all later ones take twice as long."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@dataclass
class Programs:
    """Starts programs in the project's folder, and knows what is left of them."""

    cwd: Path = ROOT
    env: dict[str, str] = field(default_factory=dict)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(
        self,
        *words: object,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        cold: bool = False,
        log: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start `python WORDS` in a session of its own, with its output piped, or all of it appended to `log`.

        It is forked from a process that has imported torch (see `tests/warm.py`), unless `cold` or `env` forbid it.
        """
        kept = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "DDP_TEST_DATA", "COVERAGE_PROCESS_START")
        kept = (*kept, "PYTHONPATH", "LD_LIBRARY_PATH", *PASSED_ON)  # a GPU machine's own wheels and driver
        clean = {name: os.environ[name] for name in kept if name in os.environ}
        program = subprocess.Popen
        assert warm.SPACE not in (env or {}) or warm.possible([*map(str, words)], env or {}), "nobody would enter it"
        if not cold and warm.possible([*map(str, words)], self.env | (env or {})):
            warm.start()
            program = warm.Warm
        output = log.open("a") if log else contextlib.nullcontext(subprocess.PIPE)
        with output as pipe:
            started = program(
                [sys.executable, *map(str, words)],
                cwd=cwd or self.cwd,
                env=clean | {MARK: self.token, "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""} | self.env | (env or {}),
                stdout=pipe,
                stderr=subprocess.STDOUT if log else pipe,
                text=True,
                start_new_session=True,
            )
        STARTED.add(started)
        return started

    def run(
        self,
        *words: object,
        code: int = 0,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        limit: float = 120,
        cold: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS` and check its exit code."""
        return self.finish(self.start(*words, env=env, cwd=cwd, cold=cold), code, limit)

    def finish(
        self, process: subprocess.Popen[str], code: int = 0, limit: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Wait for a program and check its exit code."""
        started, bound = time.monotonic(), here(limit)
        while True:
            try:
                out, err = process.communicate(timeout=max(0.0, min(1.0, started + bound - time.monotonic())))
                break
            except subprocess.TimeoutExpired:
                bound = max(bound, here(limit))  # the load may have risen
                if time.monotonic() - started >= bound:
                    self.kill()
                    out, err = process.communicate()
                    pytest.fail(f"{process.args} did not end within {bound:.0f} s\n{out}\n{err}")
        assert process.returncode == code, f"{process.args}\nended with {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def left(self) -> dict[int, str]:
        """Processes started by this test, directly or not, that are still there."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.token}".encode() in (folder / "environ").read_bytes().split(b"\0")
                forked = (folder / "comm").read_text().startswith(name_of(self.token))
                if marked or (forked and "State:\tZ" not in (folder / "status").read_text()):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found

    def ports(self) -> set[tuple[str, int]]:
        """Addresses (as the kernel writes them) and ports at which the test's processes listen, over TCP."""
        inodes = set()
        for pid in self.left():
            with contextlib.suppress(OSError):  # it may have gone
                descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
                for descriptor in descriptors:
                    with contextlib.suppress(OSError):
                        target = str(descriptor.readlink())
                        if target.startswith("socket:["):
                            inodes.add(target[8:-1])
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:  # 0A: LISTEN
                    address, port = fields[1].split(":")
                    found.add((address, int(port, 16)))
        return found

    def worker(self, rank: int) -> int:
        """The process of a rank, whether torchrun or the program itself has started it."""
        parents, began, servers = {}, {}, set()
        for pid, command in self.left().items():
            folder = Path(f"/proc/{pid}")
            try:
                name = (folder / "comm").read_text().strip().partition(":")[2]
                ranked = f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0")
                status = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has gone
                continue
            if ranked or name == str(rank):
                return pid
            parents[pid], began[pid] = int(status[1]), int(status[19])  # in ticks of the clock: numbers begin again
            if name == "srv" or "forkserver" in command:
                servers.add(pid)  # the server and all that is forked by it
        first = {pid for pid in servers if parents[pid] not in servers}
        ranks = sorted((began[pid], pid) for pid in servers if parents[pid] in first)
        return ranks[rank][1]  # they start in the order of ranks

    def gone(self, within: float = 5) -> bool:
        """Whether nothing is left, after waiting a moment for it."""
        deadline = time.monotonic() + here(within)
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.left()

    def kill(self) -> None:
        """End all that is left."""
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def reap() -> None:
    """Forget the ended processes that nobody waits for: what ended programs have left becomes this process's (warm.py).

    There would be thousands, and every later `left` would look at them.
    """
    waited_for = {program.pid for program in STARTED}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have gone
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            if (state, int(parent)) == ("Z", os.getpid()) and pid not in waited_for:
                os.waitpid(pid, os.WNOHANG)


def started_programs() -> Generator[Programs]:
    """Starts programs; fails the test if a process is left over."""
    started = Programs()
    yield started
    leftover = {} if started.gone() else started.left()
    started.kill()
    reap()
    assert not leftover


@pytest.fixture
def programs(tmp_path: Path) -> Generator[Programs]:
    """Starts programs, which end before the test's folder is removed."""
    yield from started_programs()


# The same for fixtures that several tests share.
shared_programs = pytest.fixture(scope="module", name="shared_programs")(started_programs)
session_programs = pytest.fixture(scope="session", name="session_programs")(started_programs)


@dataclass(frozen=True)
class Once:
    """What all workers of pytest-xdist share: whoever needs it first makes it, and others wait for that."""

    folder: Path

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder of this name, after `make(folder)` if nobody has made it yet."""
        out, done = self.folder / name, self.folder / f"{name}.done"
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(out, ignore_errors=True)  # whoever began has failed
                out.mkdir()
                make(out)
                done.touch()
        return out


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes what several workers need."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "once"
    folder.mkdir(exist_ok=True)
    return Once(folder)


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to connections and to whoever asks for any.

    Workers of pytest-xdist try different ones.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", random.choice(range(10_000 + worker, 30_000, 16))))
            return int(probe.getsockname()[1])


@pytest.fixture
def eventually() -> Callable[[Callable[[], object], float, str], None]:
    """Wait for a condition."""

    def wait(condition: Callable[[], object], limit: float, what: str) -> None:
        started, bound, asked = time.monotonic(), 0.0, 0.0
        while not condition():
            now = time.monotonic()
            if now - asked >= 1.0:  # the load may have risen; to ask each time costs more than most conditions
                bound, asked = max(bound, here(limit)), now
            assert now - started < bound, f"{what}: not within {bound:.0f} s"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real datasets; where there is none, MNIST is downloaded, once."""
    folder = Path(os.environ.get("DDP_TEST_DATA", ROOT.parent / "shared" / "data"))
    if folder.is_dir():
        return folder
    from torchvision.datasets import MNIST

    MNIST(str(ROOT / "data" / "mnist"), download=True)
    return ROOT / "data"
