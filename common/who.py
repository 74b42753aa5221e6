"""Which rank waits for which: `python -m common.who runs/NAME`, at any time while the run goes on.

It asks all ranks, twice, and prints a row for each and one sentence. Nothing is changed in the run.
Start it on a machine from which the ranks can be reached; it needs the run's folder.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from common.launch.args import fail, parse
from common.launch.console import say
from common.launch.errors import UserError
from common.launch.who import ask
from common.launch.who.table import report_of


@dataclass(frozen=True)
class Args:
    """Show what each rank of a run does, and what is wrong if the run hangs."""

    folder: Annotated[Path, Positional, arg(metavar="DIR")]
    """The run's --out."""


def main() -> None:
    """Ask and print."""
    args = parse(Args, command="python -m common.who")
    try:
        job = ask.Job.of(args.folder)
    except UserError as error:
        fail(error)
    say(job.asked(args.folder, "twice"))
    before = job.everybody()
    time.sleep(0.5)
    say(report_of(job.everybody(), before))


if __name__ == "__main__":
    main()
