"""What `--compile` needs of a machine: torch.compile writes C++ or C, compiles it, and loads it.

Without this check, the first step of training would end with a long traceback.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from common.launch.errors import UserError

REMEDY = "install g++ and python3-dev; an image with both: make images COMPILER=yes"
CXX = "clang++" if sys.platform == "darwin" else "g++"


def require_compiler(device: torch.device) -> None:
    """Look for a compiler, Python's headers, and a folder from which code can be loaded.

    Costs some milliseconds: the compiler prints its version, and nothing is imported.

    Args:
        device: of this rank. For CUDA, Triton compiles C, which starts its kernels; for other
            devices, torch's Inductor compiles C++.

    Raises:
        UserError: one of them is missing; the message says how to get it.
    """
    cuda = device.type == "cuda"
    variable = "CC" if cuda else "CXX"
    commands = _c_compilers() if cuda else [shlex.split(os.environ.get("CXX", CXX))]
    if not any(map(_runs, commands)):
        given = f"{variable}={os.environ[variable]}" if variable in os.environ else None
        tried = given or " or ".join(command[0] for command in commands)
        raise UserError(f"--compile: no compiler runs here ({tried}): {REMEDY}")
    headers = _header_folders()
    if not any((folder / "Python.h").is_file() for folder in headers):
        raise UserError(f"--compile: {headers[0] / 'Python.h'} is not there: {REMEDY}")
    setting, folder = _cache(cuda)
    if _is_noexec(folder):
        raise UserError(
            f"--compile: {folder} is mounted noexec, so that compiled code cannot be loaded from "
            f"it: set {setting} to another folder; in a container, --tmpfs /tmp:exec,size=1g"
        )


def _c_compilers() -> list[list[str]]:
    """The commands of which `triton.runtime.build` takes the first; to it, CC is one word."""
    return [[os.environ["CC"]]] if "CC" in os.environ else [["gcc"], ["clang"]]


def _runs(command: list[str]) -> bool:
    """Whether a compiler starts, asked as `torch._inductor.cpp_builder` does."""
    try:
        return subprocess.run([*command, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def _header_folders() -> list[Path]:
    """Where Inductor and Triton let a compiler look for Python.h, and where it looks by itself."""
    schemes = (sysconfig.get_default_scheme(), "posix_prefix")
    folders = [sysconfig.get_path("include", scheme) for scheme in schemes]
    folders += os.environ.get("CPATH", "").split(":")
    return [Path(folder) for folder in folders if folder]


def _cache(cuda: bool) -> tuple[str, Path]:
    """The folder from which compiled code is loaded, and the variable that names it."""
    names = ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"] if cuda else ["TORCHINDUCTOR_CACHE_DIR"]
    for name in names:
        if name in os.environ:
            return name, Path(os.environ[name]).absolute()
    return names[-1], Path(tempfile.gettempdir())


def _is_noexec(folder: Path) -> bool:
    """Whether the folder, or the one in which it will be made, is on a file system with noexec."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return bool(os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0))  # none on macOS
