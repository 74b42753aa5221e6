"""Check this machine, or all nodes of a job, for problems that would make a run fail.

    python -m tools.doctor                             # this machine
    python -m tools.doctor --master-addr HOST0         # also the connection to node 0
    torchrun --nnodes 2 --nproc-per-node 8 --node-rank R --master-addr HOST0 -m tools.doctor

Each finding is one line; problems include a remedy. Rank 0 prints all ranks' findings. The exit
code is 2 if there is an error, and 0 otherwise.
"""

import os
import platform
import re
import resource
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import tyro
from torch.cuda import nccl

from common.launch import RunArgs, UserError
from common.rank import init_distributed, record

GB = 1e9
SHM = Path("/dev/shm")  # noqa: S108 - not a temporary file: its size is checked
TMPDIR_LIMIT = 75  # bytes: a socket path has at most 107, and multiprocessing appends 32


@dataclass(frozen=True)
class Args:
    """Check this machine, or all nodes of a job, for problems that would make a run fail."""

    out: Path = Path("runs")
    """Output folder of the runs."""
    master_addr: str = os.environ.get("MASTER_ADDR", "")
    """Address of node 0, which this machine connects to; torchrun sets it."""
    master_port: int = int(os.environ.get("MASTER_PORT", "29500"))
    """Port of node 0."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device that the runs will use."""
    timeout: float = 60.0
    """Time to wait for the other ranks, in seconds."""


class Finding(NamedTuple):
    """The result of one check."""

    level: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""


def judge(fine: bool, text: str, remedy: str, level: Any = "warning") -> Finding:
    """Return a finding; `level` and `remedy` apply only if `fine` is False."""
    return Finding("ok", text) if fine else Finding(level, text, remedy)


def check_machine(ranks: int) -> Iterator[Finding]:
    """Check that this machine or container has enough resources for its ranks."""
    memory, remedy = free_memory() / GB, "give the container more memory, or start fewer ranks"
    yield judge(memory >= ranks, f"memory: {memory:.1f} GB free", remedy)
    shm = shutil.disk_usage(SHM).free / GB if SHM.is_dir() else 0
    remedy = "loader workers and NCCL need 1 GB; use docker run --shm-size 1g"
    yield judge(shm >= 1, f"{SHM}: {shm:.2f} GB free", remedy)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: unlimited
    yield judge(not 0 <= files < 1024, f"open files: {files}", "run ulimit -n 65536")
    if Path("/dev/infiniband").is_dir():
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        yield judge(locked < 0, f"locked memory: {locked} bytes", "RDMA needs ulimit -l unlimited")
    folder, remedy = tempfile.gettempdir(), "the path is too long for sockets; set TMPDIR=/tmp"
    fine = len(os.fsencode(folder)) <= TMPDIR_LIMIT
    yield judge(fine, f"temporary files: {folder}", remedy, "error")


def free_memory() -> int:
    """Return the free memory of the machine or the container, whichever is less, in bytes."""
    (available,) = re.findall(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    cgroup, free = Path("/sys/fs/cgroup"), int(available) * 1024
    with suppress(OSError, ValueError):  # "max" means no limit
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def check_master(host: str, port: int) -> Finding:
    """Check that node 0 is reachable, or that this machine is node 0 and the port is free."""
    at, remedy = f"node 0 at {host}:{port}", "check the address, and open the port in the firewall"
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        with suppress(OSError):  # only node 0 itself can listen at its address
            socket.create_server((host, port)).close()
            return Finding("ok", f"{at}: this machine; the port is free")
        return Finding("error", f"{at}: refused", f"start node 0 first, {remedy}")
    except OSError as error:
        return Finding("error", f"{at}: no connection ({error})", remedy)
    return Finding("ok", f"{at}: accepts connections")


def check_devices(wanted: str, local_rank: int, ranks: int) -> Iterator[Finding]:
    """Check CUDA devices local_rank, local_rank + ranks, ...; a single rank checks all devices."""
    count = torch.cuda.device_count()
    if not count and (wanted == "cuda" or any(Path("/dev").glob("nvidia[0-9]*"))):
        remedy = f"check with nvidia-smi that the driver supports CUDA {torch.version.cuda}"
        yield Finding("error", "torch found no CUDA device", remedy)
    for number in range(count)[local_rank::ranks]:
        name = f"cuda:{number} {torch.cuda.get_device_name(number)}"
        try:  # fails if this torch build has no kernels for the device, for example
            torch.ones(1, device=f"cuda:{number}").item()
        except RuntimeError as error:
            text = f"{name}: {str(error).splitlines()[0]}"
            yield Finding("error", text, "install another torch build, or set CUDA_VISIBLE_DEVICES")
            continue
        free, total = (value / GB for value in torch.cuda.mem_get_info(number))
        text, remedy = f"{name}: {free:.0f} of {total:.0f} GB free", "stop other processes"
        yield judge(free > 0.8 * total, text, remedy)


def gather(value: Any) -> list[Any]:
    """Return the values from all ranks. Every rank calls this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks."""
    found = {"Python": platform.python_version(), "torch": torch.__version__}
    found["CUDA"], driver = str(torch.version.cuda), Path("/sys/module/nvidia/version")
    found["NCCL"] = ".".join(map(str, nccl.version())) if dist.is_nccl_available() else "None"
    return found | {"driver": driver.read_text().strip() if driver.exists() else "None"}


def check_job(device: torch.device, out: Path) -> Iterator[Finding]:
    """Check a job's versions, clocks, output folder and all_reduce. Every rank calls this."""
    own, first = versions(), gather(versions())[0]
    yield Finding("ok", ", ".join(f"{name} {value}" for name, value in first.items()))
    if different := [f"{name} {value}" for name, value in own.items() if value != first[name]]:
        yield Finding("error", f"differs from rank 0: {', '.join(different)}", "use the same image")
    dist.barrier()
    times = gather(time.time())
    apart = max(times) - min(times)
    yield judge(apart < 2, f"clocks: {apart:.1f} s apart", "synchronize them with NTP")
    yield from check_output(out)
    yield from check_all_reduce(device)
    if "nccl" in dist.get_backend():
        yield from check_all_reduce(torch.device("cpu"))


def check_output(out: Path) -> Iterator[Finding]:
    """Check that all ranks share a folder that rank 0 can write to. Every rank calls this."""
    rank, failure, probe = dist.get_rank(), "", out / f".doctor-{gather(secrets.token_hex(8))[0]}"
    if rank == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            failure = str(error.strerror)
    if failure := gather(failure)[0]:
        yield Finding("error", f"--out {out}: {failure}", "use another folder, or mount a volume")
    elif not probe.exists():
        remedy = "mount the same folder on all nodes; otherwise a job cannot resume"
        yield Finding("error", f"--out {out} is not shared with rank 0", remedy)
    dist.barrier()
    if rank == 0 and not failure:
        probe.unlink()
        free = shutil.disk_usage(out).free / GB
        yield judge(free >= 1, f"--out {out}: {free:.1f} GB free", "checkpoints need more space")


def check_all_reduce(device: torch.device) -> Iterator[Finding]:
    """Check the result of all_reduce, and time it. Every rank calls this."""
    rank, ranks, correct, seconds = dist.get_rank(), dist.get_world_size(), True, {}
    for count in (1, 4_000_000):
        for _ in range(3):  # the first call opens connections
            values = torch.full((count,), rank + 1.0, device=device)
            began = time.perf_counter()
            dist.all_reduce(values)
            correct &= bool((values == ranks * (ranks + 1) / 2).all())  # waits for the device
            seconds[count] = time.perf_counter() - began
    text = f"all_reduce of {ranks} rank(s) on {device.type}"
    if not correct:
        yield Finding("error", f"{text}: wrong sum", "replace the device or the network card")
    elif rank == 0:
        latency, speed = seconds[1] * 1e3, 16e6 / GB / seconds[4_000_000]
        yield Finding("ok", f"{text}: {latency:.2f} ms for 4 bytes, {speed:.2f} GB/s for 16 MB")


def report(everywhere: list[list[Finding]], ranks_per_node: int) -> None:
    """Print the findings from all ranks; equal findings are printed once, with their ranks."""
    merged = dict[Finding, list[int]]()
    for rank, findings in enumerate(everywhere):
        for finding in findings:
            merged.setdefault(finding, []).append(rank)
    world = range(len(everywhere))
    for (level, text, remedy), ranks in merged.items():
        everyone = ranks in (list(world), list(world[::ranks_per_node]))
        where = "" if everyone else f" (rank {', '.join(map(str, ranks))})"
        print(f"{level:8}{text}{where}{'; ' * bool(remedy)}{remedy}", flush=True)


@record
def main_worker(local_rank: int, args: Args) -> None:
    """Check one rank, then all ranks together."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    findings = list(check_machine(ranks)) if local_rank == 0 else []
    findings += [check_master(args.master_addr, args.master_port)] if args.master_addr else []
    devices = list(check_devices(args.device, local_rank, ranks)) if args.device != "cpu" else []
    try:
        device = init_distributed(RunArgs(device=args.device, timeout=args.timeout), local_rank)
    except (UserError, OSError, RuntimeError, ValueError) as error:
        if local_rank == 0:
            report([findings + devices], 1)
        raise UserError(f"the ranks cannot connect: {str(error).splitlines()[0]}") from None
    findings += devices
    if not any(finding.level == "error" for found in gather(devices) for finding in found):
        findings += check_job(device, args.out)  # a broken device would make this check hang
    everywhere = gather(findings)
    if dist.get_rank() == 0:
        report(everywhere, ranks)
    if any(finding.level == "error" for found in everywhere for finding in found):
        raise UserError("a run would fail; fix the errors above")
    dist.destroy_process_group()


if __name__ == "__main__":
    args = tyro.cli(Args, prog="python -m tools.doctor")
    main_worker(int(os.environ.get("LOCAL_RANK", "0")), args)
