"""How ranks learn that all are there, and who they are: through a store, by few questions."""

import json
import secrets
import time
from typing import Any

import torch.distributed as dist

from common.launch.console import listed, say
from common.launch.errors import Absent

Member = dict[str, Any]
PATIENCE = 5.0  # seconds; a rank that waits longer says for whom


def muster(
    store: dist.Store, me: Member, rank: int, size: int, seconds: float, advice: str = ""
) -> tuple[dist.Store, list[Member]]:
    """Wait until every rank has come, so that a missing one is named.

    torchrun keeps one store for all its restarts, in which ranks would read the addresses of the
    dead; and its count of restarts does not name an attempt, because a node that came later counts
    fewer. So every process introduces itself by a name that nobody had before, rank 0 publishes
    the roll of the names that it sees, and each rank answers when it finds its own on it. The roll
    to which all have answered is the world. One that is there before is of the dead: rank 0 waits
    for others, and nobody else reads it.

    A rank asks for one key at a time, whatever their number is; rank 0 alone reads all, when all
    are there.

    Returns:
        The part of the store that only this world uses, and the roll, in rank order.

    Raises:
        Absent: some did not come in time.
    """
    hellos = [f"hello/{other}" for other in range(size)]
    store.set(hellos[rank], json.dumps(me))
    dead = names_of_dead(store) if rank == 0 else set[str]()
    began, told, here = time.monotonic(), rank != 0, 0
    world, answered, roll, old = "", "", list[Member](), ""
    while True:
        while rank == 0 and here < size and _is_here(store, hellos[here], dead):
            here += 1
        if here == size:
            seen = [json.loads(hello) for hello in store.multi_get(hellos)]
            if seen != roll and all(member["size"] == size for member in seen):
                world, roll = secrets.token_hex(8), seen
                store.set(f"{world}/roll", json.dumps(roll))
                store.set("world", world)
        elif rank != 0 and store.check(["world"]):
            newest = store.get("world").decode()
            if newest not in (world, old) and store.check([f"{newest}/complete"]):
                old = newest  # without this rank
            elif newest not in (world, old):
                world, roll = newest, json.loads(store.get(f"{newest}/roll"))
        if rank < len(roll) and roll[rank] == me:  # a roll of before a restart names the dead
            if answered != world:
                answered = world
                _answer(store, world, rank, size)
            if store.check([f"{world}/complete"]):
                return dist.PrefixStore(f"world-{world}", store), roll
        waited = time.monotonic() - began
        if waited > seconds or (waited > PATIENCE and not told):
            missing = _missing(store, world, hellos)
            names = listed(missing)
            if waited > seconds:
                raise Absent(
                    f"{size - len(missing)} of {size} processes joined within {seconds:g} s; "
                    f"missing: rank {names}. {advice}"
                )
            told = True
            say(f"waiting for rank {names} of {size}, for up to {seconds:g} s")
        # Noticed a quarter later than it happens, at most, and by few questions.
        time.sleep(min(0.5, max(0.002, waited / 4)))


def names_of_dead(store: dist.Store) -> set[str]:
    """The names of the processes to which an earlier attempt of this job has come."""
    if store.check(["world"]):
        world = store.get("world").decode()
        if store.check([f"{world}/complete"]):
            return {member["name"] for member in json.loads(store.get(f"{world}/roll"))}
    return set()


def _is_here(store: dist.Store, hello: str, dead: set[str]) -> bool:
    there = store.check([hello])
    return there and (not dead or json.loads(store.get(hello))["name"] not in dead)


def _missing(store: dist.Store, world: str, hellos: list[str]) -> list[int]:
    """The ranks that have not come, or not answered to the newest roll."""
    if world:
        return not_there(store, [_sign(world, rank) for rank in range(len(hellos))])
    dead = names_of_dead(store)
    if not dead:
        return not_there(store, hellos)
    return [rank for rank, hello in enumerate(hellos) if not _is_here(store, hello, dead)]


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
