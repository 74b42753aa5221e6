"""The precision that a flag and a device ask for."""

from typing import Any

import pytest
import torch

from common import precision
from common.precision import autocast, set_kernels

backends: Any = torch.backends  # properties that type checkers do not see
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("flag", "native", "dtype"),
    [
        ("fp32", True, torch.float32),
        ("auto", False, torch.float32),
        ("auto", True, torch.bfloat16),
        ("bf16", False, torch.bfloat16),
    ],
)
def test_products_on_a_cpu(
    flag: str, native: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    context, weight = autocast(flag, CPU), torch.ones(2, 2)
    for _ in range(2):  # a run enters it in every step
        with context:
            assert (weight @ weight).dtype == dtype
        assert (weight @ weight).dtype == torch.float32


@pytest.mark.parametrize("deterministic", [False, True])
def test_float32_is_float32(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = list[bool]()
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)
    monkeypatch.setattr(precision.os, "environ", environment := dict[str, str]())
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", deterministic)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", not deterministic)
    set_kernels(deterministic, CPU)
    assert torch.backends.cudnn.benchmark is deterministic, "unchanged on a CPU"
    set_kernels(deterministic, CUDA)
    assert backends.cudnn.conv.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cudnn.deterministic is deterministic
    assert torch.backends.cudnn.benchmark is not deterministic
    assert chosen == [True] * deterministic
    assert ("CUBLAS_WORKSPACE_CONFIG" in environment) == deterministic
