"""What is judged and said before torch, which takes seconds, is imported."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.launch.cgroup import cores
from common.launch.console import say, warn
from common.launch.errors import UserError
from common.launch.flags import SPLIT, MustExist, equal_parts
from common.launch.place import Place
from common.launch.usage import flags_of

WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}  # of OpenMP: how threads wait


def judge(args: Any, place: Place) -> None:
    """Look at what the flags name: data, checkpoints, folders, packages, cores, parts of a batch.

    What differs from node to node is left to the ranks, which agree on who says so.

    Raises:
        UserError: something is missing, or cannot be used.
    """
    check_processes(place)
    for flag in flags_of(type(args), args):
        if SPLIT in flag.marks:
            equal_parts(flag.default, place.world_size)
    if hasattr(args, "check_world_size"):  # what divides the batch follows from other flags, too
        args.check_world_size(place.world_size)
    if place.num_nodes == 1:
        _check_paths(args)
        if hasattr(args, "out") and hasattr(args, "epochs") and place.rank == 0:
            check_out(args.out)
    track = getattr(getattr(args, "watch", None), "track", "no")
    if track != "no" and importlib.util.find_spec(track) is None:
        raise UserError(f"--track {track}: this package is not installed: pip install {track}")


def _check_paths(args: Any) -> None:
    for flag in flags_of(type(args), args):
        for mark in flag.marks:
            value = str(flag.default)
            here = flag.default is None or not isinstance(mark, MustExist) or value in mark.names
            if not here and not Path(value).exists():
                name = flag.names[-1] if flag.names[-1].startswith("--") else flag.names[0]
                there = "" if mark.names else "there is no such file or folder; "
                raise UserError(f"{name} {value}: {there}{mark.remedy}")
    resume = getattr(args, "resume", "no")
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # it may be gone by now
    if resume not in ("auto", "no") and not restarted and not Path(resume).exists():
        raise UserError(f"checkpoint {resume} does not exist: --resume takes auto, a path, or no")


def check_out(out: Path) -> None:
    """See that a folder is there or can be made, and that files can be written in it.

    Raises:
        UserError: they cannot.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file: choose a folder")
    folder = next(each for each in (out, *out.absolute().parents) if each.exists())
    try:
        if not folder.is_dir():
            raise UserError(f"--out {out}: {folder} is a file: choose another folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written ({error.strerror}): choose another folder"
        ) from None


def source(module: str) -> Path:
    """The file of a module that is not imported yet."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)


def check_copy(module: str) -> None:
    """Refuse a copy that still names what it was copied from: it would train the original.

    Raises:
        UserError: the file that was started and the one that it runs lie in different folders.
    """
    main = getattr(sys.modules["__main__"], "__file__", None)
    if not main:  # an interpreter's prompt
        return
    started, runs = Path(main).resolve(), source(module).resolve()
    if started.parent != runs.parent and (started.parent / runs.name).exists():
        package = module.rpartition(".")[0]
        raise UserError(
            f"{started} is a copy that would run {runs}: replace {package} by the copy's own name "
            f"in all its files"
        )


def check_processes(place: Place) -> None:
    """Refuse many more processes than cores; `announce` warns of a few more.

    Raises:
        UserError: there are far too many.
    """
    if place.launched:  # the launcher's business
        return
    wanted, here = place.local_world_size, cores()
    if wanted > (most := max(16, 8 * here)):
        raise UserError(
            f"--nproc {wanted}: this machine has {here} core(s) for them: give at most {most}; "
            f"as many as there are devices, or cores, is fastest"
        )


def sleep_while_waiting(place: Place) -> None:
    """On a machine with more work than cores, have threads that wait for each other sleep.

    OpenMP's threads spin while they wait. Where others use the cores, a thread that spins keeps its
    core from the one that it waits for, and a step can take ten times as long. How they wait does
    not change the result; fewer threads would change its last bits. The variable is read when torch
    is imported.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if place.launcher == "torchrun" and chosen == "1":  # set by torchrun, which nobody chose
        chosen = ""
    threads = place.flags.threads or int(chosen if chosen.isdigit() else 0)
    threads = threads or cores() // place.local_world_size
    load, machine = os.getloadavg()[0], os.cpu_count() or 1
    decided = WAITING & os.environ.keys()
    if threads < 2 or load <= machine or decided:
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if place.local_rank == 0:
        warn(
            f"this machine has {machine} cores and a load of {load:.0f}: threads sleep while they "
            f"wait (OMP_WAIT_POLICY=passive); --threads 1 may be faster"
        )


def _has_cuda(place: Place) -> bool:
    """Whether a CUDA device may be used, as far as one knows without torch."""
    refused = place.flags.device == "cpu" or place.flags.no_accel
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    nodes = any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg"))
    return nodes and not (refused or hidden)


def announce(place: Place) -> None:
    """Say that a run starts: importing torch takes seconds, in which nothing else is shown."""
    if place.launched and place.rank > 0:
        return
    backend = place.flags.dist_backend
    if backend == "auto" and not _has_cuda(place):
        backend = "gloo"
    where = [place.host if place.host and not place.loopback else "127.0.0.1"]
    count = place.world_size if place.launched else place.local_world_size
    several = f"{count} processes" if count > 1 else "1 process"
    if place.num_nodes > 1:
        several += f", node {place.node_rank} of {place.num_nodes}"
    if place.launcher in ("torchrun", "slurm"):
        several += f", by {place.launcher}"
    how = ", ".join([backend] * (backend != "auto") + where)
    say(f"starting {several} ({how}) ...")
    if not place.launched and place.local_world_size > cores() and not _has_cuda(place):
        wanted = place.local_world_size
        warn(f"{wanted} processes share {cores()} core(s): that is slower, not faster")
