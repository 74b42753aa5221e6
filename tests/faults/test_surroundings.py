"""What surrounds a job fails: a download that ends half-way or is another file, and too little shared memory."""

import gzip
import http.server
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT, Programs
from tests.examples.test_mnist_ddp_spawn import TRAIN_FROM_MIRROR
from tests.make_data import draw_folder, write_idx

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3)
IMAGENET = ("-m", "examples.imagenet_ddp.train")


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
    """One process downloads; all end with its one line, and no file is left that a later run would believe."""
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


SMALL_SHM = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
WITHOUT = 'import os, sys; os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv[1:]])'


def test_too_little_shared_memory_is_named(programs: Programs, tmp_path: Path) -> None:
    """Loader workers hand batches over in /dev/shm, which is small in containers. Needs root, for a small one."""
    draw_folder(tmp_path / "images", train=60, val=12, size=80)
    done = programs.run(
        "-c", WITHOUT, "-c", SMALL_SHM, *IMAGENET, "-a", "resnet18", "--image-size", 64, "-b", 30, "-j", 2,
        "--epochs", 1, "--timeout", 8, "--out", tmp_path / "out", tmp_path / "images", code=2, limit=100,
    )  # fmt: skip
    assert "unable to allocate shared memory" in done.stderr
    assert "error: no batch came from the loader's workers within 8 s: see what they printed above" in done.stderr
    assert programs.gone(within=2)


@pytest.mark.parametrize("program", ["mnist_ddp_spawn", "resnet_pipeline"])
def test_too_little_shared_memory_for_the_workers_of_torchs_loader_is_named(
    programs: Programs, tmp_path: Path, program: str
) -> None:
    """mnist_ddp_spawn hands its images to its workers; of those of resnet_pipeline nobody tells the rank."""
    if program == "mnist_ddp_spawn":
        write_idx(tmp_path / "data", train=203, test=101, size=64, classes=4)
        flags, code = ("-b", 100), 1
        said = r"error: rank [01]: unable to allocate shared memory\(shm\) .* \(what may help: more shared memory \(.*"
    else:
        draw_folder(tmp_path / "data", train=60, val=12, size=80)
        flags, code = ("-a", "resnet18", "--image-size", 64, "-b", 30, "-m", 2, "--norm", "group"), 2
        said = "error: no batch came from the loader's workers within 4 s: see what they printed above.*"
    done = programs.run(
        "-c", WITHOUT, "-c", SMALL_SHM, "-m", f"examples.{program}.train", "--dataset", tmp_path / "data", *flags,
        "--nproc", 2, "--workers", 1, "--epochs", 1, "--timeout", 8, "--out", tmp_path / "out", code=code, limit=100,
    )  # fmt: skip
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert re.fullmatch(said, line), line
    assert programs.gone(within=2)


def test_idx_files_need_no_shared_memory(programs: Programs, tmp_path: Path) -> None:
    write_idx(tmp_path / "small", train=203, test=101, size=12, classes=4)
    programs.run(
        "-c", WITHOUT, "-c", SMALL_SHM, "-m", "examples.mnist_ddp_spawn.train", "--nproc", 2, "--epochs", 1,
        "--dataset", tmp_path / "small", "--out", tmp_path / "out", limit=100,
    )  # fmt: skip
