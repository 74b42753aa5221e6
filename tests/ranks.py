"""Ranks as forked processes: real gloo, faults at a chosen step, mutated source text.

    killed = ranks.run("mnist_ddp_spawn", 2, flags, out=tmp_path, fault=At(1, 7, SIGKILL))
    assert killed.codes == [75, -9]

A fork server of the standard library imports torch and the other libraries once; a rank is forked
from it in about 0.1 s. It imports no module of this project, so that each rank compiles its own,
possibly mutated, text. The only time limit is `HANG`, after which a rank prints its stacks.
"""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.hooks import At, Hook
from tests.training import Training

HANG = 240.0  # seconds
LIBRARIES = [
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torchvision.transforms.v2",
    "transformers.models.bert.modeling_bert",
    "sklearn.datasets",
    "sklearn.metrics",
    "pandas",
    "matplotlib.pyplot",
    "safetensors.torch",
    "tyro",
    "tqdm",
]


os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

# For tests with many runs: the picture takes half as long as the training.
NO_CURVES = ("common.log", "            draw_curves(", "            0 and draw_curves(")
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(LIBRARIES)
_reserved: list[socket.socket] = []  # names of ports; they are free again when this process exits


def run(
    example: str,
    ranks: int,
    flags: Sequence[str] = (),
    *,
    out: Path,
    device: str = "cpu",
    fault: At | None = None,
    mutate: Sequence[Sequence[str]] = (),
    nodes: int = 1,
    missing: Sequence[int] = (),
    env: Mapping[int, Mapping[str, str]] | None = None,
) -> Training:
    """Run `main_worker` of an example in each rank, as its launcher does, and wait for the end.

    Args:
        example: the folder in `examples`, or a package with dots.
        flags: --nproc, --out, --device and --precision fp32 are added before them.
        nodes: more than one: sessions that meet at a TCP port of this machine, as under torchrun.
        missing: ranks that are never started.
        env: more environment variables, by rank.
    """
    package = example if "." in example else f"examples.{example}"
    log = out.with_name(f"{out.name}.log")
    log.mkdir(parents=True, exist_ok=True)
    (log / "rendezvous").unlink(missing_ok=True)
    common = ["--nproc", str(ranks), "--out", str(out), "--device", device, "--precision", "fp32"]
    port, here = str(free_port()), ranks // nodes
    jobs = list[tuple[Any, ...]]()
    for rank in range(ranks):
        place = {"INIT_METHOD": f"file://{log}/rendezvous"}
        if nodes > 1:
            place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            place |= {"LOCAL_RANK": str(rank % here), "LOCAL_WORLD_SIZE": str(here)}
            place |= {"MASTER_PORT": port}
        place |= (env or {}).get(rank, {})
        words = [package, *(common if nodes == 1 else common[2:]), *flags]
        jobs.append((_main_worker, rank % here, words, place, Hook(mutate, fault)))
    codes, texts = _forked([job for rank, job in enumerate(jobs) if rank not in missing], log)
    return Training(out, codes, texts)


def _main_worker(local_rank: int, words: list[str], place: dict[str, str], hook: Hook) -> None:
    os.environ |= place
    sys.argv = words
    sys.meta_path.insert(0, hook)  # type: ignore[arg-type]
    args_class = importlib.import_module(f"{words[0]}.args").Args
    args = importlib.import_module("common.launch").read_args(args_class, words[0])
    importlib.import_module(f"{words[0]}.train").main_worker(local_rank, args)


def call(function: Callable[..., Any], *args: Any, folder: Path, ranks: int = 0) -> Any:
    """Call a function in a forked process; or in each of `ranks` with a process group of gloo.

    Returns:
        What the function returned; with `ranks`, a list of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(_call, folder, rank, ranks, function, args) for rank in range(max(1, ranks))]
    codes, texts = _forked(jobs, folder)
    assert not any(codes), f"{codes}\n" + "\n".join(texts)
    results = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(len(jobs))]
    return results if ranks else results[0]


def _call(folder: Path, rank: int, ranks: int, function: Callable[..., Any], args: Any) -> None:
    import torch.distributed as dist

    multiprocessing.set_start_method("fork", force=True)  # as in a rank
    if ranks:
        method = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(*args)))
    if ranks:
        dist.barrier()
        dist.destroy_process_group()


def _forked(jobs: list[tuple[Any, ...]], log: Path) -> tuple[list[int], list[str]]:
    """Run each job in a session of its own; no process of a session is left at the end."""
    processes, deadline = [], time.monotonic() + HANG + 10
    try:
        for number, job in enumerate(jobs):
            processes.append(_server.Process(target=_begin, args=(log / f"{number}.txt", *job)))
            processes[-1].start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
    texts = [(log / f"{number}.txt").read_text() for number in range(len(jobs))]
    return [process.exitcode or 0 for process in processes], texts


def _begin(output: Path, target: Callable[..., None], *args: Any) -> None:
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    faulthandler.dump_traceback_later(HANG, exit=True, file=sys.stderr)
    target(*args)


def free_port() -> int:
    """Return a port that no other test takes, outside of the range of outgoing connections."""
    for port in range(20_000, 30_000):
        with suppress(OSError), socket.socket() as probe, socket.socket(socket.AF_UNIX) as name:
            name.bind(f"\0tests-port-{port}")
            probe.bind(("", port))
            _reserved.append(name.dup())
            return port
    raise AssertionError("no free port")
