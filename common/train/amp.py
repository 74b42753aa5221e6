"""Mixed precision: what a run computes with on one device."""

import os
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from common.launch.errors import UserError
from common.train.compiler import require_compiler
from common.train.precision import Precision, PrecisionWithoutFp16

Module = TypeVar("Module", bound=nn.Module)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision:
    """Precision, memory layout and compiler; `auto` becomes what the device computes natively.

    Args:
        flags: `--precision`, `--channels-last`, `--compile`, `--deterministic`.
        device: of this rank.

    Attributes:
        scaler: multiplies the loss in float16, so that small gradients do not become 0; in other
            precisions it does nothing.

    Raises:
        UserError: bf16 or tf32 on a device that cannot compute it; nothing compiles here.
    """

    def __init__(self, flags: Precision, device: torch.device) -> None:
        native = _native_bf16(device)
        if flags.precision == "bf16" and device.type == "cuda" and not native:
            raise UserError(
                "--precision bf16: this GPU does not compute bfloat16; leave the flag out"
            )
        if flags.precision == "tf32" and device.type != "cuda":
            raise UserError("--precision tf32: only NVIDIA GPUs compute it; use --precision fp32")
        self.device = device
        self.name: str = flags.precision
        if flags.precision == "auto":
            scaled = device.type == "cuda" and not isinstance(flags, PrecisionWithoutFp16)
            self.name = "bf16" if native else "fp16" if scaled else "fp32"
        self.scaler = GradScaler(device.type, enabled=self.name == "fp16")
        layout = flags.channels_last
        self.channels_last = self.name in HALVES if layout == "auto" else layout == "yes"
        self.compile = flags.compile
        if self.compile:
            require_compiler(device)
        self.deterministic = flags.deterministic
        if device.type == "cuda":
            # By default cuDNN's convolutions, and they alone, round float32 to TF32.
            backends: Any = torch.backends  # properties that type checkers do not see
            products = "tf32" if self.name == "tf32" else "ieee"
            backends.fp32_precision = products
            # torch 2.11 keeps the default of convolutions unless they are named.
            backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = products
            backends.cuda.matmul.fp32_precision = products
            backends.cudnn.benchmark = True  # tries the algorithms once per shape
        if self.deterministic:  # the CPU's kernels are repeatable anyway
            # Not with warn_only: fused attention would not be repeatable. An operation without a
            # repeatable kernel is an error, which `record` explains.
            torch.use_deterministic_algorithms(True)
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch 2.11 asks for it
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False

    @property
    def settings(self) -> dict[str, str | bool]:
        """What must be the same for a run to be resumed exactly."""
        settings: dict[str, str | bool] = {
            "device": self.device.type,
            "precision": self.name,
            "channels_last": self.channels_last,
            "compile": self.compile,
        }
        if self.deterministic and self.device.type == "cuda":  # no difference on a CPU
            settings["deterministic"] = True
        return settings

    def autocast(self) -> torch.autocast:
        """A context in which matrix products and convolutions run in the chosen precision."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.name in HALVES)

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products and convolutions get, within `autocast`."""
        return HALVES.get(self.name, torch.float32)

    def move(self, model: Module) -> Module:
        """Move a model to the device, in the chosen memory layout."""
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def prepare(self, model: Module) -> Module:
        """A model on the device, in the memory layout and through the compiler of the flags."""
        model = self.move(model)
        # An epoch's last batch may be smaller. By default it would be compiled for any size, and
        # batches of the usual size would then run code that is slower. Called first by DDP, the
        # model becomes a graph per bucket (torch's DDPOptimizer), so that buckets leave in time.
        return cast("Module", torch.compile(model, dynamic=False)) if self.compile else model

    def to_device(self, images: Tensor) -> Tensor:
        """Move images [N, C, H, W] to the device, in the chosen layout; other inputs, too."""
        channels_last = self.channels_last and images.dim() == 4
        layout = torch.channels_last if channels_last else torch.contiguous_format
        # Not in one step: the host would first make the other layout, in memory that is not pinned.
        return images.to(self.device, non_blocking=True).contiguous(memory_format=layout)


def _native_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware (emulated, it is slower than float32)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "amx_tile", "bf16"))
