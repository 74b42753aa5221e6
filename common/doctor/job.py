"""What all processes of a job find out together. Every rank calls these: they communicate."""

import secrets
import shutil
import time
from contextlib import suppress

import torch
import torch.distributed as dist

from common.doctor.findings import GIGABYTE, Check, Finding, Findings, Here, judge, packages
from common.launch.collectives import broadcast_object, gather_objects


def same_versions(_: Here) -> Findings:
    """Different versions on different nodes fail late, or train wrongly. Every rank calls this."""
    if len(set(gather_objects(packages()))) > 1:
        remedy = "use one image on all nodes"
        yield Finding("same versions", "error", "the processes differ, see above", remedy)


def round_trip(here: Here) -> Findings:
    """A sum over all processes, small and large, whose result is known. Every rank calls this."""
    failed = trial(here.device)
    everybody = gather_objects(failed)
    if failed:
        found = f"{here.device} does not compute: {failed}"
        yield Finding("round trip", "error", found, "see the findings about devices above")
    if broadcast_object(lambda: any(everybody)):
        return  # the others would wait for that rank until the time limit, and say nothing
    rank, size = dist.get_rank(), dist.get_world_size()
    nccl = "nccl" in here.backend
    carriers = {here.device: "nccl" if nccl else here.backend}
    if nccl:
        carriers[torch.device("cpu")] = "gloo"
    for where, backend in carriers.items():
        milliseconds, wrong = [0.0, 0.0], []
        for which, count in enumerate((1, 1_000_000)):
            for _ in range(3):  # the first ones open connections
                numbers = torch.full((count,), float(rank + 1), device=where)
                started = time.perf_counter()
                dist.all_reduce(numbers)
                right = bool((numbers == size * (size + 1) / 2).all())
                milliseconds[which] = 1000 * (time.perf_counter() - started)
            wrong += [] if right else [count]
        if wrong:
            remedy = "a fault of the network or a device"
            found = f"{backend}: wrong sum of {wrong[0]} numbers"
            yield Finding("round trip", "error", found, remedy)
        elif rank == 0:
            small, large = milliseconds
            found = f"{backend}: all_reduce of {size} process(es) is right, "
            found += f"{small:.2f} ms for 4 bytes, {large:.1f} ms for 4 MB"
            yield Finding("round trip", "ok", found)


def trial(device: torch.device) -> str:
    """What goes wrong when this device computes something; empty if nothing does."""
    try:
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def clocks(_: Here) -> Findings:
    """Clocks that differ make logs and the age of files misleading. Every rank calls this."""
    dist.barrier()
    if everybody := gather_objects(time.time()):
        apart = max(everybody) - min(everybody)
        found = "within 2 s" if apart <= 2 else f"{apart:.0f} s apart"
        remedy = "synchronise them (chrony, NTP): file times and logs are compared between nodes"
        yield judge("clocks", apart > 2, found, remedy)


def output(here: Here) -> Findings:
    """Whether rank 0 can write and all see it, which resuming needs. Every rank calls this."""
    out, probe = here.args.out, here.args.out / ".doctor"
    token = broadcast_object(lambda: secrets.token_hex(8))

    def write() -> str:
        try:
            out.mkdir(parents=True, exist_ok=True)
            probe.write_text(token)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    failed, seen = broadcast_object(write), False
    if failed:
        if dist.get_rank() == 0:
            remedy = "choose another --out, or mount a volume there"
            yield Finding("output", "error", f"{out}: {failed}", remedy)
        return
    with suppress(OSError):
        seen = probe.read_text() == token
    dist.barrier()
    if dist.get_rank() == 0:
        probe.unlink()
        free = shutil.disk_usage(out).free
        found = f"{out} can be written, {free / GIGABYTE:.1f} GB free"
        yield judge("output", free < GIGABYTE, found, "checkpoints may not fit: make room")
    found = f"{out} is another folder than that of the main process"
    if not seen:
        remedy = "mount the same folder on all nodes: without it a job cannot resume"
        yield Finding("output", "error", found, remedy)


TOGETHER: dict[str, Check] = {
    "same versions": same_versions,
    "round trip": round_trip,
    "clocks": clocks,
    "output": output,
}
