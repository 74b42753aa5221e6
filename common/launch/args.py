"""The front door: flags in, a place in the job out, and only then torch.

`--help` and typing errors answer in a fraction of a second because torch, which takes seconds to
import, is not imported here.
"""

import ast
import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

import tyro

from common.launch.config import config_file, config_words, save_config
from common.launch.console import say
from common.launch.early import announce, check_copy, judge, sleep_while_waiting, source
from common.launch.errors import UserError, note
from common.launch.flags import Launch
from common.launch.resolve import resolve
from common.launch.usage import help_text, one_line, wrong_value

STOPPING = (signal.SIGINT, signal.SIGTERM)
# DistributedDataParallel imports torch._dynamo, another second, when it wraps a model.
PRELOADED = (
    "common.launch.server",
    "common.launch.record",
    "common.train.run",
    "common.data.idx",
    "torch._dynamo",
)


class HasLaunch(Protocol):
    """Flags that include those of `Launch`."""

    @property
    def launch(self) -> Launch:
        """The flags about processes."""


Args = TypeVar("Args")


def start(
    cls: type[HasLaunch], target: str, preload: Sequence[str] = (), survive: str = ""
) -> NoReturn:
    """Run a program: read its flags, decide the place, call `target(place, args)`, and exit.

    Args:
        cls: the flags, with a field `launch`.
        target: `package.module:function`. The module's docstring describes the program in
            `--help`; it is imported after the flags have been checked.
        preload: modules, besides those of every program, that take long to import and that all
            spawned workers need.
        survive: what to call instead if the flag of this name is given.

    Raises:
        SystemExit: as `parse`.
    """
    outcome = {"code": 1}
    atexit.register(_leave, outcome)  # the first that is registered runs last
    # Importing torch and scikit-learn makes a million objects and no garbage: looking for it
    # costs 0.7 of 3 seconds.
    gc.set_threshold(100_000, 50, 50)
    # A stop during imports needs no traceback. Not sys.exit: Python's compiler drops it.
    for signum in STOPPING:
        signal.signal(signum, _stop_at_once)
    try:
        _run(cls, target, survive or target, preload)
        outcome["code"] = 0
    except SystemExit as stop:
        outcome["code"] = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    sys.exit(outcome["code"])


def _stop_at_once(signum: int, _: FrameType | None) -> None:
    if may_speak(os.environ):  # not print: the signal may have come in the middle of one
        line = f"stopped by {signal.Signals(signum).name}: outside of training, nothing to save\n"
        os.write(2, line.encode())
    os._exit(128 + signum)


def _leave(outcome: dict[str, int]) -> None:
    """End this process now that all else is done.

    Taking the interpreter down frees a million objects one by one, which takes 2 s.
    """
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(outcome["code"])


def _run(cls: type[HasLaunch], usual: str, survive: str, preload: Sequence[str]) -> None:
    module, name = usual.split(":")
    command = f"python -m {re.sub(r'[.](train|preflight)$', '', module)}"  # what starts it
    args: Any = parse(cls, description=_docstring(module), command=command)
    if getattr(args, "survive", False):
        module, name = survive.split(":")
    try:
        check_copy(module)
        place = resolve(args.launch, os.environ, _cuda_devices)
        judge(args, place)
        if place.rank == 0 and getattr(args, "watch", None) and args.watch.save_config:
            save_config(args, args.watch.save_config)
    except UserError as error:
        fail(error)
    if hasattr(args, "epochs"):
        announce(place)
        sleep_while_waiting(place)
    if not place.launched:
        # `python -m examples.NAME.train`: workers run their main module again, and say so if it
        # has been imported before.
        main = sys.modules["__main__"].__spec__
        target = [] if main is not None and main.name == module else [module]
        _start_fork_server([*PRELOADED, *target, *preload])
    # By name: a function of `__main__` could not be found by the processes that it spawns.
    function = getattr(importlib.import_module(module), name)
    spawn = importlib.import_module("common.launch.spawn")  # with torch, so not on top
    with spawn.hosted(place) as here:
        function(here, args)


def _docstring(module: str) -> str | None:
    """The docstring of a module that is not imported yet."""
    return ast.get_docstring(ast.parse(source(module).read_text()))


def _cuda_devices() -> int:
    """The CUDA devices of this machine."""
    say("looking for CUDA devices ...", sys.stderr)
    import torch  # seconds, which only --multiprocessing-distributed and PET_* have to pay here

    return torch.cuda.device_count()


def _start_fork_server(modules: list[str]) -> None:
    """Start the server from which workers are forked; it imports torch while this process does.

    Costs one process; saves every worker the seconds of `import torch`. Importing does not
    initialise CUDA, so workers may use it; a fork after its initialisation could not.
    """
    multiprocessing.set_forkserver_preload(modules)
    resource_tracker.ensure_running()  # here, because it opens the signal mask
    # Ctrl-C, `timeout` and SLURM signal all processes: this one and the ranks react, the server
    # is needed to the end.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def parse(
    cls: type[Args],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    command: str | None = None,
) -> Args:
    """Read the flags of `cls` (a frozen dataclass with a docstring under each field).

    Args:
        cls: the dataclass; a nested one adds its own flags without a prefix.
        argv: the words to read; by default those of the command line.
        description: the text above the flags in `--help`; by default the docstring of `cls`.
        command: what the user types before the flags; by default the path of the program.

    Raises:
        SystemExit: code 2 with one line on standard error (from one process only, when a launcher
            started several), code 0 after `-h` or `--help`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = command or f"python -m {getattr(sys.modules['__main__'].__spec__, 'name', '...')}"
    try:
        file, default = config_file(words) if hasattr(cls, "watch") else None, None
        if file:
            default = _read(cls, config_words(cls, file), f"--config {file}: ")
        if {"-h", "--help"} & set(words):
            brief = "--help" not in words
            text = help_text(cls, command, description or cls.__doc__ or "", default, brief)
            say(text.rstrip("\n"))
            raise SystemExit(0)
        return _read(cls, words, default=default)
    except UserError as error:
        fail(error)


def _read(cls: type[Args], words: Sequence[str], where: str = "", default: Any = None) -> Args:
    """The flags that words come to.

    Args:
        cls: the dataclass.
        words: as typed.
        where: they stand, for the error.
        default: an instance with the values that are taken where a flag is not given.

    Raises:
        UserError: a flag or its value is wrong.
    """
    captured = io.StringIO()
    given = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(cls, args=words, config=(tyro.conf.FlagCreatePairsOff,), **given)
    except UserError as error:  # raised by the __post_init__ of the dataclasses
        raise UserError(f"{where}{error}") from None
    except SystemExit as stop:
        if stop.code == 0:  # it has printed a shell's completion
            raise
        mistake = wrong_value(cls, words) or one_line(captured.getvalue())
        raise UserError(f"{where}{mistake} (--help lists the flags)") from None


def fail(error: UserError, patience: float = 10) -> NoReturn:
    """Print the error once for the whole job and end this process with exit code 2.

    torchrun ends all processes as soon as one has ended: the silent ones therefore wait until it
    ends them, at most `patience` seconds, so that rank 0, which may be later, comes to print it.
    """
    if spoke := may_speak(os.environ):
        say(f"error: {error}", sys.stderr)
    note(2, message=f"error: {error}", spoke=spoke)
    if not spoke and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(patience)
    raise SystemExit(2)


def may_speak(env: Mapping[str, str]) -> bool:
    """Whether this process reports, judged before any process group exists; in doubt, it does."""
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= env.keys()
    names = ("RANK", "WORLD_SIZE") if launched else ("SLURM_PROCID", "SLURM_NTASKS")
    rank, size = (env.get(name, "") for name in names)
    return not (rank.isdigit() and size.isdigit() and 0 < int(rank) < int(size))
