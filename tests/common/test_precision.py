"""What a run computes with, on devices that this machine may not have."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from common.data.idx import digits
from common.launch.args import parse
from common.launch.errors import UserError
from common.train import amp as amp_module
from common.train.amp import MixedPrecision
from common.train.checkpoint_files import latest
from common.train.precision import Precision, PrecisionWithoutFp16
from common.train.run import Run
from examples.mnist_ddp_spawn.args import Args as MnistArgs
from tests.conftest import Programs
from tests.runs import result

BACKENDS: Any = torch.backends
CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture(autouse=True)
def restored() -> Generator[None]:
    before = BACKENDS.fp32_precision, BACKENDS.cudnn.benchmark, BACKENDS.cudnn.deterministic
    yield
    BACKENDS.fp32_precision, BACKENDS.cudnn.benchmark, BACKENDS.cudnn.deterministic = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("flag", "native", "name", "products"),
    [
        ("auto", True, "bf16", "ieee"),
        ("auto", False, "fp16", "ieee"),
        ("fp32", True, "fp32", "ieee"),
        ("tf32", True, "tf32", "tf32"),
    ],
)
def test_float32_is_rounded_to_tf32_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, flag: Any, native: bool, name: str, products: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    # The default of torch 2.11, which its general switch does not reach: seen on a GPU.
    BACKENDS.cudnn.conv.fp32_precision = BACKENDS.cudnn.rnn.fp32_precision = "tf32"
    amp = MixedPrecision(Precision(flag), CUDA)
    assert amp.name == amp.settings["precision"] == name
    assert BACKENDS.cudnn.conv.fp32_precision == BACKENDS.cuda.matmul.fp32_precision == products
    assert BACKENDS.cudnn.benchmark


def test_deterministic_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """With warn_only, BERT's attention would sum in another order in each run."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is gone again after the test
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    MixedPrecision(Precision("fp32", deterministic=True), CUDA)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert BACKENDS.cudnn.deterministic
    assert not BACKENDS.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("alone")
def test_resuming_compares_what_a_run_computes_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the flags come to, so that `auto` is the same as its choice."""
    monkeypatch.setattr(amp_module, "require_compiler", lambda _: None)

    def config(*flags: str) -> dict[str, Any]:
        base = ["--out", str(tmp_path), "--device", "cpu", "--precision", "fp32"]
        return Run(parse(MnistArgs, [*base, *flags]), CPU, digits()).config

    before = config()
    assert config("--channels-last", "no") == before, "what auto is in float32"
    for flags, changed in (
        (("--precision", "bf16", "--channels-last", "no"), {"precision": "bf16"}),
        (("--channels-last", "yes"), {"channels_last": True}),
        (("--compile",), {"compile": True}),
        (("--deterministic",), {}),  # on the CPU it makes no difference
    ):
        assert {name: value for name, value in config(*flags).items() if value != before[name]} == changed


def test_resuming_compares_what_a_gpu_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    flags = Precision("fp32"), Precision("tf32"), Precision("fp32", deterministic=True)
    before, rounded, repeatable = (MixedPrecision(flag, CUDA).settings for flag in flags)
    assert before["device"] == "cuda"
    assert rounded == before | {"precision": "tf32"}
    assert repeatable == before | {"deterministic": True}


def test_a_precision_that_the_device_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UserError, match="this GPU does not compute bfloat16"):
        MixedPrecision(Precision("bf16"), CUDA)
    with pytest.raises(UserError, match="only NVIDIA GPUs compute it"):
        MixedPrecision(Precision("tf32"), CPU)


def test_a_loop_that_does_not_scale_its_loss_is_not_given_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert MixedPrecision(PrecisionWithoutFp16(), CUDA).name == "fp32"


def gradients(amp: MixedPrecision, weight: Tensor, factor: float) -> Tensor:
    """Those that the optimizer gets to see, for a loss of this size."""
    model = nn.Linear(4, 1, bias=False)
    model.weight = nn.Parameter(weight.clone())
    optimizer = SGD(model.parameters(), lr=1)
    with amp.autocast():
        # in float16 from the first product on, as the gradients of the activations are
        hidden = F.linear(torch.ones(1, 4), model.weight)
        loss = (hidden * factor).float().sum() / 2
    amp.scaler.scale(loss).backward()
    amp.scaler.step(optimizer)
    amp.scaler.update()
    return weight - model.weight.detach()


def test_float16_keeps_small_gradients_and_skips_a_step_without_finite_ones() -> None:
    weight, small = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 2.0**-26  # float16 ends at 2 ** -24
    scaled, bare = (MixedPrecision(Precision("fp16"), CPU) for _ in range(2))
    bare.scaler = MixedPrecision(Precision("fp32"), CPU).scaler
    assert not bare.scaler.is_enabled()
    assert gradients(scaled, torch.zeros(1, 4), 2 * small).tolist() == [[small] * 4]
    assert gradients(bare, torch.zeros(1, 4), 2 * small).tolist() == [[0] * 4], "the control: without a scaler"
    assert gradients(scaled, weight, 60_000.0).count_nonzero() == 0, "times 65536 it is infinite: no step"
    assert scaled.scaler.get_scale() == 2**15
    assert gradients(scaled, weight, 1.0).count_nonzero() == 4


def test_a_run_in_float16_is_resumed_with_its_scaler(programs: Programs, tmp_path: Path) -> None:
    # Small batches: without kernels of its own for float16, a processor takes 30 ms for the backward pass of a sample.
    words = ("-m", "examples.mnist_ddp_spawn", "--precision", "fp16", "-b", 12, "--limit-steps", 24, "--nproc", 2)
    words = (*words, "--threads", 1, "--checkpoint-every", 17)  # the last two are kept: of steps 17 and 24
    programs.run(*words, "--out", tmp_path / "whole")
    (early,) = (tmp_path / "whole" / "checkpoints").glob("step-00000017-*.pt")
    programs.run(*words, "--out", tmp_path / "rest", "--resume", early)
    whole, rest = (latest(tmp_path / name / "checkpoints") for name in ("whole", "rest"))
    assert whole is not None
    assert rest is not None
    assert whole.state["scaler"] == rest.state["scaler"] != {}
    ends = [result(tmp_path / name) for name in ("whole", "rest")]
    assert ends[0]["parameter_hash"] == ends[1]["parameter_hash"]
    assert ends[0]["precision"] == "fp16"
