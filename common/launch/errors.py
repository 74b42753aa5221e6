"""The ways in which a run ends early without an error of the program."""

import contextlib
import os

NOTES = "EXIT_NOTES"  # environment variable: a file to which processes append their exit codes
RETRY = 75  # EX_TEMPFAIL of sysexits.h: the cause lies elsewhere, starting again may help


class UserError(Exception):
    """A mistake of the user: one line that says what is wrong, where, and what to do about it.

    The program prints that line once, without a traceback, and every process ends with exit code 2.
    """


class Absent(UserError):  # noqa: N818 - named as what happened
    """A process of the job did not come in time.

    A mistake for a user who starts processes by hand; for a scheduler, worth another try.
    """


class Stopped(BaseException):
    """The run was asked to stop by a signal, and has saved what it needs to go on.

    Not an `Exception`, as `KeyboardInterrupt` is none: the handler of a signal may raise it in the
    middle of a library that turns any `Exception` into one of its own.

    Args:
        signum: the signal; the exit code is 128 + signum (143 for SIGTERM, 130 for Ctrl-C).
        where: what was saved, for the last line that the user sees.
    """

    def __init__(self, signum: int, where: str) -> None:
        super().__init__(where)
        self.signum = signum


class Lost(RuntimeError):  # noqa: N818 - named as what happened, as Stopped is
    """Another process of the job ended or fell silent; the message names it.

    The program prints it as one line and ends with exit code 1.
    """


def note(code: int, processes: int = 1, message: str = "", spoke: bool = False) -> None:
    """Leave this process's exit code and its reason to `docker/entrypoint.py`, if it runs the job.

    torchrun does not pass its workers' exit codes on, and its tracebacks hide their last line.

    Args:
        code: the exit code, or RETRY if this process ends because another one did.
        processes: of the job on this machine; one that is missing in the notes was killed.
        message: why; of a traceback, what is before it and its last line are kept.
        spoke: whether this process has just said so itself: then it need not be said again, but
            for torchrun's tracebacks below it.
    """
    with contextlib.suppress(KeyError, OSError):
        if spoke and "TORCHELASTIC_RUN_ID" not in os.environ:
            message = ""
        before, traceback, _ = message.partition("Traceback (most recent call last)")
        reason = before + message.splitlines()[-1] if traceback else message
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        line = " ".join(f"{attempt} {code} {processes} {reason}".split()) + "\n"
        descriptor = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
        os.close(descriptor)
