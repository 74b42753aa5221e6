"""The first process of a container: passes signals on, ends what is stuck, says by its exit code what has happened.

    python -m common.entrypoint -- torchrun -m examples.imagenet_ddp.train --resume auto
    python -m common.entrypoint -- --epochs 1      # flags only: for the program that the image names in PROGRAM

Only the standard library is imported: this process takes 10 MB beside the training.

torchrun ends with 1 whatever its workers' exit codes, and so says nothing to a scheduler that must decide whether to
start again. So the processes of this project leave their codes in a file in memory (`common.errors.note`), and this
process ends with what the first of them says:

| code | meaning | a scheduler should |
|---|---|---|
| 0 | done | |
| 2 | a mistake of the user | give up: the same will happen again |
| 75 | another process of the job was lost, or never came | start again; the cause is counted elsewhere |
| 128 + n | stopped by signal n, after a checkpoint | start again |
| 137 | the kernel ended a process, for memory where a line says so | start again a few times |
| 1 | anything else | start again a few times |
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from common.errors import NOTES, RETRY

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MEMORY_EVENTS = ("memory.events", "memory/memory.oom_control")  # of control groups, version 2 and 1


@dataclass(frozen=True)
class Process:
    """A line of the process table."""

    pid: int
    parent: int
    state: str
    """R, S, D, ... as in proc(5); Z is a process that has ended and that its parent has not asked about."""


def main(argv: list[str], env: Mapping[str, str]) -> int:
    """Run a command to its end.

    Returns:
        The exit code, as in the table above.
    """
    flags = argparse.ArgumentParser(prog="python -m common.entrypoint", description=__doc__.partition("\n")[0])
    flags.add_argument("--grace", type=float, default=110, help="seconds to save after a signal (default: 110)")
    flags.add_argument("--stuck", type=float, default=60, help="seconds after which a supervisor that does not "
                       "notice the end of its worker is ended itself (default: 60)")  # fmt: skip
    flags.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND, or -- FLAGS of the image's program")
    args = flags.parse_args(argv)
    command = args.command[args.command[:1] == ["--"] :]
    if not command or command[0].startswith("-"):
        if "PROGRAM" not in env:
            return _complain("no command: give one after --", 2)
        command = [sys.executable, "-m", env["PROGRAM"], *command]
    return Supervisor(command, env, args.grace, args.stuck).run()


class Supervisor:
    """Runs one command, and knows all processes that come from it.

    Args:
        command: the program and its arguments.
        env: its environment.
        grace: seconds between a signal and the end.
        stuck: seconds that a process may leave the end of its worker unnoticed.
    """

    def __init__(self, command: list[str], env: Mapping[str, str], grace: float, stuck: float) -> None:
        self.command = command
        self.grace = grace
        self.stuck = stuck
        self.notes = os.memfd_create("exit codes")  # no file system has to be writable
        self.env = {name: value for name, value in env.items() if name != "PROGRAM"} | {
            NOTES: f"/proc/{os.getpid()}/fd/{self.notes}"
        }
        self.asked: list[int] = []  # signals, in the order in which they came
        self.sent = 0  # how many of them the command has got
        self.deadline = float("inf")
        self.unnoticed_since = float("inf")  # when all workers had ended, and the command went on
        self.killed_for_memory = oom_kills()
        self.child = 0
        self.started = time.monotonic()
        self.had_workers = False

    def run(self) -> int:
        """Start the command and wait until nothing is left of it."""
        become_reaper()
        previous = {signum: signal.signal(signum, self._pass_on) for signum in PASSED_ON}
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # it ends a pause
        self.woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        try:
            try:
                # A group of its own: Ctrl-C reaches it once, through us.
                process = subprocess.Popen(self.command, env=self.env, process_group=0)
            except OSError as error:
                return _complain(f"{self.command[0]} cannot be started ({error.strerror})", 2)
            self.child = process.pid
            self._send()  # what came while it was being started
            code = None
            while code is None:
                code = self._reap()
                if code is None and self._must_end():
                    self._kill_all()
                    code = self._reap(wait=True)
                if code is None:
                    self._pause(min(1, self.stuck / 5, max(0.01, self.deadline - time.monotonic())))
            process.returncode = code  # we have waited for it ourselves
            noted = self._noted()  # by those who ended before it: the others are told to stop now
            self._end_rest()
            return self._meaning(code, noted)
        finally:
            signal.set_wakeup_fd(-1)
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            for descriptor in (self.notes, self.woken, waker):
                os.close(descriptor)

    def _pause(self, seconds: float) -> None:
        """Sleep until a signal comes, of a process that has ended or of somebody who wants us to stop."""
        if select.select([self.woken], [], [], seconds)[0]:
            os.read(self.woken, 4096)

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        self.asked.append(signum)
        self.deadline = min(self.deadline, time.monotonic() + self.grace)
        if self.child:
            self._send()

    def _send(self) -> None:
        """Send the command each signal once: a second one would tell it not to wait for a checkpoint."""
        while self.sent < len(self.asked):
            self.sent += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, self.asked[self.sent - 1])

    def _reap(self, wait: bool = False) -> int | None:
        """Ask about all processes that ended, also the orphans that came to us; the command's code when it is there."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == self.child:
                return os.waitstatus_to_exitcode(status)
            if pid == 0:
                return None

    def _must_end(self) -> bool:
        """Whether time is up, or a supervisor below us does not notice the end of its worker."""
        now = time.monotonic()
        below = [process for process in descendants() if process.pid != self.child]
        self.had_workers |= bool(below)
        if now > self.deadline:
            _complain(f"not ended within {self.grace:g} s after {signal.Signals(self.asked[0]).name}: killed")
            return True
        if not os.fstat(self.notes).st_size:
            return False
        if {process.state for process in below} != {"Z"}:
            self.unnoticed_since = float("inf")
            return False
        self.unnoticed_since = min(self.unnoticed_since, now)
        if now - self.unnoticed_since > self.stuck:
            _complain(f"all workers ended {self.stuck:g} s ago and {self.command[0]} has not noticed: killed")
            return True
        return False

    def _noted(self) -> int | None:
        return first_note(Path(f"/proc/self/fd/{self.notes}").read_text(), bool(self.asked))

    def _end_rest(self, patience: float = 5) -> None:
        """End what the command has left behind, such as the workers of a torchrun that was killed."""
        for process in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + patience
        while descendants():
            if time.monotonic() > deadline:
                self._kill_all()
            self._reap()
            self._pause(0.1)

    def _kill_all(self) -> None:
        for process in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def _meaning(self, code: int, noted: int | None) -> int:
        """The exit code of the container, from that of the command and from what its processes noted."""
        if code == 0:
            return 0
        for_memory = oom_kills() - self.killed_for_memory
        if for_memory > 0:
            return _complain(f"the kernel ended {for_memory} process(es): the memory limit of the container was "
                             f"reached; give it more, or use a smaller batch", 137)  # fmt: skip
        if noted is not None:
            return noted
        if self.asked:  # torchrun says 1
            return 128 + self.asked[0]
        waited = time.monotonic() - self.started
        if Path(self.command[0]).name == "torchrun" and not self.had_workers and waited > self.stuck:
            return _complain(
                f"torchrun gave up after {waited:.0f} s without starting a worker: not all nodes came", RETRY
            )
        return code if code > 0 else 128 - code


def first_note(notes: str, asked: bool) -> int | None:
    """What the first process noted that ended in the last attempt of torchrun: the others followed from it.

    Args:
        notes: lines of attempt, exit code, and processes of the job on this machine.
        asked: whether this machine was told to stop.

    Returns:
        None where nothing is noted, and where processes only followed another one of this machine: one that is
        killed can leave no note, and torchrun then stops the others.
    """
    found = [tuple(map(int, line.split())) for line in notes.splitlines()]
    last = max((attempt for attempt, _, _ in found), default=0)
    codes = [code for attempt, code, _ in found if attempt == last]
    killed = any(attempt == last and processes > len(codes) for attempt, _, processes in found)
    if not codes or (killed and (codes[0] == RETRY or (codes[0] > 128 and not asked))):
        return None
    return codes[0]


def become_reaper() -> None:
    """Let orphans come to this process, which only the first process of a container gets by itself (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def descendants() -> list[Process]:
    """All processes that come from this one."""
    table = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # the name, in brackets, may hold anything
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            table[int(file.parent.name)] = Process(int(file.parent.name), int(parent), state)
    family = {os.getpid()}
    while True:
        more = {p.pid for p in table.values() if p.parent in family} - family
        if not more:
            return [table[pid] for pid in family - {os.getpid()}]
        family |= more


def oom_kills() -> int:
    """How often the kernel has ended a process of this container for memory."""
    for name in MEMORY_EVENTS:
        with contextlib.suppress(OSError, ValueError, KeyError):
            words = dict(line.split() for line in (Path("/sys/fs/cgroup") / name).read_text().splitlines())
            return int(words["oom_kill"])
    return 0


def _complain(line: str, code: int = 1) -> int:
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
