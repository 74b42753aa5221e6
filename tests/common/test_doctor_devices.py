"""What the preflight asks torch and nvidia-smi: this torch is patched, nvidia-smi is a script."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.doctor import devices
from common.doctor.devices import Card, Device, Smi, Survey, Wheel


@pytest.fixture
def asked() -> Iterator[None]:
    """Answers are kept for a process: those of a test are forgotten, before and after it."""
    for kept in (devices.nvidia_smi, devices.survey):
        kept.cache_clear()
    yield
    for kept in (devices.nvidia_smi, devices.survey):
        kept.cache_clear()


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Puts a program of this name and text in the place of nvidia-smi."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.usefixtures("asked")
def test_what_torch_and_nvidia_smi_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = "00000000:1b:00.0, 580.65.06, Disabled, 2\n0000000A:CB:01.0, 580.65.06, [N/A], [N/A]"
    program(tmp_path, monkeypatch, f'echo "$@" >> {tmp_path}/asked; cat <<END\n{rows}\nEND')
    about = {
        0: SimpleNamespace(name="B", major=8, minor=9, pci_domain_id=10, pci_bus_id=0xCB, pci_device_id=1),
        1: SimpleNamespace(name="A", major=9, minor=0, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0),
        2: SimpleNamespace(name="C", major=9, minor=0, pci_domain_id=0, pci_bus_id=0x1C, pci_device_id=0),
    }
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", about.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: (one, two) != (2, 0))  # one way only
    first, second = Card("00000000:1B:00.0", "580.65.06", False, 2), Card("0000000A:CB:01.0", "580.65.06", False, None)
    seen = (Device(0, "B", (8, 9), second), Device(1, "A", (9, 0), first), Device(2, "C", (9, 0), None))
    assert devices.survey() == devices.survey() == Survey(seen, ((0, 2),))
    assert devices.nvidia_smi() == Smi((first, second))
    assert (tmp_path / "asked").read_text() == f"--query-gpu={devices.QUERY} --format=csv,noheader,nounits\n"  # once


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo 'Failed to initialize NVML: Unknown Error'; exit 255", "Failed to initialize NVML: Unknown Error"),
        ("exit 6", "exit code 6"),
        ("exec sleep 60", "no answer in 0.2 s"),
    ],
)
def test_an_nvidia_smi_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, problem: str) -> None:
    monkeypatch.setattr(devices, "PATIENCE", 0.2 if "sleep" in text else 30.0)
    program(tmp_path, monkeypatch, text)
    assert devices.nvidia_smi() == Smi(problem=problem)


@pytest.mark.usefixtures("asked")
def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.nvidia_smi() == Smi()


def test_what_the_wheel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90", "compute_90"])
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(devices.nccl, "version", lambda: (2, 30, 7))
    assert devices.wheel() == Wheel("13.2", ("sm_90", "compute_90"), (2, 30, 7))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert devices.wheel().nccl == ()
