"""Lines for the terminal from whichever process has something to say."""

import sys


def to_terminal(message: str) -> None:
    """Print to standard error; on a terminal, over the progress bar, perhaps another process's."""
    print(f"\r\033[K{message}" if sys.stderr.isatty() else message, file=sys.stderr, flush=True)


def complain(line: str) -> None:
    """Print an error."""
    to_terminal(f"error: {line}")


def warn(line: str) -> None:
    """Print a warning."""
    print(f"warning: {line}", file=sys.stderr, flush=True)
