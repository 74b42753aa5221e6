"""Lines for the terminal from whichever process has something to say."""

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TextIO


def say(text: str, file: TextIO | None = None) -> bool:
    """Print on standard output, at once; if nobody reads any more, go on in silence.

    A training shall not end because its reader has seen enough (`| head`), its terminal has been
    closed, or the disk of its log is full.

    Args:
        text: one line or more, without the last newline. It is one write, so that lines of several
            processes do not mix.
        file: where, if not on standard output.

    Returns:
        Whether it could be written; after the first time that it could not, all goes nowhere.
    """
    file = file or sys.stdout
    try:
        print(f"{text}\n", end="", file=file, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # what is left to flush goes there
        return False
    return True


def to_terminal(message: str) -> None:
    """Print to standard error; on a terminal, over the progress bar, perhaps another process's."""
    say(f"\r\033[K{message}" if sys.stderr.isatty() else message, sys.stderr)


def complain(line: str) -> None:
    """Print an error."""
    to_terminal(f"error: {line}")


def warn(line: str) -> None:
    """Print a warning."""
    say(f"warning: {line}", sys.stderr)


def listed(ranks: Sequence[int]) -> str:
    """Ascending numbers of ranks in a line that a thousand of them do not flood: `0, 3-7, 9`."""
    parts = []
    for _, group in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts)
