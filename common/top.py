"""A live table of a run's ranks: `python -m common.top runs/NAME`.

| column | meaning |
|---|---|
| loss | mean of the losses that the ranks averaged last |
| samples/s | of the whole job, since the line before |
| waiting | share of the time in which this rank waited for its data, since the line before |
| memory | of the process; `peak` is that of its CUDA device |
"""

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from common.launch.args import fail, parse
from common.launch.console import say
from common.launch.errors import UserError
from common.launch.flags import at_least
from common.launch.who import ask
from common.launch.who.table import columns
from common.launch.who.words import State, doing, size

HEAD = ("rank", "node", "step", "loss", "samples/s", "waiting", "memory", "peak", "does")


@dataclass(frozen=True)
class Args:
    """Show step, loss, speed, waiting and memory of each rank of a run, until it ends."""

    folder: Annotated[Path, Positional, arg(metavar="DIR")]
    """The run's --out."""
    every: Annotated[float, arg(metavar="SECONDS")] = 1.0
    """Seconds between two tables."""
    times: Annotated[int, arg(metavar="N")] = 0
    """End after so many tables (0: when the run ends)."""

    def __post_init__(self) -> None:
        at_least(0, every=self.every, times=self.times)


def main() -> None:
    """Ask and print, again and again, until the run ends or the user presses Ctrl-C."""
    args = parse(Args, command="python -m common.top")
    try:
        job = ask.Job.of(args.folder)
        read = say(job.asked(args.folder, f"every {args.every:g} s"))
        _show(args, job, read)
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def _show(args: Args, job: ask.Job, read: bool) -> None:
    before, shown = job.everybody(), 0
    while read and (args.times == 0 or shown < args.times):
        time.sleep(args.every)
        now = _now(args.folder)
        if now is not None and now.token != job.token:  # torchrun has started other processes
            job, before = now, now.everybody()
        states = job.everybody()
        if now is None or all(state.get("silent") == "gone" for state in states):
            say("all ranks have ended")
            return
        home = "\033[H\033[2J" if sys.stdout.isatty() else ""
        read = say(f"{home}{live(states, before)}")
        before, shown = states, shown + 1


def _now(folder: Path) -> ask.Job | None:
    """The job of the folder, or None if it has ended: its ranks may be on other machines."""
    try:
        return ask.Job.of(folder)
    except UserError:
        return None


def live(states: Sequence[State], before: Sequence[State]) -> str:
    """The table.

    Args:
        states: of all ranks.
        before: the same, at the line before.
    """
    rows = [_row(*pair) for pair in zip(states, before, strict=True)]
    return columns([HEAD, *rows])


def _row(state: State, before: State) -> tuple[str, ...]:
    task, place = doing(state), (str(state["rank"]), str(state["node"]))
    if "silent" in state:
        return (*place, *"-" * 6, task)
    seconds = state["now"] - before["now"] if "now" in before else 0.0
    speed = waiting = "-"
    if seconds > 0 and "samples" in state and "samples" in before:
        speed = f"{(state['samples'] - before['samples']) / seconds:.1f}"
        waiting = f"{min(1.0, (state['waited'] - before['waited']) / seconds):.0%}"
    loss = f"{state['loss']:.4f}" if "loss" in state else "-"
    peak = size(state["peak"]) if state["peak"] else "-"
    step = str(state.get("step", "-"))
    return (*place, step, loss, speed, waiting, size(state["memory"]), peak, task)


if __name__ == "__main__":
    main()
