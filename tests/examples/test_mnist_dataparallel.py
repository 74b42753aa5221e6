"""mnist_dataparallel against a plain loop, against one device, and against what breaks it."""

import copy
import os
import re
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from common.data.idx import idx_folder
from common.data.models import DigitNet
from common.launch.errors import UserError
from common.launch.flags import Launch
from common.launch.place import Place
from common.launch.resolve import resolve
from common.train.amp import MixedPrecision
from common.train.evaluate import classification_metrics
from common.train.precision import Precision
from common.train.replicas import replicate, scatter_batch
from examples.mnist_dataparallel.args import device_names
from examples.mnist_dataparallel.devices import choose_devices, with_cpu_named
from examples.mnist_dataparallel.eight_steps import EightSteps, Net
from examples.mnist_dataparallel.engines import TorchDataParallel, choose_engine
from tests.conftest import Programs
from tests.examples.test_mnist_ddp_spawn import plain_loop
from tests.machine import here
from tests.make_data import write_idx
from tests.runs import (
    NO_GPU,
    Eventually,
    Result,
    check_predictions,
    losses,
    mutated,
    newest_step,
    result,
    stopped_inside_an_epoch,
)

TRAIN = ("-m", "examples.mnist_dataparallel")
TORCHRUN = ("-m", "torch.distributed.run")
FP32 = ("--precision", "fp32")
SMALL = ("--epochs", 3, "--batch-size", 24, "--lr", 0.1, *FP32)
LONG = (*TRAIN, "--epochs", 12)
CPU = torch.device("cpu")
STEPS = "examples/mnist_dataparallel/eight_steps.py"


def net(model: nn.Module | None = None, precision: Literal["fp32", "bf16"] = "fp32") -> Net:
    torch.manual_seed(0)
    amp = MixedPrecision(Precision(precision, channels_last="no"), CPU)
    return Net(model or DigitNet(8, 10), nn.CrossEntropyLoss(reduction="sum"), amp)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(10, (samples,), generator=generator)


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


# ----------------------------------------------------------------------------------------------- the eight steps


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(0, 13), devices=st.integers(1, 5), inside=st.booleans(), repeats=st.integers(1, 2))
def test_any_number_of_replicas_equals_one_device(samples: int, devices: int, inside: bool, repeats: int) -> None:
    """Equal chunks and unequal ones, fewer samples than devices, none; the loss outside and inside of the replicas."""
    images, labels = batch(samples)
    one, many = net(), net()
    scale = 1 / max(1, samples)
    expected = F.cross_entropy(one.model(images), labels, reduction="sum") * scale
    expected.backward()
    parallel = EightSteps(many, [CPU] * devices, inside)
    for _ in range(repeats):  # nothing of an iteration reaches the next
        many.zero_grad()
        loss = parallel.gradients(images, labels, scale)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(many), gradients(one), rtol=1e-4, atol=1e-6)
    chunks = [len(chunk) for chunk in torch.arange(samples).chunk(devices)] if samples else [0]
    assert parallel.samples == [repeats * n for n in chunks + [0] * (devices - len(chunks))]


def test_chunks_are_those_of_torch() -> None:
    """5 samples on 4 devices are 2, 2, 1: the mean of the chunks' means is not the mean of the batch."""
    images, labels = batch(5)
    chunks = scatter_batch(images, [CPU] * 4)
    assert [len(chunk) for chunk in chunks] == [2, 2, 1]
    logits = net().model(images)
    means = [F.cross_entropy(logits[a:b], labels[a:b]) for a, b in ((0, 2), (2, 4), (4, 5))]
    assert abs(torch.stack(means).mean() - F.cross_entropy(logits, labels)) > 1e-2
    weighted = sum(n * mean for n, mean in zip((2, 2, 1), means, strict=True)) / 5
    torch.testing.assert_close(weighted, F.cross_entropy(logits, labels))


class Meeting(torch.autograd.Function):
    """Lets nobody pass, forward or backward, before as many threads have come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, barrier: threading.Barrier, threads: list[int]) -> Tensor:
        ctx.barrier, ctx.threads = barrier, threads
        threads.append(threading.get_ident())
        barrier.wait()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.threads.append(threading.get_ident())
        ctx.barrier.wait()
        return gradients[0], None, None


class Waiting(nn.Module):
    barrier = threading.Barrier(3, timeout=20)
    threads: list[int] = []  # noqa: RUF012 - shared by the replicas on purpose

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return Meeting.apply(self.linear(images.flatten(1)), self.barrier, self.threads)


def test_replicas_compute_at_the_same_time() -> None:
    """Forward and backward of three replicas wait for each other: in one thread the barrier would break."""
    EightSteps(net(Waiting()), [CPU] * 3, loss_inside=False).gradients(*batch(6), scale=1.0)
    assert len(Waiting.threads) == 6
    assert len(set(Waiting.threads)) == 3
    assert threading.get_ident() not in Waiting.threads


def test_copies_follow_the_model_into_evaluation_and_out_of_it() -> None:
    copies = [nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)) for _ in range(3)]
    for training in (False, True):
        copies[0].train(training)
        replicate(copies)
        assert [part.training for each in copies for part in each] == [training] * 6
    first, *others = (list(each.parameters()) for each in copies)
    assert all(torch.equal(one, other) for each in others for one, other in zip(first, each, strict=True))


def test_batchnorm_sees_one_chunk() -> None:
    """Each replica normalises its own chunk; the running statistics that stay are those of the first one's."""
    images, labels = batch(8)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))

    many, whole, halves = (net(model()) for _ in range(3))
    EightSteps(many, [CPU] * 2, loss_inside=False).gradients(images, labels, scale=1.0)
    for part in (slice(0, 4), slice(4, 8)):
        F.cross_entropy(halves.model(images[part]), labels[part], reduction="sum").backward()
    F.cross_entropy(whole.model(images), labels, reduction="sum").backward()
    torch.testing.assert_close(gradients(many), gradients(halves))
    assert (gradients(many)[2] - gradients(whole)[2]).abs().max() > 0.1
    first = nn.BatchNorm1d(64)
    first(images[:4].flatten(1))
    buffers = dict(many.model.named_buffers())
    torch.testing.assert_close(buffers["1.running_mean"], first.running_mean)
    assert buffers["1.num_batches_tracked"] == 1


class Spy(nn.Module):
    seen: list[torch.dtype] = []  # noqa: RUF012 - shared by the replicas on purpose

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.linear(images.flatten(1))
        self.seen.append(logits.dtype)
        return logits


def test_autocast_reaches_the_threads() -> None:
    images, labels = batch(6)
    found = []
    for devices in (1, 2):
        torch.manual_seed(0)  # for Spy, which is made before `net` does so
        module = net(Spy(), "bf16")
        EightSteps(module, [CPU] * devices, loss_inside=True).gradients(images, labels, scale=1.0)
        found.append(gradients(module))
    assert Spy.seen == [torch.bfloat16] * 3
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-2)


def test_an_unused_parameter_and_a_frozen_one_are_no_problem() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model.register_parameter("extra", nn.Parameter(torch.ones(3)))
    model[1].bias.requires_grad_(False)
    module = net(model)
    EightSteps(module, [CPU] * 2, loss_inside=False).gradients(*batch(4), scale=1.0)
    assert [parameter.grad is None for parameter in module.parameters()] == [True, False, True]


def test_an_error_in_a_replica_is_raised() -> None:
    parallel = EightSteps(net(), [CPU] * 2, loss_inside=False)
    with pytest.raises(RuntimeError, match="channels"):
        parallel.gradients(torch.zeros(4, 2, 8, 8), torch.zeros(4, dtype=torch.long), 1.0)


def test_a_model_on_another_device_is_refused() -> None:
    module = net()
    module.model[0].to("meta")  # ty: ignore[not-subscriptable]
    with pytest.raises(RuntimeError, match=r"model.0.weight lies on meta; the model belongs on the first of"):
        EightSteps(module, [CPU, CPU], loss_inside=False)


@pytest.mark.parametrize("inside", [False, True])
def test_the_engine_around_torchs_dataparallel(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    """What can be tested without a GPU: the devices that it names, and that it computes the same as one device."""
    asked = []
    real = nn.DataParallel

    def spy(module: nn.Module, device_ids: list[int]) -> nn.Module:
        asked.append(device_ids)
        return real(module, device_ids=device_ids if torch.cuda.is_available() else None)

    monkeypatch.setattr(nn, "DataParallel", spy)
    images, labels = batch(5)
    one, wrapped = net(), net()
    parallel = TorchDataParallel(wrapped, [torch.device("cuda", 2), torch.device("cuda", 0)], inside)
    assert asked == [[2, 0]]
    parallel.devices = [CPU, CPU]
    expected = EightSteps(one, [CPU], inside).gradients(images, labels, scale=0.2)
    torch.testing.assert_close(parallel.gradients(images, labels, scale=0.2), expected)
    torch.testing.assert_close(gradients(wrapped), gradients(one))
    assert parallel.samples == [3, 2]


def test_the_choice_of_the_engine() -> None:
    cuda = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_engine("auto", [CPU, CPU], explain=False) is EightSteps
    assert choose_engine("auto", cuda, explain=False) is TorchDataParallel
    assert choose_engine("auto", [cuda[0]] * 3, explain=False) is TorchDataParallel, "replicas may share a device"
    assert choose_engine("auto", cuda, explain=True) is EightSteps
    assert choose_engine("eight-steps", cuda, explain=False) is EightSteps
    for words, arguments in {
        "needs CUDA devices": ("torch", [CPU, CPU], False),
        "--explain shows the hand-written steps": ("torch", cuda, True),
    }.items():
        with pytest.raises(UserError, match=words):
            choose_engine(*arguments)


# ----------------------------------------------------------------------------------------------------- the devices


def place(**flags: Any) -> Place:
    return resolve(Launch(**flags), {}, lambda: 4)


@pytest.mark.parametrize(
    ("text", "visible", "where", "expected"),
    [
        ("auto", 0, place(), ["cpu", "cpu"]),
        ("cpu", 0, place(), ["cpu"]),
        ("cpu,cpu,cpu", 0, place(), ["cpu"] * 3),
        ("cpu, cpu", 0, place(nproc=2), ["cpu"] * 2),
        ("auto", 4, place(), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("auto", 1, place(), ["cuda:0"]),
        ("0,2", 4, place(), ["cuda:0", "cuda:2"]),
        ("cuda:3,1", 4, place(device="cuda"), ["cuda:3", "cuda:1"]),
        ("auto", 4, place(gpu=2), ["cuda:2"]),
        ("auto", 4, place(nproc=2), ["cuda:0", "cuda:2"]),
        ("auto", 4, replace(place(nproc=2), local_rank=1), ["cuda:1", "cuda:3"]),
        ("auto", 1, replace(place(nproc=2), local_rank=1), ["cuda:0"]),
        ("0,2", 4, place(world_size=2, rank=1, dist_url="tcp://a:1"), ["cuda:0", "cuda:2"]),
    ],
)
def test_devices_are_chosen(text: str, visible: int, where: Place, expected: list[str]) -> None:
    names = device_names(text, where.flags)
    kind = "cuda" if visible else "cpu"
    assert [str(device) for device in choose_devices(names, kind, visible, where)] == expected


def test_replicas_on_the_cpu_of_a_machine_with_gpus() -> None:
    names = device_names("cpu,cpu", Launch())
    assert with_cpu_named(place(), names).flags.device == "cpu", "and so the backend becomes gloo"
    assert with_cpu_named(place(), ()) == place()


@pytest.mark.parametrize(
    ("text", "visible", "where", "words"),
    [
        ("gpu", 2, place(), "'gpu' is not a device"),
        ("", 2, place(), "'' is not a device"),
        ("0,cpu", 2, place(), "cannot be mixed"),
        ("0,1", 2, place(no_accel=True), "contradicts --no-accel"),
        ("cpu,cpu", 2, place(device="cuda"), "contradicts --device cuda"),
        ("0,1", 2, place(device="cpu"), "contradicts --device cpu"),
        ("0", 2, place(gpu=0), "contradicts --gpu 0"),
        ("0,5", 2, place(), r"there is no cuda:5; torch sees 2 CUDA device\(s\)"),
        ("0,1", 4, place(nproc=2), "with 2 processes on this node"),
        ("0,1", 0, place(), "torch sees no CUDA device"),
    ],
)
def test_devices_that_are_refused(text: str, visible: int, where: Place, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_devices(device_names(text, where.flags), "cuda" if visible else "cpu", visible, where)


# -------------------------------------------------------------------------------------------------------- parity


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """203 samples: the last batch of 24 has 11, which two devices share as 6 and 5, and two processes as 6 and 5."""
    folder = tmp_path_factory.mktemp("small")
    write_idx(folder, train=203, test=101, size=12, classes=10)
    return folder


@pytest.fixture(scope="module")
def reference(small: Path) -> tuple[DigitNet, list[float]]:
    return plain_loop(idx_folder(small), epochs=3, batch_size=24, lr=0.1)


def check(out: Path, small: Path, reference: tuple[DigitNet, list[float]]) -> None:
    """Losses, metrics, predictions and parameters are those of the plain loop."""
    model, expected_losses = reference
    torch.testing.assert_close(losses(out), expected_losses, rtol=2e-5, atol=0)
    data = idx_folder(small)
    images, labels, _ = data.collate(data.test.__getitems__(list(range(101))))
    with torch.inference_mode():
        scores = model(images).softmax(dim=1)
    expected = classification_metrics(scores.topk(5).indices, labels, 10, scores)
    assert result(out)["metrics"] | {"best_accuracy": 0} == expected | {"best_accuracy": 0}
    check_predictions(out, copy.deepcopy(model), images, labels)
    state = torch.load(max((out / "checkpoints").glob("step-*.pt")), weights_only=True)["model"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("devices", "loss", "nproc", "per_device"),
    [
        ("cpu", "gathered", 1, [609]),
        ("cpu,cpu", "gathered", 1, [306, 303]),
        ("cpu,cpu", "inside", 1, [306, 303]),
        ("cpu,cpu,cpu,cpu,cpu", "inside", 1, [129, 129, 129, 126, 96]),  # 5, 5, 5, 5, 4 and 3, 3, 3, 2
        ("cpu,cpu,cpu", "gathered", 3, [78, 78, 48]),  # the main rank's: 8 are 3, 3, 2, and 4 are 2, 2
    ],
)
def test_replicas_equal_a_plain_loop(
    programs: Programs,
    tmp_path: Path,
    small: Path,
    reference: tuple[DigitNet, list[float]],
    devices: str,
    loss: str,
    nproc: int,
    per_device: list[int],
) -> None:
    flags = ("--devices", devices, "--loss", loss, "--dataset", small, *SMALL, "--out", tmp_path)
    programs.run(*TRAIN, *flags, *(("--nproc", nproc) if nproc > 1 else ()))
    check(tmp_path, small, reference)
    found = result(tmp_path)
    assert found["devices"] == devices.split(",")
    assert found["samples_per_device"] == per_device
    assert (found["world_size"], found["engine"]) == (nproc, "eight steps by hand")


def test_two_nodes_of_two_replicas_equal_a_plain_loop(
    programs: Programs, tmp_path: Path, small: Path, reference: tuple[DigitNet, list[float]], free_port: int
) -> None:
    """torchrun, one process per node, gradients summed over its replicas and averaged over the nodes; and spawned."""
    train = (*TRAIN, "--devices", "cpu,cpu", "--dataset", small, *SMALL)
    agents = [
        programs.start(
            *TORCHRUN,
            "--nnodes",
            2,
            "--nproc-per-node",
            1,
            "--node-rank",
            node,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            free_port,
            *train,
            "--out",
            tmp_path / f"node{node}",
        )
        for node in (0, 1)
    ]
    outputs = [programs.finish(agent).stdout for agent in agents]
    check(tmp_path / "node0", small, reference)
    found = result(tmp_path / "node0")
    assert (found["nodes"], found["world_size"], found["launcher"]) == (2, 2, "torchrun")
    assert found["samples_per_device"] == [3 * (8 * 6 + 3), 3 * (8 * 6 + 3)]
    assert "2 process(es) x chunks of 6, 6" in outputs[0]
    assert outputs[1] == "", "only the main rank speaks"
    programs.run(*train, "--nproc", 2, "--out", tmp_path / "spawned")
    assert result(tmp_path / "spawned")["parameter_hash"] == found["parameter_hash"]


# ------------------------------------------------------------------------------------------------------ mutations


def run_mutated(
    programs: Programs, tmp_path: Path, small: Path, *changes: tuple[str, str, str], flags: Any
) -> list[float]:
    broken = mutated(tmp_path / "broken", *changes)
    programs.run(*TRAIN, *flags, "--dataset", small, *SMALL, "--out", tmp_path / "out", cwd=broken)
    return losses(tmp_path / "out")


def differs(found: list[float], expected: list[float]) -> list[bool]:
    """Step by step, whether a loss is outside of what the parity tests allow."""
    return [abs(a - b) > 2e-5 * b for a, b in zip(found, expected, strict=True)]


def test_mutation_gradients_of_replicas_not_summed(
    programs: Programs, tmp_path: Path, small: Path, reference: tuple[DigitNet, list[float]]
) -> None:
    change = (STEPS, "        reduce_gradients(replicas)\n", "")
    found = run_mutated(programs, tmp_path, small, change, flags=("--devices", "cpu,cpu"))
    assert differs(found, reference[1])[:9] == [False] + [True] * 8


def test_mutation_model_not_copied(
    programs: Programs, tmp_path: Path, small: Path, reference: tuple[DigitNet, list[float]]
) -> None:
    change = (STEPS, "        replicate(replicas)\n", "")
    found = run_mutated(programs, tmp_path, small, change, flags=("--devices", "cpu,cpu"))
    assert differs(found, reference[1])[:9] == [False] + [True] * 8


def test_mutation_chunks_not_weighted(
    programs: Programs, tmp_path: Path, small: Path, reference: tuple[DigitNet, list[float]]
) -> None:
    """`loss.mean()` over the replicas' means: right as long as the chunks are equal, then not any more."""
    inside = "self.criterion(logits.float(), labels).unsqueeze(0)"
    found = run_mutated(
        programs,
        tmp_path,
        small,
        (STEPS, inside, inside.replace("labels)", "labels).div(len(labels))")),
        (STEPS, "gathered.sum() if", "gathered.mean() * len(images) if"),
        flags=("--devices", "cpu,cpu", "--loss", "inside"),
    )
    assert differs(found, reference[1])[:9] == [False] * 8 + [True]


def test_mutation_processes_not_averaged(programs: Programs, tmp_path: Path, small: Path) -> None:
    change = (
        "examples/mnist_dataparallel/train.py",
        "                all_reduce_mean(parameter.grad for parameter in model.parameters())\n",
        "",
    )
    run = (*TRAIN, "--nproc", 2, "--dataset", small, *SMALL, "--out", tmp_path / "out")
    done = programs.run(*run, cwd=mutated(tmp_path / "broken", change), code=1)
    assert "CheckError: the replicas differ: rank(s) 1 hold other parameters than rank 0" in done.stderr
    assert not (tmp_path / "out" / "result.json").exists()


# ---------------------------------------------------------------------------------------- interruption and resuming


@pytest.fixture(scope="module")
def default_run(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One process with two replicas, 240 steps."""
    out = tmp_path_factory.mktemp("default")
    done = shared_programs.run(*TRAIN, "--explain", "--out", out)
    return result(out) | {"losses": losses(out), "out": out, "printed": done.stdout}


@pytest.fixture(scope="module")
def undisturbed(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Result]:
    """Runs of 144 steps that nobody disturbs: one process with two replicas, and two processes with two each."""
    found = {}
    for nproc in (1, 2):
        out = tmp_path_factory.mktemp(f"undisturbed-{nproc}")
        done = shared_programs.run(*LONG, *(("--nproc", 2) if nproc == 2 else ()), "--out", out)
        found[nproc] = result(out) | {"losses": losses(out), "printed": done.stdout}
    return found


def test_the_contract(default_run: Result) -> None:
    found = default_run
    expected = {
        "example": "mnist_dataparallel",
        "world_size": 1,
        "nodes": 1,
        "device": "cpu",
        "backend": "gloo",
        "dataset": "digits",
        "train_samples": 1436,
        "eval_samples": 361,
        "epochs": 20,
        "steps": 240,
        "global_batch": 120,
        "devices": ["cpu", "cpu"],
        "engine": "eight steps by hand",
        "samples_per_device": [20 * 718] * 2,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["metrics"]["accuracy"] >= 0.97
    assert found["metrics"].keys() == {"accuracy", "precision", "recall", "f1", "auc", "best_accuracy"}
    assert found["final_loss"] == found["losses"][-1]
    assert all(found["seconds"][name] > 0 for name in ("total", "startup", "train", "eval"))
    assert len(found["parameter_hash"]) == 64
    for name in ("curves.png", "best.safetensors", "predictions.csv", "tensorboard"):
        assert (found["out"] / name).exists()
    assert "batch 120 = 1 process(es) x chunks of 60, 60\n" in found["printed"]


def test_the_eight_steps_are_explained(default_run: Result) -> None:
    table = default_run["printed"].split("iteration 3, step by step:\n")[1].splitlines()[1:11]
    rows = [re.fullmatch(r"(\d) (.{56}) +(\d+\.\d\d)  (.*)", line) for line in table[:9]]
    assert [row and row[1] for row in rows] == ["1", "2", "3", "4", "5", "6", "7", "7", "8"]
    count = sum(parameter.numel() for parameter in DigitNet(8, 10).parameters())
    made = [re.sub(r" \(threads: \d+\.\d\d, \d+\.\d\d ms\)", " (threads)", row[4]) for row in rows if row]
    assert made == [
        "[120, 1, 8, 8] on cpu, [120] on cpu",
        "[60, 1, 8, 8] on cpu, [60, 1, 8, 8] on cpu",
        f"[{count}] on cpu",
        "[60, 10] on cpu, [60, 10] on cpu (threads)",
        "[120, 10] on cpu, [] on cpu",
        "[60, 10] on cpu, [60, 10] on cpu (threads)",
        f"[{count}] on cpu",
        "",
        "",
    ]
    total = re.search(r"sum +(\d+\.\d\d)  of which the threads computed (\d+\.\d\d) ms", table[9])
    assert total
    assert abs(float(total[1]) - sum(float(row[3]) for row in rows if row)) < 0.05


def test_nothing_is_explained_unless_it_is_asked_for(undisturbed: dict[int, Result]) -> None:
    assert not any("step by step" in run["printed"] for run in undisturbed.values())


@pytest.mark.parametrize("nproc", [1, 2])
def test_killed_and_resumed_is_bit_identical(
    programs: Programs, tmp_path: Path, undisturbed: dict[int, Result], nproc: int, eventually: Eventually
) -> None:
    flags = (*LONG, *(("--nproc", 2) if nproc == 2 else ()), "--checkpoint-every", 7, "--out", tmp_path)
    steps = []
    for goal in (30, 100):
        process = programs.start(*flags, "--resume", "auto")
        inside = partial(stopped_inside_an_epoch, process, tmp_path, goal, 12)
        eventually(inside, 100, f"a checkpoint inside of an epoch, of step {goal} or later")
        programs.kill()
        process.communicate()
        steps.append(newest_step(tmp_path))
    assert any(step % 12 for step in steps), "killed in the middle of an epoch, which has 12 steps"
    done = programs.run(*flags, "--resume", "auto")
    assert f"at step {steps[1]}\n" in done.stdout
    assert result(tmp_path)["parameter_hash"] == undisturbed[nproc]["parameter_hash"]
    assert result(tmp_path)["metrics"] == undisturbed[nproc]["metrics"]
    assert losses(tmp_path) == undisturbed[nproc]["losses"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step_and_leaves_nothing(
    programs: Programs,
    tmp_path: Path,
    undisturbed: dict[int, Result],
    eventually: Eventually,
    signum: signal.Signals,
    code: int,
) -> None:
    nproc = 2 if signum == signal.SIGINT else 1
    flags = (*LONG, *(("--nproc", 2) if nproc == 2 else ()), "--checkpoint-every", 1000, "--out", tmp_path)
    process = programs.start(*flags)
    eventually(lambda: newest_step(tmp_path) >= 24, 100, "step 24")
    time.sleep(0.03)
    started = time.monotonic()
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
    done = programs.finish(process, code)
    assert time.monotonic() - started < here(10)
    assert programs.gone(within=2)
    stopped = re.fullmatch(
        rf"stopped by {signum.name}: checkpoint at step (\d+); go on with --resume auto\n",
        done.stderr.replace(NO_GPU, ""),
    )
    assert stopped, done.stderr
    assert newest_step(tmp_path) == int(stopped[1])
    programs.run(*flags, "--resume", "auto")
    assert result(tmp_path)["parameter_hash"] == undisturbed[nproc]["parameter_hash"]


def test_resuming_on_other_devices_says_what_it_means(programs: Programs, tmp_path: Path, small: Path) -> None:
    flags = (*TRAIN, "--dataset", small, *SMALL, "--out", tmp_path, "--resume", "auto")
    programs.run(*flags, "--devices", "cpu,cpu")
    before = losses(tmp_path)
    for path in (tmp_path / "checkpoints").glob("step-00000027-*"):
        path.unlink()
    done = programs.run(*flags, "--devices", "cpu,cpu,cpu")
    assert "warning: the checkpoint was made by eight steps by hand on cpu, cpu" in done.stderr
    torch.testing.assert_close(losses(tmp_path), before, rtol=2e-5, atol=0)
    assert result(tmp_path)["samples_per_device"] == [8 * 8 + 4, 8 * 8 + 4, 8 * 8 + 3], "of the last epoch alone"


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--devices", "gpu"], "--devices gpu: 'gpu' is not a device"),
        (["--devices", "0,1"], "--devices cuda:0,cuda:1: torch sees no CUDA device"),
        (["--engine", "torch"], "--engine torch: nn.DataParallel needs CUDA devices"),
        (["--compile"], "--compile: torch.compile does not work in the threads of DataParallel"),
        (["--nproc", 2, "-b", 7], r"--batch-size 7 \(global\) cannot be divided by 2 ranks; use 8"),
        (["--dist-backend", "nccl", "--devices", "cpu,cpu"], "--devices cpu,cpu contradicts --dist-backend nccl"),
        (["--dist-backend", "nccl"], "--dist-backend nccl needs CUDA devices"),
        (["--dataset", "minst"], "--dataset minst: give digits, mnist, fashion-mnist, or a folder"),
        (["--out", "/proc/nowhere"], "--out /proc/nowhere cannot be written"),
        (["--resume", "nothing.pt"], "checkpoint nothing.pt does not exist"),
        (["--lr", "nan"], "--lr nan: give at least 0"),
    ],
)
def test_bad_input_is_one_line(programs: Programs, tmp_path: Path, flags: list[object], words: str) -> None:
    out = [] if "--out" in flags else ["--out", tmp_path / "out"]
    done = programs.run(*TRAIN, *flags, *out, code=2)
    line = done.stderr.replace(NO_GPU, "")
    assert re.fullmatch(rf"error: .*{words}.*\n", line), line
    assert not (tmp_path / "out" / "result.json").exists()


def test_devices_without_work_are_named(programs: Programs, tmp_path: Path) -> None:
    flags = ("--devices", "cpu,cpu,cpu,cpu", "-b", 5, "--epochs", 1, "--out", tmp_path)
    done = programs.run(*TRAIN, *flags)
    assert "warning: 1 of 4 devices get no sample: raise --batch-size\n" in done.stderr
    assert "batch 5 = 1 process(es) x chunks of 2, 2, 1\n" in done.stdout


def test_help_needs_no_torch(programs: Programs) -> None:
    done = programs.run("-X", "importtime", *TRAIN, "--help", cold=True)
    assert "--devices" in done.stdout
    assert "import time" in done.stderr
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_real_mnist(programs: Programs, tmp_path: Path, real_data: Path) -> None:
    programs.run(*TRAIN, "--dataset", "mnist", "--data-dir", real_data / "mnist", "--out", tmp_path)
    found = result(tmp_path)
    assert found["metrics"]["accuracy"] >= 0.99
    assert found["samples_per_device"] == [30_000, 30_000]


# ----------------------------------------------------------------------------------------------------- with a GPU


@pytest.mark.gpu
def test_cuda_devices_equal_one(
    programs: Programs, tmp_path: Path, small: Path, reference: tuple[DigitNet, list[float]]
) -> None:
    """One GPU twice, and with several GPUs all of them, by hand and by `nn.DataParallel`."""
    ways = {"one": ("--devices", "0"), "twice": ("--devices", "0,0", "--loss", "inside", "--engine", "eight-steps")}
    ways["thrice, torch"] = ("--devices", "0,0,0", "--engine", "torch")
    if torch.cuda.device_count() > 1:
        chosen = ("--devices", "1,0")
        ways |= {f"torch {loss}": (*chosen, "--engine", "torch", "--loss", loss) for loss in ("gathered", "inside")}
        ways |= {"by hand": (*chosen, "--engine", "eight-steps"), "all": ()}
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(torch.cuda.device_count())))}
    for name, flags in ways.items():
        out = tmp_path / name
        programs.run(*TRAIN, *flags, "--dataset", small, *SMALL, "--deterministic", "--out", out, env=env)
        torch.testing.assert_close(
            losses(out), reference[1], rtol=1e-3, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert result(out)["device"] == "cuda"
    assert result(tmp_path / "twice")["samples_per_device"] == [306, 303]


@pytest.mark.gpu
def test_cuda_visible_devices_chooses(programs: Programs, tmp_path: Path) -> None:
    flags = (*TRAIN, "--epochs", 1, "--out", tmp_path)
    programs.run(*flags, env={"CUDA_VISIBLE_DEVICES": "0"})
    found = result(tmp_path)
    assert (found["devices"], found["engine"]) == (["cuda:0"], "nn.DataParallel")
    done = programs.run(*flags, "--devices", "0,1", env={"CUDA_VISIBLE_DEVICES": "0"}, code=2)
    assert "there is no cuda:1; torch sees 1 CUDA device(s)" in done.stderr
