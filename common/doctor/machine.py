"""What each process finds out alone, about its machine or container."""

import fcntl
import os
import platform
import pwd
import resource
import shutil
import socket
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from common.doctor.findings import (
    GIGABYTE,
    MEGABYTE,
    Check,
    Finding,
    Findings,
    Here,
    State,
    judge,
    packages,
)
from common.doctor.gpu import GPU
from common.launch.cgroup import cores, memory_left
from common.launch.resolve import DEFAULT_PORT

SHARED = Path("/dev/shm")  # noqa: S108 - not a temporary file: its size is asked for


def versions(_: Here) -> Findings:
    """Versions, which all processes must share."""
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    found = f"Python {platform.python_version()}, {packages()}, built with {cuda}"
    yield Finding("versions", "ok", found)


def backends(here: Here) -> Findings:
    """What can carry collectives."""
    there = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    yield Finding("backends", "ok", f"{here.backend} is used; there are {', '.join(there)}")


def processors(here: Here) -> Findings:
    """Cores for this process's threads."""
    usable = cores()
    found = f"{torch.get_num_threads()} thread(s) in each process, "
    found += f"{usable} core(s) of {os.cpu_count()} may be used"
    remedy = "more processes than cores: they slow each other down"
    yield judge("cores", here.place.local_world_size > usable, found, remedy)


def host_name(here: Here) -> Findings:
    """The address under which other machines would look for this one."""
    host, several = socket.gethostname(), here.place.num_nodes > 1
    variables = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    except OSError as error:
        found, remedy = f"{host} has no address ({error.strerror})", "to /etc/hosts or the DNS"
        state: State = "error" if several else "warning"
        yield Finding("host name", state, found, f"add {host} {remedy}, or {variables}")
        return
    hidden = several and all(each.startswith("127.") or each == "::1" for each in addresses)
    remedy = f"other machines cannot connect to it: {variables} to an interface"
    yield judge("host name", hidden, f"{host} is {', '.join(addresses)}", remedy, "error")


def interfaces(_: Here) -> Findings:
    """Network interfaces, and whether those that variables name are there."""
    there = {name: address_of(name) for _, name in socket.if_nameindex()}
    found = ", ".join(f"{name} {address or '-'}" for name, address in there.items())
    yield Finding("interfaces", "ok", found)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        wanted = [name.lstrip("=") for name in value.split(",") if name and name[0] != "^"]
        if not all(any(other.startswith(name) for other in there) for name in wanted):
            found = f"{variable}={value}: no such interface"
            remedy = f"set it to one of {', '.join(there)}, or leave it out"
            yield Finding("interfaces", "error", found, remedy)


def address_of(interface: str) -> str:
    """The IPv4 address of an interface (Linux); empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, request)[20:24])  # SIOCGIFADDR
    return ""


def ports(here: Here) -> Findings:
    """Whether a job could listen: at any port, and at the one that torchrun takes by default."""
    socket.create_server(("127.0.0.1", 0)).close()
    yield Finding("ports", "ok", "free ones can be listened on")
    if here.place.launcher == "plain":
        try:
            socket.create_server(("", DEFAULT_PORT)).close()
        except OSError as error:
            found = f"{DEFAULT_PORT}, torchrun's default: {error.strerror}"
            remedy = "a job is running here, or has just ended: give the next one another port"
            yield Finding("ports", "warning", found, f"{remedy} (--master-port, --dist-url)")


def shared_memory(here: Here) -> Findings:
    """Room for loader workers, and for nccl."""
    if not SHARED.is_dir():
        yield Finding("shared memory", "error", f"{SHARED} is not there", "mount a tmpfs there")
        return
    size = shutil.disk_usage(SHARED).total
    carries = "nccl" in here.backend and here.place.local_world_size > 1
    remedy = "loader workers end with a bus error"
    if carries:  # it takes /dev/shm where CUDA gives it no host memory, for want of SYS_NICE
        remedy += ", and nccl may not start in a container without SYS_NICE"
    remedy += ": docker run --shm-size 1g, in Kubernetes components/shared-memory (an emptyDir in "
    remedy += "memory)"
    found = f"{SHARED}: {size / MEGABYTE:.0f} MB"
    enough = GIGABYTE if carries else 256 * MEGABYTE  # the former is what nccl's manual proposes
    yield judge("shared memory", size < enough, found, remedy)


def memory(here: Here) -> Findings:
    """Memory that is left, of the machine and of the container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    left = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    if (container := memory_left()) is not None:
        left.append(container)
    little = min(left) < GIGABYTE * here.place.local_world_size
    found = f"{'less than' if little else 'at least'} 1 GB for each process is left"
    remedy = "the kernel would kill a process: give the container more, or start fewer processes"
    yield judge("memory", little, found, remedy)


def limits(_: Here) -> Findings:
    """Limits of the process that jobs run into."""
    files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = files != resource.RLIM_INFINITY and files < 1024
    remedy = "sockets and loader workers need more: ulimit -n 65536"
    yield judge("open files", low, f"{files} at once", remedy)
    locked, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").is_dir():
        low = locked != resource.RLIM_INFINITY
        found = (
            f"{locked / MEGABYTE:.0f} MB may be locked" if low else "may be locked without a limit"
        )
        remedy = "nccl over RDMA needs ulimit -l unlimited; in Kubernetes the runtime sets it"
        yield judge("locked memory", low, found, remedy)


def user(_: Here) -> Findings:
    """A user without a name, as containers have them, needs a home for the caches of libraries."""
    name, home = "", Path(os.environ.get("HOME", "/"))
    with suppress(KeyError):
        name = pwd.getpwuid(os.getuid()).pw_name
    lost = not name and not ("USER" in os.environ and os.access(home, os.W_OK))
    found = f"{os.getuid()} ({name or 'without a name'}), home {home}"
    remedy = "set USER to any name and HOME to a folder that can be written"
    yield judge("user", lost, found, remedy)
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:
        remedy = "mount a tmpfs on /tmp, or set TMPDIR"
        yield Finding("temporary files", "error", error.strerror or str(error), remedy)


def data(here: Here) -> Findings:
    """Whether the data can be read."""
    if (folder := here.args.data) is None:
        return
    try:
        entries = sum(1 for _ in folder.iterdir())
        yield judge("data", not entries, f"{folder}: {entries} entries", "it is empty", "error")
    except OSError as error:
        remedy = "check the path, the mount and the rights of this user"
        yield Finding("data", "error", f"{folder}: {error.strerror}", remedy)


ALONE: dict[str, Check] = {
    "versions": versions,
    **GPU,
    "backends": backends,
    "cores": processors,
    "host name": host_name,
    "interfaces": interfaces,
    "ports": ports,
    "shared memory": shared_memory,
    "memory": memory,
    "limits": limits,
    "user": user,
    "data": data,
}
