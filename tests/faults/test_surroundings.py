"""What surrounds a job fails: a download that ends half-way or is another file, and too little shared memory."""

import functools
import gzip
import http.server
import re
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT, Programs
from tests.examples.test_mnist_ddp_spawn import TRAIN_FROM_MIRROR
from tests.make_data import draw_folder, write_idx

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3)
IMAGENET = ("-m", "examples.imagenet_ddp")


@contextmanager
def mirror(answer: bytes, promised: int) -> Generator[tuple[str, list[str]]]:
    """A server on loopback with one answer to everything; it promises so many bytes, and closes after the answer."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(promised))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("closed half-way", "mnist_ddp_spawn"),
        ("another file", "mnist_ddp_spawn"),
        ("another file", "manual_allreduce_sgd"),
    ],
)
def test_a_download_that_fails_ends_all_ranks(programs: Programs, tmp_path: Path, kind: str, program: str) -> None:
    """One process downloads; all end with its one line."""
    content = gzip.compress(bytes(100_000))
    (tmp_path / "from_mirror.py").write_text(TRAIN_FROM_MIRROR.replace("mnist_ddp_spawn", program))
    with mirror(content, 2 * len(content) if kind == "closed half-way" else len(content)) as (url, asked):
        done = programs.run(
            *TORCHRUN, "-m", "from_mirror", url, "--dataset", "mnist", "--data-dir", tmp_path / "data",
            "--out", tmp_path / "out", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, code=1,
        )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert "mnist" in errors[0]
    assert "exitcode  : 2" in done.stderr
    assert len(set(asked)) == 1, "the first file was asked for by one process, and no other file"
    assert not (tmp_path / "out" / "result.json").exists()


LAST_IS_ANOTHER = """
import hashlib, pathlib, runpy, sys, torchvision
url, folder = sys.argv[1], pathlib.Path(sys.argv[2])
kind = torchvision.datasets.MNIST
kind.mirrors = [url]
sums = [hashlib.md5((folder / name).read_bytes()).hexdigest() for name, _ in kind.resources]
kind.resources = [(name, known) for (name, _), known in zip(kind.resources, [*sums[:3], "0" * 32], strict=True)]
sys.argv = ["train", *sys.argv[3:]]
runpy.run_module("examples.mnist_ddp_spawn", run_name="__main__", alter_sys=True)
"""


def test_a_file_with_another_checksum_is_not_believed_later(programs: Programs, tmp_path: Path) -> None:
    """The last of four files is another one; the second run must not find all four and train on them."""
    write_idx(tmp_path / "files", train=203, test=101, size=12, classes=10)
    (tmp_path / "from_mirror.py").write_text(LAST_IS_ANOTHER)
    handler = functools.partial(Quiet, directory=str(tmp_path / "files"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for _ in range(2):
                done = programs.run(
                    *TORCHRUN, "-m", "from_mirror", f"http://127.0.0.1:{server.server_port}/", tmp_path / "files",
                    "--dataset", "mnist", "--data-dir", tmp_path / "data", "-b", 24, "--epochs", 1,
                    "--out", tmp_path / "out", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, code=1,
                )  # fmt: skip
                (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
                assert line.startswith(f"error: mnist is not in {tmp_path / 'data'} and cannot be downloaded")
        finally:
            server.shutdown()
            thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base
        pass


SMALL_SHM = """
import ctypes, runpy, subprocess, sys
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS: mounts of its own
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", "/dev/shm"], check=True)
_, _, module, *sys.argv[1:] = sys.argv
runpy._run_module_as_main(module)
"""
NO_SHM = SMALL_SHM.replace("160k", "32k")  # eight pages: not even a page for each semaphore of the loaders


def test_too_little_shared_memory_is_named(programs: Programs, tmp_path: Path) -> None:
    """Loader workers hand batches over in /dev/shm, which is small in containers. Needs root, for a small one."""
    draw_folder(tmp_path / "images", train=60, val=12, size=80)
    done = programs.run(
        "-c", SMALL_SHM, *IMAGENET, "-a", "resnet18", "--image-size", 64, "-b", 30, "-j", 2,
        "--epochs", 1, "--timeout", 8, "--out", tmp_path / "out", tmp_path / "images", code=2, limit=100,
    )  # fmt: skip
    assert "unable to allocate shared memory" in done.stderr
    assert "error: no batch came from the loader's workers within 8 s: see what they printed above" in done.stderr
    assert programs.gone(within=2)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_what_ended_a_loader_worker_is_said(programs: Programs, tmp_path: Path, signum: signal.Signals) -> None:
    """As by the kernel when memory is short, or by a mistake in a library that decodes images."""
    draw_folder(tmp_path / "images", train=60, val=12, size=40)
    dies = (
        "import os, runpy, sys\nfrom common.images import folder\n"
        f"folder.ImageFolder.__getitems__ = lambda *_: os.kill(os.getpid(), {signum})\n"
        "_, _, module, *sys.argv[1:] = sys.argv\nrunpy._run_module_as_main(module)\n"
    )
    flags = ("-a", "resnet18", "--image-size", 32, "-b", 30, "-j", 1, "--epochs", 1, "--out", tmp_path / "out")
    done = programs.run("-c", dies, *IMAGENET, *flags, tmp_path / "images", code=1)
    how = {signal.SIGKILL: "Killed", signal.SIGSEGV: "Segmentation fault"}[signum]
    said = rf"DataLoader worker \(pid \d+\) is killed by signal: {how}\."
    # torch's own words about a segmentation fault end with a byte 0, not with a line
    line = rf"\berror: rank 0: {said} \(what may help: more memory, or --workers 0\)$"
    assert len(re.findall(line, done.stderr, re.MULTILINE)) == 1, done.stderr


@pytest.mark.parametrize(
    ("program", "shm"), [("mnist_ddp_spawn", SMALL_SHM), ("mnist_ddp_spawn", NO_SHM), ("resnet_pipeline", SMALL_SHM)]
)
def test_too_little_shared_memory_for_the_workers_of_torchs_loader_is_named(
    programs: Programs, tmp_path: Path, program: str, shm: str
) -> None:
    """mnist_ddp_spawn hands its images to its workers; of those of resnet_pipeline nobody tells the rank."""
    if program == "mnist_ddp_spawn":
        write_idx(tmp_path / "data", train=203, test=101, size=64, classes=4)
        flags, code = ("-b", 100, "--timeout", 8), 1
        cause = r"unable to allocate shared memory\(shm\)" if shm == SMALL_SHM else "no shared memory for a semaphore:"
        said = rf"error: rank [01]: {cause} .* \(what may help: more shared memory \(.*"
    else:
        draw_folder(tmp_path / "data", train=60, val=12, size=80)
        # Half of the timeout must be longer than starting the workers takes: meanwhile the other stage waits, too.
        flags, code = ("-a", "resnet18", "--image-size", 64, "-b", 30, "-m", 2, "--norm", "group", "--timeout", 24), 2
        said = "error: no batch came from the loader's workers within 12 s: see what they printed above.*"
    done = programs.run(
        "-c", shm, "-m", f"examples.{program}", "--dataset", tmp_path / "data", *flags,
        "--nproc", 2, "--workers", 1, "--epochs", 1, "--out", tmp_path / "out", code=code, limit=100,
    )  # fmt: skip
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert re.fullmatch(said, line), line
    assert programs.gone(within=2)


def test_idx_files_need_no_shared_memory(programs: Programs, tmp_path: Path) -> None:
    write_idx(tmp_path / "small", train=203, test=101, size=12, classes=4)
    programs.run(
        "-c", NO_SHM, "-m", "examples.mnist_ddp_spawn", "--nproc", 2, "--epochs", 1,
        "--dataset", tmp_path / "small", "--out", tmp_path / "out", limit=100,
    )  # fmt: skip
