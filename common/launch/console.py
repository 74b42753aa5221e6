"""Lines for the terminal from whichever process has something to say."""

import sys
from collections.abc import Sequence
from itertools import groupby


def to_terminal(message: str) -> None:
    """Print to standard error; on a terminal, over the progress bar, perhaps another process's."""
    print(f"\r\033[K{message}" if sys.stderr.isatty() else message, file=sys.stderr, flush=True)


def complain(line: str) -> None:
    """Print an error."""
    to_terminal(f"error: {line}")


def warn(line: str) -> None:
    """Print a warning."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


def listed(ranks: Sequence[int]) -> str:
    """Ascending numbers of ranks in a line that a thousand of them do not flood: `0, 3-7, 9`."""
    parts = []
    for _, group in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts)
