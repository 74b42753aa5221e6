"""How the ranks of a job find each other: `dist.init_process_group(backend, init_method=JOB)`.

`JOB` works like torch's `env://`, from the same variables, and adds four things: a world of one
opens no socket; a job on one machine listens on loopback only; missing ranks are named when the
time is up; and ranks that torchrun has restarted do not meet the dead ones of the attempt before.
"""

import errno
import json
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
from common.launch.console import listed
from common.launch.errors import Absent, UserError
from common.launch.who import watcher

Member = dict[str, Any]
JOB = "job://"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
PATIENCE = 5.0  # seconds; a rank that waits longer says for whom
joined: dist.Store | None = None
"""The store of this process's job, after it has joined."""


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
        raise UserError(
            f"port {port} cannot be used ({reason}): another job may hold it; "
            f"choose another port in --dist-url, or leave it out on one machine"
        ) from None


def _handler(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """What `init_process_group` calls for `JOB`: yields store, rank and world size."""
    global joined
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    me: Member = {
        "name": secrets.token_hex(8),
        "size": size,
        "attempt": int(os.environ.get(RESTARTS, "0")),
        "machine": machine(),
    }
    here = place.current()
    alone = here.launcher == "plain" and size == 1
    store = dist.HashStore() if alone else _store(rank, timeout)
    listening, me["who"] = watcher.listen(here.loopback, here.host, here.port)
    members = [me]
    if not alone:
        store, members = _muster(store, me, rank, size, timeout.total_seconds(), _advice(here))
    if size > 1:  # of several nodes, one that came later counts fewer
        os.environ[RESTARTS] = str(max(member["attempt"] for member in members))
    neighbours = sum(member["machine"] == me["machine"] for member in members)
    device.share_cores(here, neighbours)
    joined = store
    roll = [member["who"] for member in members]
    watcher.watch(roll, members[0]["name"], listening, timeout.total_seconds())
    yield store, rank, size


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
        _await_host(host, port, timeout.total_seconds())
    return dist.TCPStore(
        host,
        port,
        is_master=hosts,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def _await_host(host: str, port: int, seconds: float) -> None:
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
                print(f"waiting for the first node, {place.address(host, port)}: {why}", flush=True)
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise Absent(
                f"the first node, {place.address(host, port)}, cannot be reached within "
                f"{seconds:g} s ({why}): start it there, and check its name, the port and the "
                f"firewall; if this is the only node, leave out --nnodes (or --world-size)"
            ) from None
        return


def _muster(
    store: dist.Store, me: Member, rank: int, size: int, seconds: float, advice: str = ""
) -> tuple[dist.Store, list[Member]]:
    """Wait until every rank has come, so that a missing one is named.

    torchrun keeps one store for all its restarts, in which ranks would read the addresses of the
    dead; and its count of restarts does not name an attempt, because a node that came later counts
    fewer. So every process introduces itself by a name that nobody had before, rank 0 publishes
    the roll of the names that it sees, and each rank answers when it finds its own on it. The roll
    to which all have answered is the world.

    A rank asks for one key at a time, whatever their number is; rank 0 alone reads all, when all
    are there.

    Returns:
        The part of the store that only this world uses, and the roll, in rank order.

    Raises:
        Absent: some did not come in time.
    """
    hellos = [f"hello/{other}" for other in range(size)]
    store.set(hellos[rank], json.dumps(me))
    began, told, here = time.monotonic(), rank != 0, 0
    world, answered, roll = "", "", list[Member]()
    while True:
        while rank == 0 and here < size and store.check([hellos[here]]):
            here += 1
        if here == size:
            seen = [json.loads(hello) for hello in store.multi_get(hellos)]
            if seen != roll and all(member["size"] == size for member in seen):
                world, roll = secrets.token_hex(8), seen
                store.set(f"{world}/roll", json.dumps(roll))
                store.set("world", world)
        elif rank != 0 and store.check(["world"]):
            newest = store.get("world").decode()
            if newest != world:
                world, roll = newest, json.loads(store.get(f"{newest}/roll"))
        if rank < len(roll) and roll[rank] == me:  # a roll of before a restart names the dead
            if answered != world:
                answered = world
                _answer(store, world, rank, size)
            if store.check([f"{world}/complete"]):
                return dist.PrefixStore(f"world-{world}", store), roll
        waited = time.monotonic() - began
        if waited > seconds or (waited > PATIENCE and not told):
            signs = [_sign(world, other) for other in range(size)] if world else hellos
            missing = not_there(store, signs)
            names = listed(missing)
            if waited > seconds:
                raise Absent(
                    f"{size - len(missing)} of {size} processes joined within {seconds:g} s; "
                    f"missing: rank {names}. {advice}"
                )
            told = True
            print(f"waiting for rank {names} of {size}, for up to {seconds:g} s", flush=True)
        # Noticed a quarter later than it happens, at most, and by few questions.
        time.sleep(min(0.5, max(0.002, waited / 4)))


def _sign(world: str, rank: int) -> str:
    """The key by which a rank says that it has found itself on a roll."""
    return f"{world}/here/{rank}"


def _answer(store: dist.Store, world: str, rank: int, size: int) -> None:
    store.set(_sign(world, rank), "")
    if store.add(f"{world}/answers", 1) == size:
        store.set(f"{world}/complete", "")


def not_there(store: dist.Store, keys: list[str], first: int = 0) -> list[int]:
    """The numbers of the keys that are not in the store; few questions find a few."""
    if store.check(keys):
        return []
    if len(keys) == 1:
        return [first]
    half = len(keys) // 2
    return [
        *not_there(store, keys[:half], first),
        *not_there(store, keys[half:], first + half),
    ]
