"""The answers of all ranks, and what the process table says of those that give none. No torch."""

import json
import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.launch.errors import UserError
from common.launch.who.words import State

Member = dict[str, Any]
PATIENCE = 1.5  # seconds: on a busy machine, a rank that computes takes one
FILE = "ranks.json"  # in the run's folder, as long as the run goes on


@dataclass(frozen=True)
class Job:
    """The ranks of a job, and the word that they answer to."""

    ranks: list[Member]
    token: str

    @classmethod
    def of(cls, folder: Path) -> "Job":
        """The job whose `--out` is this folder.

        Raises:
            UserError: no run is in progress there, or one of another user.
        """
        try:
            return cls(**json.loads((folder / FILE).read_text()))
        except PermissionError:
            raise UserError(
                f"{folder / FILE} belongs to another user: ask as that user, or, of a run in a "
                f"container, in that container"
            ) from None
        except (OSError, ValueError, TypeError):
            raise UserError(
                f"{folder}: no run is in progress there ({FILE} is missing): give a run's --out; "
                f"one that is still starting has it in some seconds"
            ) from None

    def asked(self, folder: Path, how_often: str) -> str:
        """The line with which a program begins: what it reads, whom it asks, how often."""
        ranks = f"{len(self.ranks)} rank{'s' if len(self.ranks) > 1 else ''}"
        return f"asking the {ranks} of {folder / FILE}, {how_often} ..."

    def everybody(self) -> list[State]:
        """What each rank says of itself, in rank order."""
        return everybody(self.ranks, self.token)


def everybody(roll: list[Member], token: str, patience: float = PATIENCE) -> list[State]:
    """What each rank says of itself, in rank order.

    A rank that does not answer within `patience` seconds is described by `silent`: "stopped",
    "gone", "busy" or "no answer".
    """
    answers: dict[int, State] = {}
    families = {6 if ":" in member["address"][0] else 4 for member in roll}
    asking = socket.socket(
        socket.AF_INET6 if families == {6} else socket.AF_INET, socket.SOCK_DGRAM
    )
    deadline, asked = time.monotonic() + patience, 0.0
    with asking:
        while time.monotonic() < deadline:
            left = [
                rank
                for rank, member in enumerate(roll)
                if rank not in answers and not _cannot(member)
            ]
            if not left:
                break
            if time.monotonic() - asked > patience / 2:  # a datagram may be lost
                asked = time.monotonic()
                for rank in left:
                    _send(asking, token, tuple(roll[rank]["address"]))
            if select.select([asking], [], [], 0.02)[0]:
                try:
                    state = json.loads(asking.recvfrom(1 << 16)[0])
                    answers[state["rank"]] = state
                except (OSError, ValueError, TypeError, KeyError):
                    continue  # nobody listens there any more, or a stranger answers
    return [answers.get(rank) or _described(rank, member) for rank, member in enumerate(roll)]


def _send(asking: socket.socket, token: str, address: Any) -> None:
    try:
        asking.sendto(token.encode(), address)
    except OSError:
        return


def here() -> str:
    """A name for this machine's, or container's, process table."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(
            Path("/proc/self/ns/pid").readlink()
        )
    except OSError:
        return socket.gethostname()


def began(pid: int | str = "self") -> str:
    """When a process began, in ticks: another one may get its number later. "" if it is gone."""
    return _stat(pid)[19] if _stat(pid) else ""


def _stat(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cannot(member: Member) -> str:
    """Why a process of this machine cannot answer, or "" if it can, or is of another machine."""
    if member["table"] != here():
        return ""
    fields = _stat(member["pid"])
    if not fields or fields[0] in "ZX" or fields[19] != member["began"]:
        return "gone"
    return "stopped" if fields[0] in "Tt" else ""


def _described(rank: int, member: Member) -> State:
    why = _cannot(member)
    if not why and member["table"] == here():
        before = _seconds(member["pid"])
        time.sleep(0.1)
        why = "busy" if _seconds(member["pid"]) > before else ""
    return {
        "rank": rank,
        "node": member["node"],
        "pid": member["pid"],
        "silent": why or "no answer",
        "calls": [],
        "where": [],
    }


def _seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
