"""What torch and nvidia-smi say about CUDA devices: all checks ask here, so tests answer here."""

import subprocess
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

QUERY = "pci.bus_id,driver_version,mig.mode.current,ecc.errors.uncorrected.volatile.total"
PATIENCE = 30.0  # seconds for nvidia-smi, which can hang when a GPU does not answer


@dataclass(frozen=True)
class Card:
    """A GPU, as nvidia-smi describes it."""

    bus: str
    driver: str
    mig: bool
    """Whether it is divided into slices."""
    uncorrected: int | None
    """ECC errors that were not corrected, since the driver was loaded; None if it counts none."""


@dataclass(frozen=True)
class Smi:
    """The answer of nvidia-smi: GPUs, or the reason why there are none. Neither: it is missing."""

    cards: tuple[Card, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Wheel:
    """What this torch was built with."""

    cuda: str
    kernels: tuple[str, ...]
    """`sm_90` for the code of one architecture, `compute_90` for code that the driver compiles."""
    nccl: tuple[int, ...]
    """Its version; empty without nccl."""


@dataclass(frozen=True)
class Device:
    """A CUDA device that this process sees, which may be a slice of a GPU."""

    number: int
    name: str
    capability: tuple[int, int]
    card: Card | None
    """The GPU that it is, or belongs to; None where nvidia-smi does not know it."""

    @property
    def mig(self) -> bool:
        """Whether it is a slice of a GPU."""
        return "MIG" in self.name or (self.card is not None and self.card.mig)


@dataclass(frozen=True)
class Survey:
    """The CUDA devices that this process sees."""

    devices: tuple[Device, ...]
    apart: tuple[tuple[int, int], ...]
    """Pairs of devices of which one cannot read the memory of the other."""


@cache
def nvidia_smi() -> Smi:
    """Ask nvidia-smi, once per process: it can take seconds."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (FileNotFoundError, PermissionError):
        return Smi()
    except subprocess.TimeoutExpired:
        return Smi(problem=f"no answer in {PATIENCE:g} s")
    if done.returncode:
        said = (done.stderr + done.stdout).strip() or f"exit code {done.returncode}"
        return Smi(problem=said.splitlines()[0])
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return Smi(tuple(_card(*row) for row in rows if len(row) == QUERY.count(",") + 1))


def _card(bus: str, driver: str, mig: str, uncorrected: str) -> Card:
    count = int(uncorrected) if uncorrected.isdigit() else None  # `[N/A]`: a GPU without ECC
    return Card(bus.upper(), driver, mig == "Enabled", count)


def wheel() -> Wheel:
    """What this torch was built with, which can be asked without a device."""
    version = nccl.version() if dist.is_nccl_available() else ()
    return Wheel(torch.version.cuda or "", tuple(torch.cuda.get_arch_list()), version)


@cache
def survey() -> Survey:
    """Ask torch about every device that it sees, once per process; opens no context on them.

    It initialises CUDA: only a rank that has chosen its CUDA device may call it.
    """
    cards = {card.bus: card for card in nvidia_smi().cards}
    numbers = range(torch.cuda.device_count())
    devices = []
    for number in numbers:
        about: Any = torch.cuda.get_device_properties(number)
        bus = f"{about.pci_domain_id:08X}:{about.pci_bus_id:02X}:{about.pci_device_id:02X}.0"
        capability = (about.major, about.minor)
        devices.append(Device(number, about.name, capability, cards.get(bus)))
    reach = torch.cuda.can_device_access_peer
    pairs = combinations(numbers, 2)
    apart = tuple((one, two) for one, two in pairs if not (reach(one, two) and reach(two, one)))
    return Survey(tuple(devices), apart)
