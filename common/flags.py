"""Command-line flags: a frozen dataclass in, a checked instance out, without importing torch.

`--help` and typing errors answer in a fraction of a second because this happens before the seconds that
`import torch` takes; that is why the modules with options in them import torch inside their functions.
"""

import contextlib
import io
import math
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol, TypeVar

import tyro

from common.errors import UserError, note
from common.launcher import Launch, Place, cuda_devices, preload, resolve


class HasLaunch(Protocol):
    """Flags that include those of `Launch`."""

    @property
    def launch(self) -> Launch:
        """The flags about processes."""


Args = TypeVar("Args")
LaunchArgs = TypeVar("LaunchArgs", bound=HasLaunch)


def begin(cls: type[LaunchArgs], description: str | None, preload_also: Sequence[str] = ()) -> tuple[LaunchArgs, Place]:
    """Do everything that can be done before torch is imported: flags, place in the job, server for workers.

    Args:
        cls: the flags, with a field `launch`.
        description: the text above the flags in `--help`.
        preload_also: modules, besides those of every program, that take long to import and that all workers need.

    Raises:
        SystemExit: as `parse`.
    """
    # A stop while modules are imported needs no traceback. Not sys.exit: Python's compiler, among others, drops it.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: os._exit(128 + number))
    args = parse(cls, description=description)
    try:
        place = resolve(args.launch, os.environ, cuda_devices)
    except UserError as error:
        fail(error)
    preload(place, preload_also)
    return args, place


def leave(code: int) -> NoReturn:
    """End this process at once: taking the interpreter down frees a million objects one by one, which takes 2 s."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def parse(cls: type[Args], argv: Sequence[str] | None = None, description: str | None = None) -> Args:
    """Read the flags of `cls` (a frozen dataclass with a docstring under each field).

    Args:
        cls: the dataclass; a nested one adds its own flags without a prefix.
        argv: the words to read; by default those of the command line.
        description: the text above the flags in `--help`; by default the docstring of `cls`.

    Raises:
        SystemExit: code 2 with one line on standard error (from one process only, when a launcher started
            several), code 0 after `--help`.
    """
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(cls, args=argv, description=description, config=(tyro.conf.FlagCreatePairsOff,))
    except UserError as error:  # raised by the __post_init__ of the dataclasses
        fail(error)
    except SystemExit as stop:
        if stop.code != 0:
            fail(UserError(f"{one_line(captured.getvalue())} (--help lists the flags)"))
        raise


def at_least(least: int, **values: float | None) -> None:
    """Check flags (by their field names) against a lower bound; None, a default still to be chosen, passes.

    Not-a-number does not pass.

    Raises:
        UserError: a flag is below the bound.
    """
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value}: give at least {least}")


def share(**values: float) -> None:
    """Check flags (by their field names) that are shares: from 0 to below 1.

    Raises:
        UserError: a flag is no share.
    """
    for name, value in values.items():
        if not 0 <= value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: give a number from 0 to below 1")


def fail(error: UserError) -> NoReturn:
    """Print the error once for the whole job and end this process with exit code 2."""
    if may_speak(os.environ):
        print(f"error: {error}", file=sys.stderr, flush=True)
    note(2)
    raise SystemExit(2)


def may_speak(env: Mapping[str, str]) -> bool:
    """Whether this process is the one that reports, judged before any process group exists; in doubt, it is."""
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= env.keys()
    rank, size = (
        (env["RANK"], env["WORLD_SIZE"]) if launched else (env.get("SLURM_PROCID", ""), env.get("SLURM_NTASKS", ""))
    )
    return not (rank.isdigit() and size.isdigit() and 0 < int(rank) < int(size))


def one_line(box: str) -> str:
    """The message inside the box that tyro draws, up to its first ruler, as one line."""
    # On a terminal the box has colours.
    lines = [re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯]", "", line).strip() for line in box.splitlines()]
    text: list[str] = []
    for line in lines[1:]:
        if line.startswith("──"):
            break
        text.append(line)
    suggestion = re.search(r"Perhaps you meant:\s*(\S.*)", "\n".join(lines))
    hint = f"; perhaps you meant {suggestion[1].split(', ')[-1].split()[0]}" if suggestion else ""
    return " ".join(text).rstrip(".") + hint
