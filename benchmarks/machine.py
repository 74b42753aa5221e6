"""What the machine and the software are on which a benchmark ran, without importing torch."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BF16 = ("avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16", "svebf16")  # the last two are arm64's


def describe_machine() -> dict[str, Any]:
    """CPU model, usable cores, memory, bf16 instructions, GPUs and platform."""
    file = Path("/proc/cpuinfo")  # Linux only; elsewhere the model is what Python knows, and no flags are listed
    info = file.read_text() if file.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", info, re.MULTILINE)
    known = flags[1].split() if flags else []
    return {
        "cpu": model[1].strip() if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "bf16_flags": [flag for flag in BF16 if flag in known],
        "gpus": _gpus(),
        "platform": platform.platform(),
    }


def describe_software(*packages: str) -> dict[str, str]:
    """The versions of Python and of installed packages."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
