"""The machine and the software that a benchmark ran on, without importing torch."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.launch.cgroup import cores

BF16 = ("avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16", "svebf16")  # the last two: arm64


def facts(*packages: str) -> dict[str, Any]:
    """Date, machine, load of other programs, versions of Python and of these packages."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    file = Path("/proc/cpuinfo")  # only Linux has it; it lists the CPU's flags, too
    info = file.read_text() if file.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", info, re.MULTILINE)
    known = flags[1].split() if flags else []
    machine = {
        "cpu": model[1].strip() if model else platform.processor(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "bf16_flags": [flag for flag in BF16 if flag in known],
        "gpus": query_gpu("name"),
        "platform": platform.platform(),
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "load_before": os.getloadavg()[0],  # on a busy machine the figures say little
        "versions": {"python": platform.python_version()} | versions,
    }


def query_gpu(field: str, *flags: str) -> list[str]:
    """What nvidia-smi answers, a line per GPU; nothing on a machine without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, *flags, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
