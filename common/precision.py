"""Numbers: which precision, memory layout and compiler a run uses. `auto` is what the hardware does natively."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from common.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Precision:
    """Numbers: precision, memory layout, compiler."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Matrix products and convolutions in float32 or bfloat16 (autocast); auto is bf16 where it is native."""
    channels_last: Literal["auto", "yes", "no"] = "auto"
    """Memory layout NHWC for images, faster for convolutions in bf16; auto follows the precision."""
    compile: bool = False
    """Compile the model with torch.compile (pays on GPUs after a minute; rarely on a CPU)."""
    deterministic: bool = False
    """Repeatable CUDA kernels, which are slower (on the CPU a run is repeatable anyway)."""

    def on(self, device: torch.device) -> Numerics:
        """Decide for a device.

        Raises:
            UserError: bf16 on a device that cannot compute it.
        """
        import torch

        native = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else _native_bf16()
        if self.precision == "bf16" and device.type == "cuda" and not native:
            raise UserError("--precision bf16: this GPU does not compute bfloat16; use --precision fp32")
        bf16 = self.precision == "bf16" or (self.precision == "auto" and native)
        channels_last = bf16 if self.channels_last == "auto" else self.channels_last == "yes"
        return Numerics(device, "bf16" if bf16 else "fp32", channels_last, self.compile, self.deterministic)


@dataclass(frozen=True)
class Numerics:
    """The decision: what a run computes with, on one device."""

    device: torch.device
    name: Literal["fp32", "bf16"]
    channels_last: bool
    compile: bool
    deterministic: bool

    @property
    def settings(self) -> dict[str, str | bool]:
        """What must be the same for a run to be resumed exactly."""
        return {
            "device": self.device.type,
            "precision": self.name,
            "channels_last": self.channels_last,
            "compile": self.compile,
        }

    def autocast(self) -> torch.autocast:
        """A context in which matrix products and convolutions run in the chosen precision."""
        import torch

        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.name == "bf16")

    def prepare(self, model: Module) -> Module:
        """Move a model to the device, in the chosen memory layout."""
        import torch

        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def compiled(self, model: nn.Module) -> nn.Module:
        """The model through torch.compile, if that was asked for."""
        import torch

        if not self.compile:
            return model
        return cast("nn.Module", torch.compile(model))

    def images(self, images: torch.Tensor) -> torch.Tensor:
        """Move a batch of images [N, C, H, W] to the device, in the chosen layout; or inputs of another shape."""
        import torch

        layout = torch.channels_last if self.channels_last and images.dim() == 4 else torch.contiguous_format
        # Not in one step: another layout would first be made on the host, in memory that is not pinned.
        return images.to(self.device, non_blocking=True).contiguous(memory_format=layout)


def _native_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (emulation is slower than float32)."""
    import torch

    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16") or found.get("amx_tile") or found.get("bf16"))
