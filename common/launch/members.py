"""Members: processes of a training that goes on when one of them is lost.

The process that the user starts hosts the store at which they meet (`spawn.hosted`), starts them,
and replaces those that are lost, if asked to. It does not train, and must not be lost itself.
"""

import multiprocessing
import multiprocessing.connection
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from common.launch import rendezvous
from common.launch.args import STOPPING, fail
from common.launch.console import complain, listed, say
from common.launch.device import share_cores
from common.launch.errors import UserError
from common.launch.place import Place


def join(local_number: int, place: Place) -> dist.Store:
    """Give this process, a member, its place and its share of the cores.

    Args:
        local_number: of the processes of this node.
        place: where its parent runs.

    Returns:
        The store at which the members meet.
    """
    place.export(local_number)  # on one machine: gloo listens on loopback only
    share_cores(place, place.local_world_size)
    rendezvous.joined = store = client(place)  # where `record` asks who reports an error
    return store


def client(place: Place) -> dist.Store:
    """Connect to the store, which the first node's parent hosts."""
    host = "127.0.0.1" if place.loopback else place.host
    return dist.TCPStore(
        host, place.port, is_master=False, wait_for_workers=False, timeout=place.flags.patience
    )


def keep(
    member: Callable[[int, int, Place, Any], None], place: Place, args: Any, replace: bool
) -> None:
    """Start the members of this node, see them end, and replace them if asked to.

    Args:
        member: the main function of one, decorated with `record`; its arguments are its number
            among those of this node (a newcomer's is that of the lost one), its number in the job,
            `place` and `args`.
        place: of this process.
        args: the flags.
        replace: whether a newcomer is started for each that is lost.

    Raises:
        SystemExit: all were lost (code 1), one met an error, the first node is not there (code 2),
            or this process got a signal.
    """
    if place.node_rank > 0:
        _await_first_node(place)
    store, running = client(place), dict[Any, tuple[int, int, Any]]()
    context, finished = multiprocessing.get_context("forkserver"), False

    def begin(local_number: int, number: int) -> None:
        process = context.Process(target=member, args=(local_number, number, place, args))
        process.start()
        running[process.sentinel] = local_number, number, process
        say(f"member {number} is process {process.pid}")

    for signum in STOPPING:
        signal.signal(signum, partial(_stop, store, running))
    signal.signal(signal.SIGUSR1, _say_that_nobody_tells)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        for local_rank in range(place.local_world_size):
            begin(local_rank, place.rank + local_rank)
        while running:
            patience = place.flags.timeout if finished else None
            ended = multiprocessing.connection.wait(list(running), patience)
            if not ended:
                break  # what is left is silent, and the others have done without it
            for sentinel in ended:
                local_number, number, process = running.pop(sentinel)
                process.join()
                code = process.exitcode
                with suppress(dist.DistError):  # the first node's parent ends first
                    store.set(f"ended/{number}", str(code))
                if code > 0:
                    raise SystemExit(code)  # an error, which would come again
                finished = finished or code == 0
                if code < 0 and not finished:
                    say(f"lost member {number}: {signal.Signals(-code).name}")
                    if replace:
                        newcomer = place.world_size + store.add("newcomers", 1) - 1
                        begin(local_number, newcomer)  # nobody else has this local number now
    finally:
        _end(store, running)
    if place.node_rank == 0 and not store.check(["finished"]):
        _await_others(store, place)


def _end(store: dist.Store, running: dict[Any, tuple[int, int, Any]]) -> None:
    """End the members that are left, for which those of other nodes need not wait then."""
    for *_, process in running.values():
        process.kill()
    for _, number, process in running.values():
        process.join()
        with suppress(dist.DistError):
            store.set(f"ended/{number}", str(process.exitcode))


def _await_others(store: dist.Store, place: Place) -> None:
    """Keep the store until the members of all nodes have ended, or are silent at the end.

    Raises:
        SystemExit: nobody has finished the training (code 1).
    """
    said, deadline = False, float("inf")
    while left := _left(store, place):
        if not said:
            said = True
            say(f"no member of this node is left: waiting for {listed(left)}")
        if deadline == float("inf") and store.check(["finished"]):
            deadline = time.monotonic() + place.flags.timeout
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if not store.check(["finished"]):
        complain("all members are lost: nobody was left to go on")
        raise SystemExit(1)


def _left(store: dist.Store, place: Place) -> list[int]:
    """The members of all nodes that have not ended."""
    numbers = range(place.world_size + store.add("newcomers", 0))
    return [number for number in numbers if not store.check([f"ended/{number}"])]


def _await_first_node(place: Place) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # a stop ends this process at once
    try:
        rendezvous.await_host(place.host, place.port, place.flags.timeout)
    except UserError as error:
        fail(error)


def _say_that_nobody_tells(*_: object) -> None:
    """Of other programs, this signal asks where the ranks are."""
    say("no table: members that may change cannot be asked; a silent one is given up by the others")


def _stop(
    store: dist.Store, running: dict[Any, tuple[int, int, Any]], signum: int, _: object
) -> None:
    """End this parent of members: a terminal's Ctrl-C reaches them, too, and one line is enough."""
    for again in STOPPING:
        signal.signal(again, lambda *_: None)
    first = b"parent"
    with suppress(dist.DistError):
        first = store.compare_set("end reported", "", "parent")
    if first == b"parent":
        complain(f"stopped by {signal.Signals(signum).name}: nothing is saved before the end")
    else:  # killed now, it would not come to say it
        for *_, process in running.values():
            process.join(5)
    raise SystemExit(128 + signum)
