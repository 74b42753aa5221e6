"""What --compile needs: the check and torch's own search say the same; each thing that is missing is one line."""

import os
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from common.launch.errors import UserError
from common.train import amp, compiler
from common.train.amp import MixedPrecision
from common.train.compiler import require_compiler
from common.train.ddp import warm_up_buckets
from common.train.precision import Precision
from tests.machine import here

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
VARIABLES = ("CC", "CXX", "CPATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_INDUCTOR_INSTALL_GXX")


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with headers, a usual folder for temporary files, and only the programs of the returned folder."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    include = tmp_path / "include"
    for folder in (tmp_path / "bin", include):
        folder.mkdir()
    (include / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _what, _scheme=None: str(include))
    monkeypatch.setattr(compiler, "_is_noexec", lambda _folder: False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def program(folder: Path, name: str, code: int = 0) -> None:
    (folder / name).write_text(f"#!/bin/sh\nexit {code}\n")
    (folder / name).chmod(0o755)


def missing(device: torch.device) -> str:
    with pytest.raises(UserError) as caught:
        require_compiler(device)
    said = str(caught.value)
    assert said.startswith("--compile: ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("there", "variable", "found"),
    [
        ("", None, False),
        ("g++", None, True),
        ("gcc", None, False),
        ("clang++", None, False),
        ("g++", "other", False),
        ("other", "other", True),
        ("g++ broken", "broken", False),
        ("ccache g++", "ccache g++", True),
    ],
)
def test_a_cpu_needs_what_inductor_takes(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch, there: str, variable: str | None, found: bool
) -> None:
    from torch._inductor.cpp_builder import cpp_compiler_search

    for name in there.split():
        program(bin_folder, name, code=int(name == "broken"))
    if variable:
        monkeypatch.setenv("CXX", variable)
    search = cpp_compiler_search.__wrapped__
    if found:
        require_compiler(CPU)
        assert search((None, variable or "g++")) == (variable or "g++")
    else:
        assert f"no compiler runs here ({f'CXX={variable}' if variable else 'g++'})" in missing(CPU)
        with pytest.raises(Exception, match="C\\+\\+ compiler"):
            search((None, variable or "g++"))


@pytest.mark.parametrize(
    ("there", "variable", "found"),
    [
        ("", None, False),
        ("gcc", None, True),
        ("clang", None, True),
        ("g++", None, False),
        ("gcc", "other", False),
        ("other", "other", True),
    ],
)
def test_cuda_needs_what_triton_takes(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch, there: str, variable: str | None, found: bool
) -> None:
    from triton.runtime import build

    for name in there.split():
        program(bin_folder, name)
    if variable:
        monkeypatch.setenv("CC", variable)
    if found:
        require_compiler(CUDA)
        assert Path(build._find_compiler.__wrapped__("c")).name == there
    else:
        assert f"no compiler runs here ({f'CC={variable}' if variable else 'gcc or clang'})" in missing(CUDA)
        if not variable:  # which triton takes unseen
            with pytest.raises(RuntimeError, match="Failed to find C compiler"):
                build._find_compiler.__wrapped__("c")


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_the_headers_of_python_are_needed(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    program(bin_folder, "gcc")
    program(bin_folder, "g++")
    require_compiler(device)
    header = tmp_path / "include" / "Python.h"
    header.rename(tmp_path / "Python.h")
    assert f"{header} is not there: install g++ and python3-dev" in missing(device)
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path}")
    require_compiler(device)


def test_code_cannot_be_loaded_from_noexec(bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docker run --tmpfs /tmp` mounts it; a cache elsewhere is fine. CUDA's code is in Triton's cache."""
    program(bin_folder, "gcc")
    program(bin_folder, "g++")
    monkeypatch.setattr(compiler, "_is_noexec", lambda folder: "noexec" in folder.parts)
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: "/noexec")
    for device in (CPU, CUDA):
        said = missing(device)
        assert "/noexec is mounted noexec" in said
        assert "set TORCHINDUCTOR_CACHE_DIR to another folder; in a container, --tmpfs /tmp:exec,size=1g" in said
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    require_compiler(CUDA)
    missing(CPU)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    require_compiler(CPU)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/noexec/triton")
    assert "set TRITON_CACHE_DIR to another folder" in missing(CUDA)


def test_the_folder_that_will_be_made_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    flags = {tmp_path: os.ST_NOEXEC | os.ST_NOSUID, Path("/"): os.ST_NOSUID}

    class Mount:
        def __init__(self, path: Path) -> None:
            asked.append(path)
            self.f_flag = flags[path]

    monkeypatch.setattr(os, "statvfs", Mount)
    assert compiler._is_noexec(tmp_path / "not" / "yet")
    assert not compiler._is_noexec(Path("/not-there"))
    assert asked == [tmp_path, Path("/")]


def test_it_is_cheap_and_this_machine_can_compile_or_says_why() -> None:
    """In a process of its own: nothing of the compiler is imported by looking for one."""
    program = (
        "import sys, time, torch\n"
        "from common.launch.errors import UserError\n"
        "from common.train.compiler import require_compiler\n"
        "before, started = set(sys.modules), time.monotonic()\n"
        "try:\n    require_compiler(torch.device('cpu'))\n"
        "except UserError as error:\n    print(error, file=sys.stderr)\n"
        "print(time.monotonic() - started, *sorted(set(sys.modules) - before))\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, *imported = done.stdout.split()
    assert float(seconds) < here(0.5), f"of {time.monotonic() - started:.1f} s"
    assert imported == []
    assert done.stderr == "" or done.stderr.startswith("--compile: ")


def compiled_backwards(loss: torch.Tensor) -> int:
    """The compiled graphs of a loss: DDP sees the gradients of each when all of it has run."""
    found, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [one for one, _ in node.next_functions]
    return sum("CompiledFunction" in node.name() for node in found)


@pytest.mark.parametrize(("split", "graphs"), [(True, 4), (False, 1)])
def test_gradients_of_a_compiled_model_leave_while_others_are_computed(
    monkeypatch: pytest.MonkeyPatch, split: bool, graphs: int
) -> None:
    """A graph per bucket, by torch's DDPOptimizer: a model is compiled where DDP calls it. The control: without."""
    dynamo: Any = torch._dynamo
    dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # needs no compiler
    monkeypatch.setattr(amp, "require_compiler", lambda _device: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))  # 1 MiB of gradients each
        model = DDP(MixedPrecision(Precision("fp32", compile=True), CPU).prepare(network), bucket_cap_mb=1)
        warm_up_buckets(model)
        inputs = torch.randn(8, 512)
        with dynamo.config.patch(optimize_ddp=split):
            assert compiled_backwards(model(inputs).sum()) == graphs
        torch.testing.assert_close(model(inputs), network(inputs))
    finally:
        dist.destroy_process_group()
        dynamo.reset()
