"""The eight steps by hand are the plain module, and the replicas run at the same time."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import DigitNet
from common.precision import set_kernels
from examples.mnist_dataparallel.args import Args
from examples.mnist_dataparallel.eight_steps import EightSteps, scatter
from examples.mnist_dataparallel.train import InAutocast, choose_devices
from tests import ranks

CPU = torch.device("cpu")


def batch(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(samples)
    return torch.randn(samples, 1, 8, 8), torch.randint(10, (samples,))


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("devices", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("samples", [1, 5, 12])
def test_outputs_and_gradients_are_those_of_the_module(samples: int, devices: int) -> None:
    """The loss on the gathered outputs is exact for unequal chunks, and for idle devices."""
    torch.manual_seed(1)
    model, (images, labels) = DigitNet(8, 10), batch(samples)
    expected = model(images)
    F.cross_entropy(expected, labels).backward()
    true = gradients(model)
    model.zero_grad()

    outputs = EightSteps(model, [CPU] * devices)(images)
    F.cross_entropy(outputs, labels).backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model), true, rtol=1e-4, atol=1e-5)
    outputs = EightSteps(model, [CPU] * devices)(images)  # gradients accumulate, like autograd's
    F.cross_entropy(outputs, labels).backward()
    torch.testing.assert_close(gradients(model), [2 * g for g in true], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("by_hand", [True, False])
def test_three_replicas_on_one_gpu(by_hand: bool) -> None:
    set_kernels(True, torch.device("cuda"))  # float32 that is float32
    model, (images, labels) = DigitNet(8, 10).cuda(), batch(7)
    images, labels = images.cuda(), labels.cuda()
    expected = model(images)
    F.cross_entropy(expected, labels).backward()
    true = gradients(model)
    model.zero_grad()
    devices = [torch.device("cuda", 0)] * 3
    parallel = EightSteps(model, devices) if by_hand else nn.DataParallel(model, devices)
    outputs = parallel(images)
    F.cross_entropy(outputs, labels).backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model), true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("samples", "devices", "chunks"),
    [(32, 4, [8, 8, 8, 8]), (5, 3, [2, 2, 1]), (5, 4, [2, 2, 1]), (1, 2, [1]), (0, 2, [0])],
)
def test_scatter(samples: int, devices: int, chunks: list[int]) -> None:
    parts = scatter(torch.arange(samples), [CPU] * devices)
    assert [len(part) for part in parts] == chunks
    assert torch.cat(parts).tolist() == list(range(samples))


def test_empty_batch_and_no_input() -> None:
    assert EightSteps(DigitNet(8, 10), [CPU] * 2)(torch.empty(0, 1, 8, 8)).shape == (0, 10)

    class Constant(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(2)

    assert EightSteps(Constant(), [CPU] * 2)().tolist() == [1, 1]


def test_several_inputs_are_split_alike() -> None:
    parallel = EightSteps(nn.Bilinear(3, 3, 2), [CPU] * 2)
    one, other = torch.randn(2, 5, 3)
    torch.testing.assert_close(parallel(one, other), parallel.module(one, other))


class Spy(nn.Module):
    """A linear layer that calls a function with itself and its outputs."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(2, 2), call

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        self.call(self, outputs)
        return outputs


def test_replicas_run_at_the_same_time() -> None:
    """Three threads wait for each other in forward and in backward."""
    meeting = threading.Barrier(3, timeout=ranks.HANG / 2)

    def meet(_: nn.Module, outputs: Tensor) -> None:
        meeting.wait()
        outputs.register_hook(lambda gradient: (meeting.wait(), gradient)[1])

    EightSteps(Spy(meet), [CPU] * 3)(torch.randn(3, 2)).sum().backward()


def test_one_device_needs_neither_thread_nor_copy() -> None:
    seen = []
    module = Spy(lambda replica, _: seen.append((replica, threading.current_thread())))
    EightSteps(module, [CPU])(torch.randn(4, 2))
    EightSteps(module, [CPU] * 2)(torch.randn(4, 2))
    assert seen[0] == (module, threading.current_thread())
    assert threading.current_thread() not in [thread for _, thread in seen[1:]]
    assert sum(replica is module for replica, _ in seen) == 2


def test_replicas_get_buffers_and_mode() -> None:
    """BatchNorm keeps the statistics of the first chunk, and uses them in all replicas."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    parallel, first, second = EightSteps(model, [CPU] * 2), *torch.randn(2, 3, 2)
    parallel(torch.cat([first, second + 100]))
    torch.testing.assert_close(model[0].running_mean, 0.1 * first.mean(0))
    model.eval()
    inputs = torch.randn(6, 2)
    torch.testing.assert_close(parallel(inputs), model(inputs))


def test_parameters_must_be_on_the_first_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_var = model[1].running_var.to("meta")
    with pytest.raises(RuntimeError, match=r"1\.running_var is on meta"):
        EightSteps(model, [CPU] * 2)


def test_threads_of_replicas_inherit_precision_and_grad_mode() -> None:
    seen = []
    module = Spy(lambda _, outputs: seen.append((outputs.dtype, outputs.requires_grad)))
    autocast = torch.autocast("cpu", torch.bfloat16)
    parallel = EightSteps(InAutocast(module, autocast), [CPU] * 2)
    assert parallel(torch.randn(4, 2)).dtype == torch.float32
    with torch.no_grad():
        assert not parallel(torch.randn(4, 2)).requires_grad
    assert seen == [(torch.bfloat16, True)] * 2 + [(torch.bfloat16, False)] * 2


def test_each_step_of_the_third_iteration_is_printed() -> None:
    lines = list[str]()
    model = nn.Linear(3, 2)
    parallel = EightSteps(model, [CPU] * 4, lines.append)
    for iteration in range(4):
        parallel(torch.randn(5, 3)).sum().backward()
        assert bool(lines) == (iteration >= 2), "the first two iterations are slower"
    shapes = [line.partition(" ms  ")[2] for line in lines]
    assert [line[:2] for line in lines] == [f"{step} " for step in range(1, 8)]
    chunks = "[2, 2] on cpu, [2, 2] on cpu, [1, 2] on cpu"
    assert shapes[:2] == ["[5, 3] on cpu", "[2, 3] on cpu, [2, 3] on cpu, [1, 3] on cpu"]
    assert shapes[2:] == [
        ", ".join(["[8] on cpu"] * 3),
        chunks,
        "[5, 2] on cpu",
        chunks,
        "[8] on cpu",
    ]


def test_explain_shows_eight_steps_of_a_training(tmp_path: Path) -> None:
    flags = ["--explain", "--epochs", "1", "--batch-size", "90", "--device-ids", "0", "1", "2", "3"]
    run = ranks.run("mnist_dataparallel", 2, flags, out=tmp_path / "out").done()
    steps = [line for line in run.texts[0].splitlines() if " ms  " in line]
    assert [line[0] for line in steps] == list("12345678")
    assert run.result["chunks"] == [12, 12, 12, 9]
    assert run.texts[1].count(" ms  ") == 0, "rank 0 prints"


@pytest.mark.parametrize(
    ("device_ids", "processes", "expected"),
    [((), "1", [0, 1, 2]), ((0, 2), "1", [0, 2]), ((2, 2), "1", [2, 2]), ((), "3", [1])],
)
def test_devices_of_a_process(
    monkeypatch: pytest.MonkeyPatch, device_ids: Sequence[int], processes: str, expected: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    devices = choose_devices(Args(device_ids=tuple(device_ids)), torch.device("cuda", 1))
    assert devices == [torch.device("cuda", index) for index in expected]
    assert choose_devices(Args(device_ids=tuple(device_ids)), CPU) == [CPU] * (len(device_ids) or 2)
