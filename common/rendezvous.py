"""Rendezvous: wait until all ranks of a job have joined, and name missing ranks."""

import contextlib
import hashlib
import os
import platform
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from common.launch import Place, UserError

joined: dist.Store | None = None  # `record` uses it to select the rank that reports an error


def wait_for_ranks(here: Place, seconds: float) -> dist.Store:
    """Wait until all ranks have joined, and return their store. Every rank calls this.

    Raises:
        TimeoutError: ranks are missing after `seconds`; the message names them.
        UserError: the port is in use, or the ranks were started with different world sizes.
    """
    global joined
    if here.world_size == 1:
        joined = dist.HashStore()
    elif here.init_method.startswith("file://"):
        path = here.init_method.removeprefix("file://")
        joined = _join(dist.FileStore(path, here.world_size), here, seconds)
    else:
        store = _connect(here, seconds)
        try:
            joined = _join(store, here, seconds)
        except (TimeoutError, UserError):
            linger(store, here.rank)
            raise
    joined.set(f"process/{here.rank}", f"{platform.node()} {os.getpid()}")  # for hang.py
    return joined


def linger(store: dist.Store, rank: int) -> None:
    """Wait one second if this rank hosts the store, so that other ranks can read the error."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore) and _is_host(rank):
        time.sleep(1)


def _is_host(rank: int) -> bool:
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _connect(here: Place, seconds: float) -> dist.Store:
    host, _, port = here.init_method.removeprefix("tcp://").rpartition(":")
    is_host = _is_host(here.rank)
    if not is_host:
        _await_host(host.strip("[]"), int(port), seconds)
    try:
        return dist.TCPStore(
            host.strip("[]"),
            int(port),
            is_master=is_host,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )
    except dist.DistNetworkError:
        raise UserError(f"port {port} is used by another program; use another port") from None


def _await_host(host: str, port: int, seconds: float) -> None:
    """Wait until the store's host accepts connections; its DNS name may not exist yet."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, port), timeout=1).close()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"node 0 did not accept connections at {host}:{port} within {seconds:g} s; "
                f"check the address, the port and the firewall"
            )
        time.sleep(0.1)


def _join(store: dist.Store, here: Place, seconds: float) -> dist.Store:
    """Join the current attempt to run the job; return a view of the store for its ranks only.

    torchrun keeps one store across all restarts, so it still contains the addresses of exited
    processes. Each process therefore registers under a random ID, and rank 0 publishes the list of
    IDs. Once every rank has acknowledged a list, that list defines the job.
    """
    rank, world_size = here.rank, here.world_size
    own_id = f"{secrets.token_hex(8)}/{world_size}"
    participants, acknowledged = "", list[str]()
    keys = [f"participant/{other}" for other in range(world_size)]
    store.set(keys[rank], own_id)
    deadline, pause = time.monotonic() + seconds, 0.002
    while True:
        if rank == 0 and store.check(keys):
            latest = b" ".join(store.multi_get(keys)).decode()
            if latest != participants:
                store.set("participants", latest)
            participants = latest
        elif rank != 0 and store.check(["participants"]):
            participants = store.get("participants").decode()
        if participants.split()[rank : rank + 1] == [own_id]:
            _check_world_sizes(participants.split())
            job = hashlib.sha256(participants.encode()).hexdigest()[:16]
            acknowledged = [f"{job}/{other}" for other in range(world_size)]
            store.set(acknowledged[rank], "")
            if store.check(acknowledged):
                return dist.PrefixStore(job, store)
        if time.monotonic() > deadline:
            _raise_missing(store, acknowledged or keys, world_size, seconds)
        time.sleep(pause)
        pause = min(0.5, 2 * pause)


def _check_world_sizes(ids: list[str]) -> None:
    sizes = {int(participant.rpartition("/")[2]) for participant in ids}
    if len(sizes) > 1:
        raise UserError(
            f"the ranks were started with different world sizes: {sorted(sizes)}; "
            f"use the same --world-size and --nproc on all nodes"
        )


def _raise_missing(store: dist.Store, keys: list[str], world_size: int, seconds: float) -> None:
    registered = [k for r in range(world_size) if store.check([k := f"participant/{r}"])]
    _check_world_sizes([value.decode() for value in store.multi_get(registered)])
    missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
    raise TimeoutError(f"rank {missing} of {world_size} did not join within {seconds:g} s")
