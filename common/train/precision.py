"""The flags about numbers: precision, memory layout, compiler. No torch here."""

from dataclasses import dataclass
from typing import Annotated, Literal

from common.launch.flags import MAY_CHANGE


@dataclass(frozen=True)
class Precision:
    """Numbers: precision, memory layout, compiler."""

    # Resuming compares what these come to on the device (`MixedPrecision.settings`).
    precision: Annotated[Literal["auto", "fp32", "tf32", "bf16", "fp16"], MAY_CHANGE] = "auto"
    """Matrix products and convolutions in float32, TF32 (a GPU's float32 with 10 bits of mantissa),
    bfloat16 or float16; auto is bf16 where it is native, fp16 on other GPUs, else fp32."""
    channels_last: Annotated[Literal["auto", "yes", "no"], MAY_CHANGE] = "auto"
    """Memory layout NHWC, faster for convolutions in bf16; auto follows the precision."""
    compile: Annotated[bool, MAY_CHANGE] = False
    """Compile the model with torch.compile (pays on GPUs after a minute; rarely on a CPU)."""
    deterministic: Annotated[bool, MAY_CHANGE] = False
    """Repeatable CUDA kernels, which are slower (on the CPU a run is repeatable anyway)."""


@dataclass(frozen=True)
class PrecisionWithoutFp16(Precision):
    """Numbers of a program whose loop does not scale its loss (`run.scaler`).

    In float16, small gradients would become 0.
    """

    precision: Annotated[Literal["auto", "fp32", "tf32", "bf16"], MAY_CHANGE] = "auto"
    """Matrix products and convolutions in float32, TF32 (a GPU's float32 with 10 bits of mantissa)
    or bfloat16; auto is bf16 where it is native, else fp32."""
