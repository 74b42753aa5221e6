"""One picture of all ranks: `python -m common.trace runs/NAME`, for a run with `--profile`.

The run does so itself, unless it was interrupted, its traces are large, or its nodes share no
folder: then bring the folders `trace` together first.
"""  # noqa: A005 - the name of the command

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from common.launch.args import fail, parse
from common.launch.console import say
from common.launch.errors import UserError
from common.train import trace
from common.train.parts import file_of, read


@dataclass(frozen=True)
class Args:
    """Put the traces of a run's ranks together: trace.json.gz, profile.png, and a table."""

    folder: Annotated[Path, Positional, arg(metavar="DIR")]
    """The run's --out."""


def main() -> None:
    """Read, write and print."""
    args = parse(Args, command="python -m common.trace")
    try:
        first = read(file_of(args.folder, 0))
        ranks = range(1, first.world_size)
        others = [read(file_of(args.folder, rank)) for rank in ranks]
        if any(part.began != first.began for part in others):
            raise UserError(f"{args.folder / 'trace'}: the traces are of different recordings")
        say(trace.report(args.folder, [first, *others]).text)
    except UserError as error:
        fail(error)


if __name__ == "__main__":
    main()
