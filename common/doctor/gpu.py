"""What each process finds out alone about CUDA devices. Without one, only `device` reports it."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from common.doctor.devices import Device, Wheel, nvidia_smi, survey, wheel
from common.doctor.findings import GIGABYTE, Check, Finding, Findings, Here, judge
from common.launch.device import SHARING_NCCL, ranks_share_devices

DEV = Path("/dev")
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"


def device(here: Here) -> Findings:
    """The device of this process, and its memory."""
    if here.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(here.device)
        found = f"{here.device} {torch.cuda.get_device_name(here.device)}, {free / GIGABYTE:.1f} "
        found += f"of {total / GIGABYTE:.1f} GB free, {torch.cuda.device_count()} device(s)"
        remedy = "another process holds its memory: see nvidia-smi"
        yield judge("device", free < 0.8 * total, found, remedy)
        return
    if not devices_are_lost(here):
        yield Finding("device", "ok", "cpu, no CUDA device")
        return
    found = "there are NVIDIA devices, but torch cannot use them"
    remedy = "the driver may be too old for this torch: compare nvidia-smi with the versions above"
    if any(card.mig for card in nvidia_smi().cards):
        remedy = "MIG is on: nvidia-smi -L lists the slices; make some, or name one in "
        remedy += "CUDA_VISIBLE_DEVICES"
    yield Finding("device", "error", found, remedy)


def devices_are_lost(here: Here) -> bool:
    """Whether a device was wanted, and is there, but torch has none."""
    wanted = here.args.launch.device == "auto" and not here.args.launch.no_accel
    return here.device.type != "cuda" and wanted and any(DEV.glob("nvidia[0-9]*"))


def driver(here: Here) -> Findings:
    """Versions that have to fit each other: of the driver, of CUDA, of nccl."""
    if here.device.type != "cuda" and not devices_are_lost(here):
        return
    smi, built = nvidia_smi(), wheel()
    why = f"nvidia-smi: {smi.problem}" if smi.problem else "nvidia-smi is missing"
    version = smi.cards[0].driver if smi.cards else f"unknown ({why})"
    found = f"{version}; this torch has CUDA {built.cuda}, nccl {dotted(built.nccl) or '-'}"
    remedy = "restart the container; if a GPU is lost or the driver was updated, the machine"
    yield judge("driver", bool(smi.problem), found, remedy)


def kernels(here: Here) -> Findings:
    """Whether this torch has code that the devices can run."""
    built = wheel()
    if here.device.type != "cuda" or not built.kernels:
        return
    alike: dict[tuple[str, tuple[int, int]], list[Device]] = {}
    for each in survey().devices:
        alike.setdefault((each.name, each.capability), []).append(each)
    for (name, capability), devices in alike.items():
        who = f"{numbers(devices)} {name} ({dotted(capability)})"
        code = runnable(capability, built.kernels)
        if code.startswith("sm_"):
            yield Finding("kernels", "ok", f"{who}: {code}")
        elif code:
            found = f"{who}: none, the driver compiles {code} instead, so the first start is slow"
            yield Finding("kernels", "ok", found)
        else:
            found = f"{who}: none in this torch, which has {', '.join(built.kernels)}"
            remedy = "install a torch built for it (an older CUDA for an older GPU, a newer one "
            remedy += "for a newer GPU), or leave it out with CUDA_VISIBLE_DEVICES"
            yield Finding("kernels", "error", found, remedy)


def runnable(capability: tuple[int, int], available: Iterable[str]) -> str:
    """The newest code of a wheel that a device can run, compiled code first; empty if none can.

    Args:
        capability: of the device, 8 and 9.
        available: `sm_86` runs on 8.6 and later minors, `compute_86` on all that is newer, too.
            With an `a` both are for 8.6 only, with an `f` for its later minors.
    """
    found: list[tuple[bool, tuple[int, int], str]] = []
    for name in available:
        if not (parts := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)):
            continue
        compiled, built, only = parts[1] == "sm", (int(parts[2]), int(parts[3])), parts[4]
        fits = built <= capability and (built[0] == capability[0] or not (compiled or only))
        if fits and (only != "a" or built == capability):
            found.append((compiled, built, name))
    return max(found)[2] if found else ""


def peer_access(here: Here) -> Findings:
    """Whether the devices read each other's memory, or send all messages through the host."""
    if here.device.type != "cuda" or len(devices := survey().devices) < 2:
        return
    count, apart = len(devices), survey().apart
    pairs = count * (count - 1) // 2
    if not apart:
        yield Finding("peer access", "ok", f"between all {count} devices")
        return
    one, two = apart[0]
    found = f"{len(apart)} of {pairs} pairs of devices lack it (cuda:{one} and cuda:{two})"
    found += ": there nccl goes through host memory"
    remedy = "it works, but more slowly; nvidia-smi topo -p2p r says why"
    yield Finding("peer access", "ok", found, remedy)


def mig(here: Here) -> Findings:
    """Slices of GPUs: nccl sees in each only the GPU that it belongs to."""
    if here.device.type != "cuda":
        return
    if not (slices := [each for each in survey().devices if each.mig]):
        return
    found = f"{numbers(slices)}: MIG slices, without access to each other's memory"
    if here.place.local_world_size == 1:
        yield Finding("MIG", "ok", found)
        return
    own = "processes that see the same slice share it; to give each its own, start each with "
    own += "CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L)"
    allowed = shares_by_nccl(wheel()) and os.environ.get(SHARED_GPU) == "1"
    if allowed or "nccl" not in here.backend:
        yield Finding("MIG", "ok", found, own)
        return
    way = f"set {SHARED_GPU}=1 (experimental in nccl)"
    if not shares_by_nccl(wheel()):
        way = f"use a torch with nccl {dotted(SHARING_NCCL)}"
    remedy = f"nccl refuses two slices of one GPU: {way}, or --dist-backend gloo; {own}"
    yield Finding("MIG", "warning", found, remedy)


def memory_errors(here: Here) -> Findings:
    """Errors in a GPU's memory that ECC has found and could not correct."""
    if here.device.type != "cuda":
        return
    counting = [
        each for each in survey().devices if each.card and each.card.uncorrected is not None
    ]
    for each in counting:
        if each.card and each.card.uncorrected:
            found = f"cuda:{each.number} {each.name} at {each.card.bus}: "
            found += f"{each.card.uncorrected} uncorrected error(s) since the driver was loaded"
            remedy = "see nvidia-smi -q -d ECC; reset the GPU, replace it if they come back, and "
            remedy += "until then leave it out with CUDA_VISIBLE_DEVICES"
            yield Finding("ECC", "warning", found, remedy)
    if counting and not any(each.card and each.card.uncorrected for each in counting):
        yield Finding("ECC", "ok", f"{numbers(counting)}: no uncorrected errors")


def sharing(here: Here) -> Findings:
    """More processes than devices: what carries their messages."""
    if here.device.type != "cuda" or not ranks_share_devices():
        return
    ranks, devices, built = here.place.local_world_size, len(survey().devices), wheel()
    found = f"{ranks} processes share {devices} CUDA device(s) and use "
    remedy = f"they slow each other down: start {devices} (--nproc {devices})"
    if "nccl" in here.backend:
        found += f"nccl, by {SHARED_GPU}={os.environ.get(SHARED_GPU, '')}"
    elif shares_by_nccl(built):
        found += here.backend
    else:
        found += f"{here.backend}: nccl {dotted(built.nccl) or '-'} cannot share a device"
        remedy += f", or use a torch with nccl {dotted(SHARING_NCCL)}"
    yield Finding("sharing", "warning", found, remedy)


def shares_by_nccl(built: Wheel) -> bool:
    """Whether this nccl can have several ranks on one GPU."""
    return built.nccl >= SHARING_NCCL


def numbers(devices: Iterable[Device]) -> str:
    """`cuda:0,1,2`."""
    return "cuda:" + ",".join(str(each.number) for each in devices)


def dotted(version: Iterable[object]) -> str:
    """`2.30.7`."""
    return ".".join(map(str, version))


GPU: dict[str, Check] = {
    "device": device,
    "driver": driver,
    "kernels": kernels,
    "peer access": peer_access,
    "MIG": mig,
    "ECC": memory_errors,
    "sharing": sharing,
}
