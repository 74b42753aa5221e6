"""What a check is: it asks about its process, and yields findings."""

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from common.doctor.args import Args
from common.launch.place import Place

PACKAGES = ("torch", "torchvision", "transformers", "numpy", "scikit-learn")
MEGABYTE, GIGABYTE = 1_000_000, 1_000_000_000
State = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Here:
    """What a check may ask about this process."""

    args: Args
    place: Place
    device: torch.device
    backend: str


@dataclass(frozen=True)
class Finding:
    """What one process found out about one thing."""

    check: str
    state: State
    found: str
    remedy: str = ""


Findings = Iterator[Finding]
Check = Callable[[Here], Findings]


def judge(check: str, wrong: bool, found: str, remedy: str, state: State = "warning") -> Finding:
    """A finding that has a state and a remedy only if something is wrong."""
    return Finding(check, state, found, remedy) if wrong else Finding(check, "ok", found)


def packages() -> str:
    """The packages that matter, with their versions."""
    return ", ".join(f"{name} {_version(name)}" for name in PACKAGES)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
