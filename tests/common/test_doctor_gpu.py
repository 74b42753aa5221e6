"""The preflight of CUDA devices, with none here: what torch and nvidia-smi say is made up, the lines are compared."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.doctor import gpu, machine, preflight
from common.doctor.args import Args
from common.doctor.devices import Card, Device, Smi, Survey, Wheel
from common.doctor.findings import Here
from common.launch import place
from common.launch.flags import Launch
from common.launch.place import Place
from tests.conftest import Programs
from tests.runs import mutated

KERNELS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
OLD, NEW = (2, 28, 9), (2, 30, 7)
H200, V100, SLICE = ("NVIDIA H200", (9, 0)), ("Tesla V100-SXM2-16GB", (7, 0)), ("NVIDIA H200 MIG 1g.18gb", (9, 0))
BOTH = "cpu:gloo,cuda:nccl"
OWN = "processes that see the same slice share it; to give each its own, start each with "
OWN += "CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L)"
VERSIONS = "ok      driver: 580.65.06; this torch has CUDA 13.2, nccl 2.30.7"


def card(number: int, mig: bool = False, uncorrected: int | None = 0) -> Card:
    return Card(f"00000000:{number:02X}:00.0", "580.65.06", mig, uncorrected)


def job(ranks: int, backend: str = BOTH, kind: str = "cuda", flags: Launch | None = None) -> Here:
    """A process of a job of one node."""
    flags = flags or Launch()
    here = Place("spawn", 1, 0, ranks, ranks, 0, 0, "", 0, flags)
    return Here(Args(launch=flags), here, torch.device(kind), backend)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """What the doctor prints about devices that torch and nvidia-smi describe in this way."""

    def shown(
        here: Here,
        *seen: Device,
        apart: tuple[tuple[int, int], ...] = (),
        smi: Smi | None = None,
        nccl: tuple[int, ...] = NEW,
        kernels: tuple[str, ...] = KERNELS,
    ) -> list[str]:
        cards = tuple(each.card for each in seen if each.card)
        monkeypatch.setattr(gpu, "survey", lambda: Survey(seen, apart))
        monkeypatch.setattr(gpu, "nvidia_smi", lambda: Smi(cards) if smi is None else smi)
        monkeypatch.setattr(gpu, "wheel", lambda: Wheel("13.2", kernels, nccl))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (140_000_000_000, 150_000_000_000))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: seen[0].name)
        monkeypatch.setattr(place, "_current", here.place)
        capsys.readouterr()
        preflight.show(dict.fromkeys(range(here.place.world_size), preflight.examine(gpu.GPU, here)), here)
        return capsys.readouterr().out.splitlines()

    return shown


def several(count: int, kind: tuple[str, tuple[int, int]] = H200, **of_card: Any) -> list[Device]:
    return [Device(number, *kind, card(number, **of_card)) for number in range(count)]


def of_cuda(shown: list[str], device: str) -> list[str]:
    """Without the lines that all of these have: the first, and the count of errors and warnings."""
    assert shown[0] == f"ok      device: {device}"
    return shown[1:-1]


def test_without_a_device_there_is_one_line(lines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "DEV", tmp_path)
    expected = ["ok      device: cpu, no CUDA device", "0 error(s), 0 warning(s), world size 2"]
    assert lines(job(2, "gloo", "cpu")) == expected
    (tmp_path / "nvidia0").touch()
    assert lines(job(2, "gloo", "cpu", Launch(device="cpu"))) == expected  # nobody wanted it


@pytest.mark.parametrize("count", [1, 2, 8])
def test_healthy_devices(lines: Any, count: int) -> None:
    which = "cuda:" + ",".join(map(str, range(count)))
    between = [f"ok      peer access: between all {count} devices"] * (count > 1)
    assert lines(job(count), *several(count)) == [
        f"ok      device: cuda NVIDIA H200, 140.0 of 150.0 GB free, {count} device(s)",
        VERSIONS,
        f"ok      kernels: {which} NVIDIA H200 (9.0): sm_90",
        *between,
        f"ok      ECC: {which}: no uncorrected errors",
        f"0 error(s), 0 warning(s), world size {count}",
    ]


def test_devices_that_torch_cannot_use(lines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "DEV", tmp_path)
    (tmp_path / "nvidia0").touch()
    lost = "error   device: there are NVIDIA devices, but torch cannot use them"
    assert lines(job(1, "gloo", "cpu"), smi=Smi((card(0),))) == [
        lost,
        "        -> the driver may be too old for this torch: compare nvidia-smi with the versions above",
        VERSIONS,
        "1 error(s), 0 warning(s), world size 1",
    ]
    assert lines(job(1, "gloo", "cpu"), smi=Smi((card(0, mig=True),)))[:2] == [
        lost,
        "        -> MIG is on: nvidia-smi -L lists the slices; make some, or name one in CUDA_VISIBLE_DEVICES",
    ]


def test_a_driver_that_cannot_be_asked(lines: Any) -> None:
    bare = Device(0, *H200, None)
    tail = ["ok      kernels: cuda:0 NVIDIA H200 (9.0): sm_90"]  # and nothing about ECC
    head = "cuda NVIDIA H200, 140.0 of 150.0 GB free, 1 device(s)"
    assert of_cuda(lines(job(1), bare, smi=Smi()), head) == [
        "ok      driver: unknown (nvidia-smi is missing); this torch has CUDA 13.2, nccl 2.30.7",
        *tail,
    ]
    assert of_cuda(lines(job(1), bare, smi=Smi(problem="no answer in 30 s"), nccl=()), head) == [
        "warning driver: unknown (nvidia-smi: no answer in 30 s); this torch has CUDA 13.2, nccl -",
        "        -> restart the container; if a GPU is lost or the driver was updated, the machine",
        *tail,
    ]


def test_a_device_without_kernels_fails(lines: Any) -> None:
    mixed = [*several(2), Device(2, *V100, card(2))]
    assert lines(job(3), *mixed)[2:] == [
        "ok      kernels: cuda:0,1 NVIDIA H200 (9.0): sm_90",
        "error   kernels: cuda:2 Tesla V100-SXM2-16GB (7.0): none in this torch, which has "
        "sm_75, sm_80, sm_86, sm_90, sm_100, sm_120",
        "        -> install a torch built for it (an older CUDA for an older GPU, a newer one for a newer GPU), "
        "or leave it out with CUDA_VISIBLE_DEVICES",
        "ok      peer access: between all 3 devices",
        "ok      ECC: cuda:0,1,2: no uncorrected errors",
        "1 error(s), 0 warning(s), world size 3",
    ]
    assert lines(job(1), *several(1), kernels=("sm_80", "compute_80"))[2] == (
        "ok      kernels: cuda:0 NVIDIA H200 (9.0): none, the driver compiles compute_80 instead, "
        "so the first start is slow"
    )
    assert not any("kernels" in line for line in lines(job(1), *several(1), kernels=()))  # a torch that does not say


@pytest.mark.parametrize(
    ("capability", "available", "runs"),
    [
        ((8, 9), KERNELS, "sm_86"),
        ((12, 1), KERNELS, "sm_120"),
        ((10, 3), KERNELS, "sm_100"),
        ((11, 0), KERNELS, ""),  # another major
        ((7, 0), KERNELS, ""),  # a newer minor of the same major
        ((13, 0), (*KERNELS, "compute_120"), "compute_120"),
        ((7, 0), ("compute_75",), ""),
        ((9, 0), ("sm_90a",), "sm_90a"),
        ((10, 3), ("sm_100a", "compute_100a"), ""),
        ((10, 3), ("sm_100f",), "sm_100f"),
        ((12, 0), ("sm_100f", "compute_100f"), ""),
        ((9, 0), ("gfx90a",), ""),
    ],
)
def test_which_kernels_a_device_runs(capability: tuple[int, int], available: tuple[str, ...], runs: str) -> None:
    assert gpu.runnable(capability, available) == runs


def test_no_peer_access_is_a_note(lines: Any) -> None:
    def said(count: int, *apart: tuple[int, int]) -> list[str]:
        shown = lines(job(count), *several(count), apart=apart)
        assert shown[-1] == f"0 error(s), 0 warning(s), world size {count}"
        return shown[3:5]

    why = "        -> it works, but more slowly; nvidia-smi topo -p2p r says why"
    found = "1 of 1 pairs of devices lack it (cuda:0 and cuda:1): there nccl goes through host memory"
    assert said(2, (0, 1)) == [f"ok      peer access: {found}", why]
    halves = [(one, two) for one in range(4) for two in range(4, 8)]
    found = "16 of 28 pairs of devices lack it (cuda:0 and cuda:4): there nccl goes through host memory"
    assert said(8, *halves) == [f"ok      peer access: {found}", why]


def test_errors_of_memory_name_the_device(lines: Any) -> None:
    assert lines(job(2), Device(0, *H200, card(0)), Device(1, *H200, card(0x59, uncorrected=3)))[4:] == [
        "warning ECC: cuda:1 NVIDIA H200 at 00000000:59:00.0: 3 uncorrected error(s) since the driver was loaded",
        "        -> see nvidia-smi -q -d ECC; reset the GPU, replace it if they come back, and until then leave it "
        "out with CUDA_VISIBLE_DEVICES",
        "0 error(s), 1 warning(s), world size 2",
    ]
    shown = lines(job(1), Device(0, "NVIDIA GeForce RTX 4090", (8, 9), card(0, uncorrected=None)))
    assert not any("ECC" in line for line in shown)


def test_slices_of_a_gpu(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpu.SHARED_GPU, raising=False)
    found = "MIG slices, without access to each other's memory"

    def said(here: Here, *seen: Device, nccl: tuple[int, ...]) -> list[str]:
        shown = lines(here, *seen, nccl=nccl)
        at = next(number for number, line in enumerate(shown) if " MIG: " in line)
        return [line for line in shown[at : at + 2] if " MIG: " in line or line.startswith("        ->")]

    one, two = several(1, SLICE, uncorrected=None), several(2, H200, mig=True, uncorrected=None)
    assert said(job(1), *one, nccl=OLD) == [f"ok      MIG: cuda:0: {found}"]
    refused = "        -> nccl refuses two slices of one GPU: "
    assert said(job(2), *two, nccl=OLD) == [
        f"warning MIG: cuda:0,1: {found}",
        f"{refused}use a torch with nccl 2.30, or --dist-backend gloo; {OWN}",
    ]
    assert said(job(2), *two, nccl=NEW) == [
        f"warning MIG: cuda:0,1: {found}",
        f"{refused}set NCCL_MULTI_RANK_GPU_ENABLE=1 (experimental in nccl), or --dist-backend gloo; {OWN}",
    ]
    fine = [f"ok      MIG: cuda:0,1: {found}", f"        -> {OWN}"]
    assert said(job(2, "gloo"), *two, nccl=OLD) == fine
    monkeypatch.setenv(gpu.SHARED_GPU, "1")
    assert said(job(2), *two, nccl=NEW) == fine


def test_more_processes_than_devices(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu.SHARED_GPU, "1")
    slow = "        -> they slow each other down: start 2 (--nproc 2)"

    def said(here: Here, nccl: tuple[int, ...] = NEW) -> list[str]:
        return lines(here, *several(2), nccl=nccl)[5:-1]

    assert said(job(2)) == []
    assert said(job(4)) == [
        "warning sharing: 4 processes share 2 CUDA device(s) and use nccl, by NCCL_MULTI_RANK_GPU_ENABLE=1",
        slow,
    ]
    assert said(job(4, "gloo"), OLD) == [
        "warning sharing: 4 processes share 2 CUDA device(s) and use gloo: nccl 2.28.9 cannot share a device",
        f"{slow}, or use a torch with nccl 2.30",
    ]
    assert said(job(4, "gloo")) == ["warning sharing: 4 processes share 2 CUDA device(s) and use gloo", slow]


def test_nccl_needs_more_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "SHARED", tmp_path)

    def remedy(here: Here, megabytes: int) -> str:
        size = SimpleNamespace(total=megabytes * 1_000_000)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: size)
        (finding,) = machine.shared_memory(here)
        assert finding.found == f"{tmp_path}: {megabytes} MB"
        assert (finding.state == "warning") == bool(finding.remedy)
        return finding.remedy

    do = "docker run --shm-size 1g, in Kubernetes components/shared-memory (an emptyDir in memory)"
    assert remedy(job(2, "gloo"), 64) == f"loader workers end with a bus error: {do}"
    nccl = ", and nccl may not start in a container without SYS_NICE"
    assert remedy(job(2), 64) == remedy(job(2), 999) == f"loader workers end with a bus error{nccl}: {do}"
    assert [remedy(job(2), 1074), remedy(job(1), 300), remedy(job(2, "gloo"), 300)] == ["", "", ""]


def test_a_rank_without_a_device_does_not_touch_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only a rank that has chosen a CUDA device initialises CUDA; the process that starts ranks makes no checks."""

    def initialised(*_: object) -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialised)
    monkeypatch.setattr(subprocess, "run", initialised)
    monkeypatch.setattr(gpu, "DEV", tmp_path)
    found = preflight.examine(machine.ALONE, job(2, "gloo", "cpu"))
    assert [each.found for each in found if each.check == "device"] == ["cpu, no CUDA device"]


def test_a_rank_whose_device_cannot_compute_keeps_nobody_waiting(programs: Programs, tmp_path: Path) -> None:
    """The rank would leave the round trip, in which the other waits until the time limit without a word."""
    change = (
        'if dist.get_rank() == 1:\n            raise RuntimeError("no kernel image\\nand more")\n        torch.ones'
    )
    broken = mutated(tmp_path / "broken", ("common/doctor/job.py", "torch.ones", change))
    words = ("-m", "common.doctor", "--json", "--device", "cpu", "--nproc", 2, "--out", tmp_path)
    said = programs.run(*words, code=1, cwd=broken).stdout
    report = json.loads(said[said.index("{") :])
    (found,) = [each for each in report["findings"] if each["check"] == "round trip"]
    assert (found["state"], found["ranks"]) == ("error", [1])
    assert found["found"] == "cpu does not compute: no kernel image"
    assert report["errors"] == 1
