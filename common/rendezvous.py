"""Rendezvous: wait until all ranks of a job have joined, and name missing ranks."""

import contextlib
import hashlib
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator
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
        return dist.HashStore()
    if here.init_method.startswith("file://"):
        store = dist.FileStore(here.init_method.removeprefix("file://"), here.world_size)
    else:
        store = _connect(here, seconds)
    joined = _join(store, here, seconds)
    joined.set(f"process/{here.rank}", f"{platform.node()} {os.getpid()}")  # for hang.py
    return joined


def _connect(here: Place, seconds: float) -> dist.Store:
    host, _, port = here.init_method.removeprefix("tcp://").rpartition(":")
    address, timeout = (host.strip("[]"), int(port)), timedelta(seconds=seconds)
    is_host = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_host:
        _await_host(address, seconds)
    try:
        return dist.TCPStore(*address, is_master=is_host, timeout=timeout, wait_for_workers=False)
    except dist.DistNetworkError:
        raise UserError(f"port {port} is already in use; choose a different port") from None


def _await_host(address: tuple[str, int], seconds: float) -> None:
    """Wait until the store's host accepts connections; the host's DNS name may not exist yet."""
    for _ in _attempts(seconds):  # TCPStore also waits, but prints C++ frames on failure
        with contextlib.suppress(OSError):
            return socket.create_connection(address, timeout=1).close()
    raise TimeoutError(
        f"node 0 did not accept connections at {address[0]}:{address[1]} within {seconds:g} s; "
        f"check the address, the port and the firewall"
    )


def _attempts(seconds: float) -> Iterator[None]:
    """Yield at growing intervals for the given number of seconds."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
        pause = min(0.5, 2 * pause)


def _join(store: dist.Store, here: Place, seconds: float) -> dist.Store:
    """Join the current attempt to run the job; return a view of the store for this attempt.

    torchrun keeps one store across all restarts, so the store still contains addresses of exited
    processes. Each process therefore registers under a random ID, and rank 0 publishes the list of
    IDs. Once every rank has acknowledged a list, that list defines the job.
    """
    own_id = f"{secrets.token_hex(8)}/{here.world_size}"
    keys = expected = [f"participant/{rank}" for rank in range(here.world_size)]
    store.set(keys[here.rank], own_id)
    for _ in _attempts(seconds):
        if here.rank == 0 and store.check(keys):
            store.set("participants", b" ".join(store.multi_get(keys)).decode())
        ids = store.get("participants").split() if store.check(["participants"]) else []
        if own_id.encode() in ids:
            _check_world_sizes(ids)
            job = hashlib.sha256(b" ".join(ids)).hexdigest()[:16]
            expected = [f"{job}/{rank}" for rank in range(here.world_size)]
            store.set(expected[here.rank], "")
            if store.check(expected):
                return dist.PrefixStore(job, store)
    _check_world_sizes(store.multi_get([key for key in keys if store.check([key])]))
    missing = ", ".join(str(rank) for rank, key in enumerate(expected) if not store.check([key]))
    raise TimeoutError(f"rank {missing} of {here.world_size} did not join within {seconds:g} s")


def _check_world_sizes(ids: list[bytes]) -> None:
    sizes = sorted({int(participant.rpartition(b"/")[2]) for participant in ids})
    if len(sizes) > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:  # elastic jobs may be resized
        raise UserError(
            f"the ranks were started with different world sizes: {sizes}; "
            f"use the same --world-size and --nproc on all nodes"
        )
