"""Preflight of a machine, of a container, or, under a launcher, of a whole job: what would go wrong, and what to do.

    python -m common.doctor                                      # this machine, one process
    python -m common.doctor --nproc 2 --out runs --data DIR      # two processes; may they write, may they read?
    torchrun --nnodes 2 --nproc-per-node 1 --node-rank R --master-addr HOST0 -m common.doctor
    python -m common.doctor --json                               # for programs

Exit code 0 where nothing would fail (there may be warnings), 1 where something would, 2 after a mistake in the flags.
"""

import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import pwd
import resource
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from common.flags import begin
from common.launcher import DEFAULT_PORT, Launch, Place


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    out: Path = Path("runs")
    """Folder that runs would write to."""
    data: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder with data that all processes must be able to read."""
    json: bool = False
    """Print one JSON document."""
    launch: OmitArgPrefixes[Launch] = Launch()


if __name__ == "__main__":
    args, place = begin(Args, __doc__)

import torch
import torch.distributed as dist

from common.distributed import World, cores, from_main, gather, launch, taking_part

State = Literal["ok", "warning", "error"]
PACKAGES = ("torch", "torchvision", "transformers", "numpy", "scikit-learn")
SHARED = Path("/dev/shm")  # noqa: S108 - not a temporary file: its size is asked for
MEGABYTE, GIGABYTE = 1_000_000, 1_000_000_000


@dataclass(frozen=True)
class Finding:
    """What one process found out about one thing."""

    check: str
    state: State
    found: str
    remedy: str = ""


Findings = Iterator[Finding]


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    with taking_part(place, local_rank) as world:
        mine = [finding for name, check in LOCAL.items() for finding in guarded(name, check, args, world)]
        try:
            dist.init_process_group(
                world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
            )
        except (RuntimeError, ValueError) as error:  # what this process knows is all that can be said
            remedy = "see the findings above, the host name and the interfaces first"
            show([[*mine, Finding("process group", "error", str(error).splitlines()[0], remedy)]], args, world)
            sys.exit(1)
        for name, check in TOGETHER.items():  # these communicate: every rank must get to each of them
            mine += guarded(name, check, args, world)
        everybody = gather(world, mine)
        healthy = from_main(world, lambda: show(everybody, args, world))
    if not healthy:
        sys.exit(1)


def guarded(name: str, check: Callable[[Args, World], Findings], args: Args, world: World) -> list[Finding]:
    """The findings of a check; one that cannot be made is an error too, and does not end the others."""
    try:
        return list(check(args, world))
    except (OSError, RuntimeError, ValueError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [Finding(name, "error", line, "this check failed: see the message")]


def show(everybody: list[list[Finding]], args: Args, world: World) -> bool:
    """Print the findings, equal ones of several ranks once; false if one of them is an error."""
    merged: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everybody):
        for finding in findings:
            merged.setdefault(finding, []).append(rank)
    count = {state: sum(finding.state == state for finding in merged) for state in ("error", "warning")}
    if args.json:
        findings = [asdict(finding) | {"ranks": ranks} for finding, ranks in merged.items()]
        head = {"world_size": world.size, "nodes": world.nodes, "launcher": world.place.launcher}
        print(json.dumps(head | {f"{state}s": n for state, n in count.items()} | {"findings": findings}, indent=2))
    else:
        for finding, ranks in merged.items():
            who = "" if len(ranks) == world.size else f" (rank {', '.join(map(str, ranks))})"
            print(f"{finding.state:8}{finding.check}{who}: {finding.found}")
            if finding.remedy:
                print(f"{'':8}-> {finding.remedy}")
        print(f"{count['error']} error(s), {count['warning']} warning(s), world size {world.size}")
    sys.stdout.flush()
    return not count["error"]


# ------------------------------------------------------------------------------------------- each process alone


def versions(_: Args, world: World) -> Findings:
    """Versions, which all processes must share."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    line = f"Python {platform.python_version()}, {', '.join(found)}, built with {cuda}"
    yield Finding("versions", "ok", line)


def device(_: Args, world: World) -> Findings:
    """The device of this process, and its memory."""
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        name = f"{world.device} {torch.cuda.get_device_name(world.device)}"
        found = (
            f"{name}, {free / GIGABYTE:.1f} of {total / GIGABYTE:.1f} GB free, {torch.cuda.device_count()} device(s)"
        )
        busy = free < 0.8 * total
        remedy = "another process holds its memory: see nvidia-smi" if busy else ""
        yield Finding("device", "warning" if busy else "ok", found, remedy)
    elif world.place.flags.device == "auto" and any(Path("/dev").glob("nvidia[0-9]*")):
        remedy = "the driver may be too old for this build of torch: compare nvidia-smi with the versions above"
        yield Finding("device", "error", "there are NVIDIA devices, but torch cannot use them", remedy)
    else:
        yield Finding("device", "ok", "cpu, no CUDA device")


def backends(_: Args, world: World) -> Findings:
    """What can carry collectives."""
    there = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    yield Finding("backends", "ok", f"{world.backend} is used; there are {', '.join(there)}")


def processors(_: Args, world: World) -> Findings:
    """Cores for this process's threads."""
    found = f"{torch.get_num_threads()} thread(s) in each process, {cores()} core(s) of {os.cpu_count()} may be used"
    crowded = world.cores * world.place.local_size > cores()
    remedy = "more processes than cores: they slow each other down" if crowded else ""
    yield Finding("cores", "warning" if crowded else "ok", found, remedy)


def names(_: Args, world: World) -> Findings:
    """The address under which other machines would look for this one."""
    host = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    except OSError as error:
        state: State = "error" if world.nodes > 1 else "warning"
        remedy = f"add {host} to /etc/hosts or the DNS, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield Finding("host name", state, f"{host} has no address ({error.strerror})", remedy)
        return
    local = all(address.startswith("127.") or address == "::1" for address in addresses)
    if local and world.nodes > 1:
        remedy = "other machines cannot connect to it: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface"
        yield Finding("host name", "error", f"{host} is {', '.join(addresses)}", remedy)
    else:
        yield Finding("host name", "ok", f"{host} is {', '.join(addresses)}")


def interfaces(_: Args, world: World) -> Findings:
    """Network interfaces, and whether those that variables name are there."""
    there = {name: address_of(name) for _, name in socket.if_nameindex()}
    yield Finding("interfaces", "ok", ", ".join(f"{name} {address or '-'}" for name, address in there.items()))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = [name.lstrip("=") for name in os.environ.get(variable, "").split(",") if name and name[0] != "^"]
        missing = [name for name in wanted if not any(other.startswith(name) for other in there)]
        if missing:
            remedy = f"set it to one of {', '.join(there)}, or leave it out"
            yield Finding("interfaces", "error", f"{variable}={os.environ[variable]}: no such interface", remedy)


def address_of(interface: str) -> str:
    """The IPv4 address of an interface (Linux); empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def ports(_: Args, world: World) -> Findings:
    """Whether a job could listen: at any port, and at the one that torchrun takes if none is given."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        yield Finding("ports", "ok", "free ones can be listened on" if free.getsockname()[1] else "none")
    if world.place.launcher == "plain":
        try:
            socket.create_server(("", DEFAULT_PORT)).close()
        except OSError as error:
            remedy = (
                "a job is running here, or has just ended: give the next one --master-port or --dist-url another port"
            )
            yield Finding("ports", "warning", f"{DEFAULT_PORT}, torchrun's default: {error.strerror}", remedy)


def shared_memory(_: Args, world: World) -> Findings:
    """Room for loader workers, and for nccl."""
    if not SHARED.is_dir():
        yield Finding("shared memory", "error", f"{SHARED} is not there", "mount a tmpfs there")
        return
    size = shutil.disk_usage(SHARED).total
    little = size < 256 * MEGABYTE
    remedy = "loader workers end with a bus error: docker run --shm-size 1g, in Kubernetes components/shared-memory"
    yield Finding(
        "shared memory", "warning" if little else "ok", f"{SHARED}: {size / MEGABYTE:.0f} MB", remedy if little else ""
    )


def memory(_: Args, world: World) -> Findings:
    """Memory that is left, of the machine and of the container."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    left = [int(fields["MemAvailable"].split()[0]) * 1024]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        group = Path("/sys/fs/cgroup")
        if (group / limit).exists() and (group / limit).read_text().strip().isdigit():
            left.append(int((group / limit).read_text()) - int((group / used).read_text()))
    little = min(left) < GIGABYTE * world.place.local_size
    remedy = "the kernel would end a process (SIGKILL): give the container more, or start fewer processes"
    found = f"{'less than' if little else 'at least'} 1 GB for each process is left"
    yield Finding("memory", "warning" if little else "ok", found, remedy if little else "")


def limits(_: Args, world: World) -> Findings:
    """Limits of the process that jobs run into."""
    files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = files != resource.RLIM_INFINITY and files < 1024
    remedy = "sockets and loader workers need more: ulimit -n 65536" if low else ""
    yield Finding("open files", "warning" if low else "ok", f"{files} at once", remedy)
    locked, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").is_dir():
        low = locked != resource.RLIM_INFINITY
        remedy = "nccl over RDMA needs ulimit -l unlimited; in Kubernetes it is the container runtime's limit"
        found = f"{locked / MEGABYTE:.0f} MB may be locked" if low else "may be locked without a limit"
        yield Finding("locked memory", "warning" if low else "ok", found, remedy if low else "")


def user(_: Args, world: World) -> Findings:
    """A user without a name, as containers have them, needs a home for the caches of libraries."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = ""
    home = Path(os.environ.get("HOME", "/"))
    lost = not name and not ("USER" in os.environ and os.access(home, os.W_OK))
    remedy = "set USER to any name and HOME to a folder that can be written" if lost else ""
    found = f"{os.getuid()} ({name or 'without a name'}), home {home}"
    yield Finding("user", "warning" if lost else "ok", found, remedy)
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:
        yield Finding("temporary files", "error", error.strerror or str(error), "mount a tmpfs on /tmp, or set TMPDIR")


def data(args: Args, world: World) -> Findings:
    """Whether the data can be read."""
    if args.data is None:
        return
    try:
        entries = sum(1 for _ in args.data.iterdir())
    except OSError as error:
        remedy = "check the path, the mount and the rights of this user"
        yield Finding("data", "error", f"{args.data}: {error.strerror}", remedy)
        return
    yield Finding(
        "data", "ok" if entries else "error", f"{args.data}: {entries} entries", "" if entries else "it is empty"
    )


# ------------------------------------------------------------------------------------------------- all together


def same_versions(_: Args, world: World) -> Findings:
    """Different versions on different nodes fail late, or train wrongly."""
    mine = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    everybody: list[str] = [""] * world.size
    dist.all_gather_object(everybody, mine)
    if world.is_main and len(set(everybody)) > 1:
        yield Finding("same versions", "error", "the processes differ, see above", "use one image on all nodes")


def round_trip(args: Args, world: World) -> Findings:
    """A sum over all processes, small and large, whose result is known."""
    kinds = {world.device: world.backend} | ({torch.device("cpu"): "gloo"} if world.backend == "nccl" else {})
    for where, backend in kinds.items():
        seconds = []
        for count in (1, 1_000_000):
            for _ in range(3):  # the first ones open connections
                numbers = torch.full((count,), float(world.rank + 1), device=where)
                started = time.perf_counter()
                dist.all_reduce(numbers)
                right = bool((numbers == world.size * (world.size + 1) / 2).all())
                elapsed = time.perf_counter() - started
            seconds.append(elapsed)
            if not right:
                yield Finding(
                    "round trip",
                    "error",
                    f"{backend}: wrong sum of {count} numbers",
                    "a fault of the network or a device",
                )
                return
        if world.is_main:
            small, large = (1000 * second for second in seconds)
            times = f"{small:.2f} ms for 4 bytes, {large:.1f} ms for 4 MB"
            found = f"{backend}: all_reduce of {world.size} process(es) is right, {times}"
            yield Finding("round trip", "ok", found)


def clocks(_: Args, world: World) -> Findings:
    """Clocks that differ make logs and the age of files misleading."""
    dist.barrier()
    everybody = gather(world, time.time())
    if world.is_main:
        apart = max(everybody) - min(everybody)
        remedy = "synchronise them (chrony, NTP): file times and logs are compared between nodes" if apart > 2 else ""
        yield Finding(
            "clocks", "warning" if apart > 2 else "ok", "within 2 s" if apart <= 2 else f"{apart:.0f} s apart", remedy
        )


def output(args: Args, world: World) -> Findings:
    """Whether the main rank can write, and whether all see what it has written, which resuming needs."""
    token = from_main(world, lambda: f"{os.getpid()} {datetime.datetime.now(datetime.UTC).timestamp()}")
    probe, failed = args.out / ".doctor", ""
    if world.is_main:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            probe.write_text(token)
        except OSError as error:
            failed = error.strerror or str(error)
    failed = from_main(world, lambda: failed)
    if failed:
        if world.is_main:
            yield Finding("output", "error", f"{args.out}: {failed}", "choose another --out, or mount a volume there")
        return
    seen = probe.read_text() == token if probe.exists() else False
    dist.barrier()
    if world.is_main:
        probe.unlink()
        free = shutil.disk_usage(args.out).free
        little = free < GIGABYTE
        remedy = "checkpoints may not fit: make room" if little else ""
        yield Finding(
            "output", "warning" if little else "ok", f"{args.out} can be written, {free / GIGABYTE:.1f} GB free", remedy
        )
    if not seen:
        remedy = "mount the same folder on all nodes: without it a job cannot resume"
        yield Finding("output", "error", f"{args.out} is another folder than that of the main process", remedy)


LOCAL: dict[str, Callable[[Args, World], Findings]] = {
    "versions": versions,
    "device": device,
    "backends": backends,
    "cores": processors,
    "host name": names,
    "interfaces": interfaces,
    "ports": ports,
    "shared memory": shared_memory,
    "memory": memory,
    "limits": limits,
    "user": user,
    "data": data,
}
TOGETHER: dict[str, Callable[[Args, World], Findings]] = {
    "same versions": same_versions,
    "round trip": round_trip,
    "clocks": clocks,
    "output": output,
}


if __name__ == "__main__":
    sys.exit(launch(main_worker, place, args))
