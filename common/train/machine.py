"""What a result says about the machine and the code that made it."""

import importlib.metadata
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent


def commit() -> str | None:
    """The commit of this code, with a `+` where files differ from it; None if nobody knows it.

    An image has no git, but the commit from which it was built in a variable.
    """
    git, quiet = ["git", "-C", str(ROOT)], dict[str, Any](capture_output=True, text=True, timeout=5)
    try:
        found = subprocess.run([*git, "rev-parse", "--show-toplevel", "HEAD"], **quiet)
        if found.returncode or Path(found.stdout.splitlines()[0]) != ROOT:
            return _of_the_image()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], **quiet).returncode
    except (OSError, subprocess.TimeoutExpired):
        return _of_the_image()
    return found.stdout.splitlines()[1] + "+" * bool(changed)


def _of_the_image() -> str | None:
    built_from = os.environ.get("SOURCE_REVISION", "unknown")
    return None if built_from == "unknown" else built_from


def peak_memory(device: torch.device) -> dict[str, int]:
    """The most memory that this process has had, in MB: of the host, and of a CUDA device."""
    unit = 1 if sys.platform == "darwin" else 1024
    most = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 10**6}
    if device.type == "cuda":
        most["cuda"] = torch.cuda.max_memory_allocated(device) // 10**6
    return most


def versions() -> dict[str, str]:
    """Of the packages that compute."""
    names = ["torch", "torchvision", "numpy", "scikit-learn"]
    names += ["transformers"] if "transformers" in sys.modules else []
    found = {name: importlib.metadata.version(name) for name in names}
    return found | {"python": sys.version.split()[0]}
