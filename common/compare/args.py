"""The flags of the comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from common.launch.errors import UserError


@dataclass(frozen=True)
class Args:
    """Compare runs: a table of what differs, and their curves on top of each other."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")] = ()
    """Folders of runs, as --out named them."""
    out: Path = Path("runs/compare")
    """Folder for compare.html and compare.png."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("give the folders of two runs or more: runs/a runs/b")
        for run in self.runs:
            if not (run / "metrics.jsonl").is_file():
                raise UserError(f"{run} is not the folder of a run: it has no metrics.jsonl")
