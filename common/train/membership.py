"""Who takes part in the training: the ranks agree on it in the store whenever it changes.

From one agreement to the next is a generation. At its end everybody registers under a key of the
next one, with the number of steps that it has done. When all old members have come, or are known
to have ended, or the time is up, the list is decided: `compare_set` lets the first proposal stand,
and all others read it. The members then form a process group of their own, under a prefix of the
store that no other generation uses.

| key | value | who sets it |
|---|---|---|
| `3/here/7` | the steps that member 7 has done, or NOTHING | member 7 |
| `3/knock` | - | a process that wants to be a member of generation 3 |
| `3/members` | the members of generation 3, each with its steps, as JSON | the first to propose |
| `3/ready/7` | - | member 7, when it has read them |
| `ended/7` | its exit code | the process that has started member 7, and sees it end |
| `newcomers` | how many have come after the founders, who are members 0 to F - 1 | the same |
| `3/seconds` | what the way to generation 3 has cost | its rank 0 |

The store must outlive the members, so none of them hosts it.
"""

import json
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.launch.console import listed
from common.launch.errors import Lost
from common.launch.record import LOST

NOTHING = -1
"""The steps of a newcomer: it has no state yet."""
CONNECTING = timedelta(seconds=5)
"""The longest wait for a member that was there a moment ago; gloo waits so long several times."""


class TooLate(Exception):  # noqa: N818 - named as what happened
    """A newcomer has come, and all members that had the state have ended."""


class Membership:
    """Who takes part, as one process knows it.

    Args:
        store: a client of it.
        me: the number of this process, which nobody else ever has. (A rank is a place in the list
            of a generation's members.)
        founders: F, with how many the job starts.
        timeout: the longest wait for another member.

    Attributes:
        members: by number, in the order of their ranks, with the steps that they had done when this
            generation began.
    """

    def __init__(self, store: dist.Store, me: int, founders: int, timeout: timedelta) -> None:
        self.store, self.me, self.founders, self.timeout = store, me, founders, timeout
        self.generation = -1
        self.given_up = False  # by the others: what this process has done does not count
        self.members = dict.fromkeys(range(founders), 0)

    def meet(self, done: int) -> int:
        """Leave the group, agree on the members, and form a new group. Every rank calls this.

        A process that is not on the list, because the others gave it up, comes back as a newcomer.

        Args:
            done: the steps that this process has done.

        Returns:
            The same, or NOTHING for a newcomer.

        Raises:
            Lost: somebody was lost while the group connected, or nobody lets this newcomer in.
            TooLate: all members that had the state have ended.
        """
        leave_group()
        while True:
            self.generation += 1
            self.members = self._agree(NOTHING if self.given_up else done)
            if self.me in self.members:
                break
            self.given_up = True
        self._call_the_roll()
        with communication():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"generation-{self.generation}", self.store),
                rank=list(self.members).index(self.me),
                world_size=len(self.members),
                timeout=min(self.timeout, CONNECTING),
            )
            group: Any = dist.group.WORLD
            group._get_backend(torch.device("cpu"))._set_default_timeout(self.timeout)
        if self.given_up:
            self.given_up, done = False, NOTHING
        return done

    def _call_the_roll(self) -> None:
        """Wait until all members are about to connect: a group that does cannot see who has ended.

        Raises:
            Lost: one of them has ended, or is silent.
        """
        ready, deadline = (
            f"{self.generation}/ready",
            time.monotonic() + self.timeout.total_seconds(),
        )
        self.store.set(f"{ready}/{self.me}", "")
        while not self.store.check([f"{ready}/{member}" for member in self.members]):
            ended = self.members.keys() - self._running(self.members)
            if ended or time.monotonic() > deadline:
                raise Lost(f"lost a member of {listed(list(self.members))} before they connected")
            time.sleep(0.002)

    def _agree(self, done: int) -> dict[int, int]:
        """Register for this generation, and wait until its members are decided."""
        decided, newcomer = f"{self.generation}/members", done == NOTHING
        self.store.set(f"{self.generation}/here/{self.me}", str(done))
        if newcomer:
            self.store.set(f"{self.generation}/knock", "")
        # A newcomer is let in after a step, which may have to be redone before.
        patience = self.timeout.total_seconds() * (3 if newcomer else 1)
        deadline = time.monotonic() + patience
        while not self.store.check([decided]):
            here, late = self._here(), time.monotonic() > deadline
            if late or not self._running(self.members.keys() - here.keys()):
                if not newcomer:
                    self.store.compare_set(decided, "", json.dumps(here))
                elif all(here.get(other) == NOTHING for other in self._running(self.members)):
                    raise TooLate
                elif late:
                    self.generation -= 1  # to knock at the same door again
                    raise Lost(f"lost touch: no member has let this one in for {patience:g} s")
            time.sleep(0.002)
        members = json.loads(self.store.get(decided))
        return {int(member): steps for member, steps in members.items()}

    def _here(self) -> dict[int, int]:
        """Who has registered for this generation, with the steps that each has done."""
        numbers = range(self.founders + self.store.add("newcomers", 0))
        keys = {number: f"{self.generation}/here/{number}" for number in numbers}
        there = {number: key for number, key in keys.items() if self.store.check([key])}
        return {number: int(self.store.get(key)) for number, key in there.items()}

    def _running(self, members: Collection[int]) -> list[int]:
        return [member for member in members if not self.store.check([f"ended/{member}"])]

    def somebody_knocks(self) -> bool:
        """Whether a newcomer waits for the next generation."""
        return self.store.check([f"{self.generation + 1}/knock"])

    def bring_up_to_date(self, state: Tensor) -> tuple[Tensor, int]:
        """Give all ranks the state of one that has done most steps. Every rank calls this.

        Members may differ by one step: one that was lost in the middle of a sum leaves some with
        it, and others without. They cannot by two, because all take part in a sum.

        Args:
            state: this rank's, [n]; on an error its content is undefined.

        Returns:
            The state to go on with, [n], and the steps that are done in it.

        Raises:
            Lost: somebody was lost meanwhile.
        """
        done = list(self.members.values())
        if min(done) < max(done):
            with communication():
                dist.broadcast(state, src=done.index(max(done)))
        return state, max(done)

    def note_seconds(self, seconds: float) -> None:
        """Keep what the way to this generation has cost, for `history`."""
        self.store.set(f"{self.generation}/seconds", str(seconds))

    def history(self) -> list[dict[str, Any]]:
        """The members of each generation, the steps done before it, and what the way to it cost.

        A step is what the last generation has made of it that began at this step or before.
        """
        found: list[dict[str, Any]] = []
        for number in range(self.generation + 1):
            members = json.loads(self.store.get(f"{number}/members"))
            found.append({"steps_done": max(members.values()), "members": [*map(int, members)]})
            if self.store.check([f"{number}/seconds"]):
                found[-1]["seconds"] = float(self.store.get(f"{number}/seconds"))
        return found


@contextmanager
def communication(computing: bool = False) -> Generator[None]:
    """Around calls that wait for other members, whose errors mean that one of them was lost.

    Args:
        computing: whether the body computes, too: then only the words of an error tell.

    Raises:
        Lost: the body met a RuntimeError, as those of the backends are.
    """
    try:
        yield
    except RuntimeError as error:
        if computing and not any(words in str(error) for words in LOST):
            raise
        raise Lost(str(error).splitlines()[0]) from error


def leave_group() -> None:
    """Close this process's connections, by which others that wait for it notice."""
    try:
        dist.destroy_process_group()
    except (AssertionError, ValueError):
        # It is in no group: at the start, or because the last one could not connect. Torch writes
        # the number of groups that a process has begun into their keys, and counts that one, too:
        # a newcomer would look for the others under another number.
        dist.distributed_c10d._world.group_count = 0
