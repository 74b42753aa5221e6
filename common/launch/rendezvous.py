"""How the ranks of a job find each other: `dist.init_process_group(backend, init_method=JOB)`.

`JOB` works like torch's `env://`, from the same variables, and adds four things: a world of one
opens no socket; a job on one machine listens on loopback only; missing ranks are named when the
time is up; and ranks that torchrun has restarted do not meet the dead ones of the attempt before.
"""

import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from common.launch import device, place
from common.launch.cgroup import machine
from common.launch.console import say
from common.launch.errors import Absent, UserError
from common.launch.muster import PATIENCE, Member, muster, names_of_dead
from common.launch.who import watcher

JOB = "job://"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
joined: dist.Store | None = None
"""The store of this process's job, after it has joined."""
of_all_attempts: dist.Store | None = None
"""The store that torchrun keeps when it restarts the workers; `joined` is this attempt's part."""
restart_is_known = False
"""Whether rank 0 found an earlier attempt in it."""


def listen(port: int, loopback: bool) -> socket.socket:
    """Bind the socket of the store, on loopback when all processes are on one machine.

    Outside of it, on all addresses, of IPv6 and of IPv4. The socket is bound here and handed to the
    store: a store that binds by itself listens on all interfaces, and a free port that is looked up
    first can be taken before it is used.

    Raises:
        UserError: the port is in use.
    """
    try:
        if loopback or not socket.has_dualstack_ipv6():
            return socket.create_server(("127.0.0.1" if loopback else "", port), backlog=512)
        family = socket.AF_INET6
        return socket.create_server(("", port), family=family, backlog=512, dualstack_ipv6=True)
    except OSError as error:
        reason = os.strerror(error.errno or errno.EINVAL)
        choose = "choose another port in --dist-url, or leave it out on one machine"
        if "PET_NNODES" in os.environ:
            choose = "beside the training of this pod, give --nnodes 1"
        raise UserError(
            f"port {port} cannot be used ({reason}): another job may hold it; {choose}"
        ) from None


def _handler(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """What `init_process_group` calls for `JOB`: yields store, rank and world size."""
    global joined, of_all_attempts, restart_is_known
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    me: Member = {
        "name": secrets.token_hex(8),
        "size": size,
        "attempt": int(os.environ.get(RESTARTS, "0")),
        "machine": machine(),
        "backend": device.chosen,
    }
    here = place.current()
    alone = here.launcher == "plain" and size == 1
    store = dist.HashStore() if alone else _store(rank, timeout)
    listening, me["who"] = watcher.listen(here.loopback, here.host, here.port)
    members = [me]
    if not alone:
        of_all_attempts, restart_is_known = store, rank == 0 and bool(names_of_dead(store))
        store, members = muster(store, me, rank, size, timeout.total_seconds(), _advice(here))
    if size > 1:  # of several nodes, one that came later counts fewer
        os.environ[RESTARTS] = str(max(member["attempt"] for member in members))
    neighbours = sum(member["machine"] == me["machine"] for member in members)
    device.share_cores(here, neighbours)
    joined = store
    _check_backends([member["backend"] for member in members])
    roll = [member["who"] for member in members]
    watcher.watch(roll, members[0]["name"], listening, timeout.total_seconds())
    yield store, rank, size


def _check_backends(chosen: list[str]) -> None:
    """Before nccl waits for a rank that does not use it.

    Raises:
        UserError: some ranks have chosen nccl, and others gloo.
    """
    if {"nccl", "gloo"} <= set(chosen):
        nccl, gloo = (chosen.index(name) for name in ("nccl", "gloo"))
        raise UserError(
            f"rank {nccl} has chosen nccl and rank {gloo} gloo, because it has no CUDA device of "
            f"its own: look for its GPU, or give --dist-backend gloo to all"
        )


register_rendezvous_handler(JOB.partition(":")[0], _handler)


def _advice(here: place.Place) -> str:
    """What to do when ranks are missing."""
    if here.num_nodes == 1:
        return "Start the others, or give a longer --timeout"
    counted = "--nnodes, which is --world-size here and counts nodes, not processes"
    wrong = "--nnodes" if here.launched else counted
    return (
        f"This is node {here.node_rank} of {here.num_nodes}; they meet at "
        f"{place.address(here.host, here.port)}. Start the others with this address, correct "
        f"{wrong}, or give a longer --timeout"
    )


def _store(rank: int, timeout: timedelta) -> dist.Store:
    """The key-value store at which the processes of a job meet."""
    loopback = place.current().loopback
    # Of one node's names, only this is surely listened on.
    host = "127.0.0.1" if loopback else os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    descriptor = listen(port, loopback).detach() if hosts else None
    if not hosts:
        await_host(host, port, timeout.total_seconds())
    return dist.TCPStore(
        host,
        port,
        is_master=hosts,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def await_host(host: str, port: int, seconds: float) -> None:
    """Wait until the store's host answers: it may start later, and so may its name in the DNS.

    A store that waits by itself prints tracebacks of C++ while it does.
    """
    began, told = time.monotonic(), os.environ.get("LOCAL_RANK", "0") != "0"
    deadline = began + seconds
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((host, port), timeout=left).close()
        except OSError as error:
            why = error.strerror or error
            if not told and time.monotonic() > began + PATIENCE:
                told = True
                say(f"waiting for the first node, {place.address(host, port)}: {why}")
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise Absent(
                f"the first node, {place.address(host, port)}, cannot be reached within "
                f"{seconds:g} s ({why}): start it there, and check its name, the port and the "
                f"firewall; if this is the only node, leave out --nnodes (or --world-size)"
            ) from None
        return
