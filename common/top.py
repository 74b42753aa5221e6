"""A live table of a run's ranks: `python -m common.top runs/NAME`.

| column | meaning |
|---|---|
| loss | mean of the losses that the ranks averaged last |
| samples/s | of the whole job, since the line before |
| waiting | share of the time in which this rank waited for its data, since the line before |
| memory | of the process; `peak` is that of its CUDA device |
"""

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


def main() -> None:
    """Ask and print, again and again."""
    args = parse(Args, command="python -m common.top")
    try:
        job = ask.Job.of(args.folder)
    except UserError as error:
        fail(error)
    read = say(job.asked(args.folder, f"every {args.every:g} s"))
    before, shown = job.everybody(), 0
    while read and (args.times == 0 or shown < args.times):
        time.sleep(args.every)
        states = job.everybody()
        if all(state.get("silent") == "gone" for state in states):
            say("all ranks have ended")
            return
        home = "\033[H\033[2J" if sys.stdout.isatty() else ""
        read = say(f"{home}{live(states, before)}")
        before, shown = states, shown + 1


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
