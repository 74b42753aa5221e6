"""The flags of the preflight."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from common.launch.flags import Launch


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    out: Path = Path("runs")
    """Folder that runs would write to."""
    data: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder with data that all processes must be able to read."""
    json: bool = False
    """Print one JSON document."""
    launch: OmitArgPrefixes[Launch] = Launch()
