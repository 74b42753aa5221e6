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


class Stopped(Exception):  # noqa: N818 - not an error: the run was asked to stop, and did
    """The run was asked to stop by a signal, and has saved what it needs to go on.

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


def note(code: int, processes: int = 1) -> None:
    """Leave this process's exit code to `docker/entrypoint.py`, if that has started the job.

    torchrun does not pass its workers' exit codes on.

    Args:
        code: the exit code, or RETRY if this process ends because another one did.
        processes: of the job on this machine; one that is missing in the notes was killed.
    """
    with contextlib.suppress(KeyError, OSError):
        line = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {code} {processes}\n"
        descriptor = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
        os.close(descriptor)
