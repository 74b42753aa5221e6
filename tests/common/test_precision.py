"""What a run computes with, on devices that this machine may not have."""

from collections.abc import Generator
from typing import Any

import pytest
import torch

from common.launch.errors import UserError
from common.train.amp import MixedPrecision
from common.train.precision import Precision

BACKENDS: Any = torch.backends
CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture(autouse=True)
def restored() -> Generator[None]:
    before = BACKENDS.fp32_precision, BACKENDS.cudnn.benchmark
    yield
    BACKENDS.fp32_precision, BACKENDS.cudnn.benchmark = before


@pytest.mark.parametrize(
    ("flag", "native", "name", "products"),
    [
        ("auto", True, "bf16", "ieee"),
        ("auto", False, "fp32", "ieee"),
        ("fp32", True, "fp32", "ieee"),
        ("tf32", True, "tf32", "tf32"),
    ],
)
def test_float32_is_rounded_to_tf32_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, flag: Any, native: bool, name: str, products: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    amp = MixedPrecision(Precision(flag), CUDA)
    assert amp.name == amp.settings["precision"] == name
    assert BACKENDS.cudnn.conv.fp32_precision == BACKENDS.cuda.matmul.fp32_precision == products
    assert BACKENDS.cudnn.benchmark


def test_a_precision_that_the_device_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UserError, match="this GPU does not compute bfloat16"):
        MixedPrecision(Precision("bf16"), CUDA)
    with pytest.raises(UserError, match="only NVIDIA GPUs compute it"):
        MixedPrecision(Precision("tf32"), CPU)
