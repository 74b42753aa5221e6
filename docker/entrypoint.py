"""A container's first process: passes signals on, ends what hangs, exits with a code that says why.

    python docker/entrypoint.py -- torchrun -m examples.imagenet_ddp --resume auto
    python docker/entrypoint.py -- --epochs 1      # flags only: for the program named by PROGRAM

It imports the standard library only: this process takes 10 MB beside the training.

torchrun exits with 1 whatever its workers exited with, so a scheduler that has to decide whether to
start again learns nothing from it. The processes of this project therefore append their codes to a
file in memory (`note` in common/launch/errors.py), and this process exits with the first of them:

| code | meaning | a scheduler should |
|---|---|---|
| 0 | done | |
| 2 | a mistake of the user | give up: the same will happen again |
| 75 | another process of the job was lost, or never came | start again; it counts elsewhere |
| 128 + n | stopped by signal n, after a checkpoint | start again |
| 137 | a process was killed; the last line says whether memory ran out | start again a few times |
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
import threading
import time
from collections.abc import Mapping
from pathlib import Path

Env = Mapping[str, str]
NOTES, RETRY = "EXIT_NOTES", 75  # as in common/launch/errors.py; a test compares them
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AWAITED = (*PASSED_ON, signal.SIGCHLD)
KILLED = 128 + signal.SIGKILL
OTHERWISE = "the reason is above torchrun's tracebacks, or in the log of another node"
NOT_FOR_MEMORY = "the container's memory limit was not reached as far as its control group counts: see the node's log"
MEMORY_EVENTS = ("memory.events", "memory/memory.oom_control")  # of control groups 2 and 1


def main(argv: list[str], env: Env) -> int:
    """Run a command to its end, and return an exit code of the table above."""
    flags = argparse.ArgumentParser("entrypoint.py", description=__doc__.split("\n")[0])
    flags.add_argument("--grace", type=float, default=110, help="seconds to save (default: 110)")
    stuck = "seconds a command may ignore its workers' end (default: 60)"
    flags.add_argument("--stuck", type=float, default=60, help=stuck)
    flags.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND, or -- FLAGS")
    args = flags.parse_args(argv)
    words = args.command[args.command[:1] == ["--"] :]
    own = bool(words) and not words[0].startswith("-")
    if not own:
        if "PROGRAM" not in env:
            return _complain("no command: give one after --", 2)
        program, *defaults = env["PROGRAM"].split()
        if any(word.split("=")[0] == "--gpu" for word in words):  # one process, on that device
            defaults = []
        words = [sys.executable, "-m", program, *defaults, *words]
    return Supervisor(words, env, args.grace, args.stuck).run(foreground=own)


class Supervisor:
    """Runs one command and knows all processes that descend from it.

    Args:
        command: the program and its arguments, for the environment `env`.
        grace: seconds between a signal and the end.
        stuck: seconds that a process may ignore the end of its workers.
    """

    def __init__(self, command: list[str], env: Env, grace: float, stuck: float) -> None:
        self.command, self.grace, self.stuck = command, grace, stuck
        self.notes = os.memfd_create("exit codes")  # no file system has to be writable
        self.env = {name: value for name, value in env.items() if name != "PROGRAM"}
        self.env[NOTES] = f"/proc/{os.getpid()}/fd/{self.notes}"
        self.asked: list[int] = []  # signals, in the order in which they came
        self.deadline = float("inf")
        self.ignored_since = float("inf")  # when all workers had ended, and the command went on
        self.oom_kills = oom_kills()
        self.started = time.monotonic()
        self.had_workers = False
        self.torchrun = "torch.distributed.run" in command or command[0].endswith("torchrun")
        self.workers = Workers()

    def run(self, foreground: bool) -> int:
        """Start the command and wait until nothing is left of it.

        Args:
            foreground: whether it may read from the terminal, if there is one: a shell, a debugger.
        """

        def prepare() -> None:
            if foreground:
                take_terminal()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        become_reaper()
        # Blocked signals queue up until `_pause` takes them, whatever was done with them before.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
        for signum in AWAITED:
            signal.signal(signum, signal.SIG_DFL)
        try:
            process = subprocess.Popen(
                self.command,
                env=self.env,
                process_group=0,  # Ctrl-C reaches it once: through us, or from its own terminal
                preexec_fn=prepare,
            )
        except OSError as error:
            return _complain(f"{self.command[0]} cannot be started ({error.strerror})", 2)
        self.child = process.pid
        while (code := self._reap(os.WNOHANG)) is None:
            if self._must_end():
                signal_all(signal.SIGKILL)
                code = self._reap(0)
                break
            self._pause(min(1, self.stuck / 5, max(0.01, self.deadline - time.monotonic())))
        assert code is not None, "we waited for it"
        process.returncode = code  # so that Popen does not
        notes = Path(f"/proc/self/fd/{self.notes}").read_text()  # before the rest is told to stop
        self._end_rest()
        return self._meaning(code, notes)

    def _pause(self, seconds: float) -> None:
        """Wait until a process ends or a signal comes, which is passed on."""
        received = signal.sigtimedwait(AWAITED, seconds)
        if received and received.si_signo in PASSED_ON:
            self.asked.append(received.si_signo)  # each once: a second one would mean not to save
            self.deadline = min(self.deadline, time.monotonic() + self.grace)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, received.si_signo)

    def _reap(self, options: int) -> int | None:
        """Collect all processes that ended, orphans too; the command's exit code if it is one."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, options))[0]:
                if ended[0] == self.child:
                    return os.waitstatus_to_exitcode(ended[1])
        return None

    def _must_end(self) -> bool:
        """Whether time is up, or the command ignores the end of its workers."""
        now = time.monotonic()
        family = descendants()
        states = [state for pid, (state, _) in family.items() if pid != self.child]
        if self.torchrun:
            self.workers.watch({pid for pid, (_, parent) in family.items() if parent == self.child})
        self.had_workers |= bool(states)
        if now > self.deadline:
            name = signal.Signals(self.asked[0]).name
            _complain(f"not ended within {self.grace:g} s after {name}: killed")
            return True
        if not os.fstat(self.notes).st_size:
            return False
        self.ignored_since = min(self.ignored_since, now) if set(states) == {"Z"} else float("inf")
        if now - self.ignored_since > self.stuck:
            ended = f"all workers ended {self.stuck:g} s ago"
            _complain(f"{ended} and {self.command[0]} has not noticed: killed")
            return True
        return False

    def _end_rest(self, patience: float = 5) -> None:
        """End what the command left behind, such as the workers of a torchrun that was killed."""
        signal_all(signal.SIGTERM)
        deadline = time.monotonic() + patience
        while descendants():
            if time.monotonic() > deadline:
                signal_all(signal.SIGKILL)
            self._reap(os.WNOHANG)
            self._pause(0.1)

    def _meaning(self, code: int, notes: str) -> int:
        """The container's exit code, from the command's and from what its processes noted."""
        if code == 0:
            return 0
        if for_memory := max(0, oom_kills() - self.oom_kills):
            what = "the memory limit of the container was reached; give it more, or a smaller batch"
            return _complain(f"the kernel ended {for_memory} process(es): {what}", 137)
        end = self.workers.first_end()
        noted = first_note(notes, bool(self.asked), None if end is None else end == -signal.SIGKILL)
        if noted is None and self.asked:  # torchrun says 1
            noted = 128 + self.asked[0]
        if noted == KILLED or (noted is None and -signal.SIGKILL in (code, end)):
            return _complain(f"a process of this node was ended by SIGKILL; {NOT_FOR_MEMORY}", KILLED)
        if noted is None and self.torchrun and notes and end is None:  # it was not seen
            how = "ended without a word: it was killed, or it crashed and has printed why"
            return _complain(f"a process of this node {how}; {NOT_FOR_MEMORY}", KILLED)
        if noted is None and end is not None and end < 0:
            crash = f"was ended by {signal.Signals(-end).name}: see what it printed"
            return _complain(f"a process of this node {crash}", code if code > 0 else 128 - code)
        if noted is None:
            waited = time.monotonic() - self.started
            if self.torchrun and not self.had_workers and waited > self.stuck:
                no_worker = f"after {waited:.0f} s without starting a worker: not all nodes came"
                return _complain(f"torchrun gave up {no_worker}", RETRY)
            noted = code if code > 0 else 128 - code
        if reason := last_words(notes, noted, self.torchrun):
            print(reason, file=sys.stderr, flush=True)
        return noted


def take_terminal() -> None:
    """Make this process's group the one that its terminal listens to: another is stopped when it reads."""
    with contextlib.suppress(OSError):  # there is no terminal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # what a group in the background gets for this
        os.tcsetpgrp(0, os.getpid())


class Workers:
    """Sees how the workers of torchrun end, which is not their parent's to tell: it says 1.

    A process that has ended keeps its exit code until its parent asks for it, which torchrun does
    within 0.1 s. A thread that sleeps until then reads it in /proc. On a busy machine it may come
    too late; then the end is unknown.
    """

    def __init__(self) -> None:
        self.seen, self.alive = set[int](), dict[int, int]()  # numbers; numbers by descriptor
        self.ends: list[int | None] = []  # in their order: exit codes, -n for signal n
        self.events = select.epoll()

    def watch(self, pids: set[int]) -> None:
        """Look at these processes, too."""
        new = pids - self.seen
        if new and not self.seen:  # now that signals are blocked, which the thread inherits
            threading.Thread(target=self._watch, daemon=True).start()
        if new and not self.alive:
            self.ends.clear()  # another attempt
        for pid in new:
            self.seen.add(pid)
            with contextlib.suppress(OSError):  # it is gone, or the system has no such descriptors
                descriptor = os.pidfd_open(pid)
                self.alive[descriptor] = pid
                self.events.register(descriptor, select.EPOLLIN)

    def first_end(self) -> int | None:
        """How the first worker ended that did not end well; None if that was not seen."""
        return next((end for end in list(self.ends) if end != 0), None)

    def _watch(self) -> None:
        while True:
            for descriptor, _ in self.events.poll():
                end = None
                with contextlib.suppress(OSError):
                    status = Path(f"/proc/{self.alive[descriptor]}/stat").read_text().split()[-1]
                    end = os.waitstatus_to_exitcode(int(status))
                self.ends.append(end)
                self.events.unregister(descriptor)
                os.close(descriptor)
                del self.alive[descriptor]


def first_note(notes: str, asked: bool, killed: bool | None = None) -> int | None:
    """What the first process to end in torchrun's last attempt noted; the others followed it.

    Args:
        notes: lines of attempt, exit code, processes of the job on this machine, perhaps a reason.
        asked: whether this machine was told to stop.
        killed: whether the first worker to end was killed; if unknown, the notes are counted.

    Returns:
        None if nothing is noted, or if all only followed another process of this machine: one that
        is killed leaves no note, and torchrun then stops the others.
    """
    found = [tuple(map(int, line.split()[:3])) for line in notes.splitlines()]
    last = max((attempt for attempt, _, _ in found), default=0)
    codes = [code for attempt, code, _ in found if attempt == last]
    if KILLED in codes and not asked:  # by the program that has spawned the killed one
        return KILLED
    if killed is None:
        killed = any(attempt == last and processes > len(codes) for attempt, _, processes in found)
    if not codes or (killed and (codes[0] == RETRY or (codes[0] > 128 and not asked))):
        return None
    return codes[0]


def last_words(notes: str, code: int, torchrun: bool) -> str:
    """The reason of the end; empty if a process has said it, and no traceback of torchrun's below.

    A process leaves a text behind its exit code unless it has said it.
    """
    noted = [line.split(maxsplit=3)[1:] for line in notes.splitlines()]
    texts = ["".join(text) for number, _, *text in noted if int(number) == code]
    if not torchrun:
        return texts[-1] if all(texts) and texts else ""
    return next(filter(None, reversed(texts)), f"exit code {code}: {OTHERWISE}")


def become_reaper() -> None:
    """Become the parent of orphans, as a container's first process is by itself (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def descendants() -> dict[int, tuple[str, int]]:
    """State and parent of all processes that descend from this one, by their numbers.

    R, S, D, ... as in proc(5); Z has ended, and its parent has not asked for the exit code.
    """
    states, parents = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in brackets, may hold anything.
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            states[int(file.parent.name)], parents[int(file.parent.name)] = state, int(parent)
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {pid: (states[pid], parents[pid]) for pid in family - {os.getpid()}}


def signal_all(signum: int) -> None:
    """Send a signal to all descendants."""
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def oom_kills() -> int:
    """How often the kernel has ended a process of this container because memory ran out."""
    for name in MEMORY_EVENTS:
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = (Path("/sys/fs/cgroup") / name).read_text()
            return int(dict(line.split() for line in text.splitlines())["oom_kill"])
    return 0


def _complain(line: str, code: int = 1) -> int:
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
