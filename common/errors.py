"""The ways in which a run ends early without an error of the program."""


class UserError(Exception):
    """A mistake of the user: one line that says what is wrong, where, and what to do about it.

    The program prints that line once, without a traceback, and every process ends with exit code 2.
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
    """Another process of the job ended or fell silent; the message names it. Printed as one line, exit code 1."""
