"""Mixed precision and deterministic kernels."""

import os
from typing import Any

import torch

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return a context in which matrix products and convolutions run in the given precision.

    auto selects bf16 if the device supports it natively, else fp32.
    """
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = any(on for name, on in torch.cpu.get_capabilities().items() if "bf16" in name)
    name = ("bf16" if native else "fp32") if precision == "auto" else precision
    return torch.autocast(device.type, HALF.get(name), enabled=name in HALF)


def set_kernels(deterministic: bool, device: torch.device) -> None:
    """Disable TF32 on CUDA, and select fast or deterministic kernels."""
    if device.type != "cuda":
        return
    backends: Any = torch.backends  # properties that type checkers do not see
    backends.fp32_precision = "ieee"
    # With torch 2.11, convolutions keep TF32 unless their own precision is set.
    backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "ieee"
    backends.cuda.matmul.fp32_precision = "ieee"
    backends.cudnn.benchmark = not deterministic  # tries the algorithms once per shape
    backends.cudnn.deterministic = deterministic
    if deterministic:  # raises for operations without a deterministic kernel, like attention
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch 2.11 needs it
