"""resnet_pipeline's schedules, engines and forms for two devices against the un-split model, and against mutations."""

import copy
import json
import re
import time
from itertools import accumulate, combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.train.amp import MixedPrecision
from common.train.precision import Precision
from examples.resnet_pipeline import costs as measuring
from examples.resnet_pipeline.costs import LayerCost, measure
from examples.resnet_pipeline.evaluate import evaluate
from examples.resnet_pipeline.micro_batches import draw_sweep
from examples.resnet_pipeline.model import build
from examples.resnet_pipeline.operations import BY_HAND, operations, simulate
from examples.resnet_pipeline.partition import Partition, balanced, describe
from examples.resnet_pipeline.schedule import Op, Seconds, ideal_bubble, micro_batch_sizes, stage_owners
from examples.resnet_pipeline.split_backward import backward_of_inputs, backward_of_weights, recorded
from examples.resnet_pipeline.two_devices import ModelParallelResNet, PipelineParallelResNet
from tests import warm
from tests.conftest import ROOT, Programs
from tests.runs import mutated

warm.ALSO += ["torch.distributed.pipelining"]

JOB = ("-m", "tests.examples.pipeline_job")
PIPELINE = "examples/resnet_pipeline/pipeline.py"

# ------------------------------------------------------------------------------------------------- the engines


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_engine_and_schedule_equals_the_unsplit_model(programs: Programs, stages: int) -> None:
    """Parameters after two steps: bit for bit; with BatchNorm over the micro-batches, its statistics too."""
    done = programs.run(*JOB, "--nproc", stages, limit=200)
    lines = re.findall(r"^equal( bit for bit)?: 1 x \d, (.*)$", done.stdout, re.MULTILINE)
    assert f"{len(lines)} cases" in done.stdout, done.stdout
    rounded = [case for exact, case in lines if not exact]  # torch's engine fills 8 samples up to 5 x 2, or 3 x 3
    assert all(re.match(r"torch [\w-]+, [35] micro-batches", case) for case in rounded), rounded
    kept = {schedule: re.findall(rf"hand {schedule}, 4 micro-batches, group, kept \[(.*)\]", done.stdout)[0]
            for schedule in BY_HAND}  # fmt: skip
    assert kept["gpipe"] == ", ".join(["4"] * stages), "GPipe keeps the activations of all micro-batches"
    assert kept["1f1b"] == ", ".join(str(min(4, stages - s)) for s in range(stages)), "1F1B of those behind it"
    assert (kept["interleaved"] == kept["1f1b"]) == (stages == 1), "a second stage's are kept, too"
    assert kept["zb-h1"] == ", ".join([str(min(4, stages))] * stages), "ZB-H1 of P, until W"
    assert all(int(most) <= 2 * stages for most in kept["zbv"].split(", ")), "ZB-V of P, in two stages each"


def test_biases_have_their_gradients_from_the_second_half() -> None:
    """ResNet's convolutions have none."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.GELU(), nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(36, 5))
    expected, images, labels = copy.deepcopy(module), torch.randn(2, 3, 9, 7), torch.tensor([1, 4])
    with recorded(module) as calls:
        loss = F.cross_entropy(module(images), labels)
    backward_of_weights(backward_of_inputs(module, calls, images, loss, None))
    F.cross_entropy(expected(images), labels).backward()
    for found, parameter in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad)


def test_replicas_of_a_pipeline_equal_the_unsplit_model(programs: Programs) -> None:
    """2 stages x 2 replicas: the gradients of 8 samples, whoever computed them."""
    assert "6 cases" in programs.run(*JOB, "--nproc", 4, "--cases", "replicas").stdout


def test_a_class_that_is_out_of_the_question_does_not_end_the_run() -> None:
    """Its probability in float32 is 0; its loss is that of float64."""
    scores = torch.tensor([[0.0, 150.0], [3.0, 0.0]])
    stage: Any = SimpleNamespace(shape=(2,))
    local: Any = SimpleNamespace(
        owners=[0], partition=SimpleNamespace(blocks=[stage]), stages={0: nn.Identity()}, modules=[],
        neighbours=lambda *_: (0, 0),
    )  # fmt: skip
    grid: Any = SimpleNamespace(pp_rank=0, dp_rank=0, dp_size=1)
    batches = DataLoader(TensorDataset(scores, torch.zeros(2).long(), torch.arange(2)), 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = evaluate(local, grid, batches, 2)
    finally:
        dist.destroy_process_group()
    assert found.loss == pytest.approx(F.cross_entropy(scores.double(), torch.zeros(2).long()).item())
    assert found.metrics["accuracy"] == 0.5


def sent(op: Op) -> Op:
    """The operation that receives the result of this one."""
    return op._replace(stage=op.target)


@settings(deadline=None)
@given(
    processes=st.integers(1, 6),
    count=st.integers(1, 20),
    times=st.lists(st.tuples(*[st.floats(0.5, 2)] * 3), min_size=12, max_size=12),
)
@pytest.mark.parametrize("name", BY_HAND)
def test_a_schedule_is_complete_and_never_waits_for_itself(
    name: str, processes: int, count: int, times: list[tuple[float, ...]]
) -> None:
    owners = stage_owners(name, processes, "hand")
    lists = operations(name, processes, count, [Seconds(*each) for each in times[: len(owners)]])
    kinds = ("F", "I", "W") if name.startswith("zb") else ("F", "B")
    for process, ops in enumerate(lists):
        mine = [stage for stage, owner in enumerate(owners) if owner == process]
        assert sorted(ops) == sorted(Op(kind, i, stage) for kind in kinds for i in range(count) for stage in mine)
        for kind, stage in product(kinds, mine):
            assert [op.micro for op in ops if (op.kind, op.stage) == (kind, stage)] == list(range(count))
        for kind, other, back in product(kinds[:2], range(processes), (False, True)):  # what nccl needs: no tags
            channel = {op for op in ops if op.kind == kind and 0 <= op.source < len(owners)
                       and owners[op.source] == other != process
                       and (owners[max(op.stage, op.source)] < owners[min(op.stage, op.source)]) == back}  # fmt: skip
            theirs = [sent(op) for op in lists[other] if op.kind == kind and sent(op) in channel]
            assert theirs == [op for op in ops if op in channel], "received in the order of sending"
    simulate(name, [Seconds(*each) for each in times[: len(owners)]], count, processes)  # ends: nobody waits forever
    if name.startswith("zb"):
        for ops, stages in zip(
            lists, ([s for s, o in enumerate(owners) if o == p] for p in range(processes)), strict=True
        ):
            kept = list(accumulate({"F": 1, "I": 0, "W": -1}[op.kind] for op in ops))
            assert max(kept) <= len(stages) * processes, "not more than the first stage keeps in 1F1B"
            assert all(ops.index(Op("I", i, s)) < ops.index(Op("W", i, s)) for i in range(count) for s in stages)


@pytest.mark.parametrize("processes", range(1, 7))
@pytest.mark.parametrize("name", BY_HAND)
def test_the_bubble_of_equal_stages_is_what_the_formula_says(name: str, processes: int) -> None:
    owners = stage_owners(name, processes, "hand")
    each = len(owners) // processes
    for count in (processes, 4 * processes):
        span = simulate(name, [Seconds(1 / each, 1 / each, 1 / each)] * len(owners), count, processes)
        ideal = 3 * count / (1 - ideal_bubble(name, count, processes))
        # the search for a ZB-V finds no better order for 5 processes and more
        assert span == pytest.approx(ideal, rel=0.02 if name == "zbv" and processes > 4 else 1e-9)


@pytest.mark.parametrize(
    ("schedule", "processes", "words"),
    [
        ("1f1b", 2, "20.0% by (P-1)/(M+P-1) with P = 2, M = 4, 20.0% with these stages"),
        ("zb-h1", 3, "14.3% by (P-1)/(3M+P-1) with P = 3, M = 4, 14.3% with these stages"),
    ],
)
def test_the_plan_predicts_the_bubble(schedule: str, processes: int, words: str) -> None:
    block = LayerCost("layer1.0", "layer1.0", 10, (4,), torch.float32, 2**20, Seconds(0.1, 0.1, 0.1))
    plan = Partition((block,) * processes, tuple(range(processes)))
    *_, last = describe(plan, schedule, processes, [2] * 4)
    assert last == f"  predicted bubble: {words}"


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=9), st.integers(1, 4))
def test_no_cut_is_better_than_the_balanced_one(costs: list[float], stages: int) -> None:
    def slowest(starts: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in zip(starts, (*starts[1:], len(costs)), strict=True))

    every = [(0, *points) for points in combinations(range(1, len(costs)), stages - 1)]
    assert slowest(tuple(balanced(costs, stages))) == pytest.approx(min(map(slowest, every)))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_micro_batches_make_up_the_batch(samples: int, count: int) -> None:
    sizes = micro_batch_sizes(samples, count)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, count)
    assert max(sizes) - min(sizes) <= 1


# ------------------------------------------------------------------------------------------------- two devices


def backward(model: torch.nn.Module, logits: torch.Tensor) -> list[torch.Tensor]:
    """The logits, all gradients, and BatchNorm's statistics."""
    torch.nn.functional.cross_entropy(logits, torch.arange(len(logits))).backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [logits.detach(), *found, *model.buffers()]


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("split_size", [2, 3, 7])
def test_the_textbook_forms_equal_the_unsplit_model(split_size: int, norm: str) -> None:
    """Bit for bit; the last of 7 samples make a smaller micro-batch."""
    torch.manual_seed(0)
    cpu, images = torch.device("cpu"), torch.randn(7, 3, 48, 48)
    models = [build("resnet18", 10, norm)]
    models += [copy.deepcopy(models[0]) for _ in range(3)]
    expected = backward(models[0], models[0](images))
    naive = ModelParallelResNet(models[1], cpu, cpu)
    assert all(map(torch.equal, backward(naive, naive(images)), expected))
    pieces = [models[2](piece) for piece in images.split(split_size)]
    expected_of_pieces = backward(models[2], torch.cat(pieces))
    pipelined = PipelineParallelResNet(models[3], cpu, cpu, split_size)
    found = backward(pipelined, pipelined(images))
    assert len(found) == len(expected) > 60
    assert all(map(torch.equal, found, expected_of_pieces))
    if norm == "group":  # then it does not matter how the batch is cut
        for tensor, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, whole, rtol=1e-3, atol=1e-5)


def test_the_programs_for_two_devices_check_themselves(programs: Programs, tmp_path: Path) -> None:
    done = programs.run("-m", "examples.resnet_pipeline.toy")
    assert "the un-split model with these parameters gives the same output" in done.stdout
    broken = mutated(tmp_path / "toy", ("examples/resnet_pipeline/toy.py", "torch.relu(", "torch.tanh("))
    assert "Tensor-likes are not close" in programs.run("-m", "examples.resnet_pipeline.toy", cwd=broken, code=1).stderr
    small = ("-a", "resnet18", "--image-size", 32, "-b", 6, "--split-size", 2, "--rounds", 1, "--out", tmp_path)
    done = programs.run("-m", "examples.resnet_pipeline.micro_batches", *small)
    assert "gradients equal those of the un-split model over the same micro-batches" in done.stdout
    names = {"unsplit", "textbook pipeline", "naive: one device at a time", "pipeline, split size 2"}
    assert json.loads((tmp_path / "result.json").read_text())["seconds"].keys() == names
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("timeline.png", "sweep.png"))
    for flags, words in (
        (("--split-size", 5), "a batch of 6 split by 5 has a micro-batch of one sample: BatchNorm cannot "),
        (("--out", tmp_path / "result.json"), f"--out {tmp_path}/result.json cannot be written (File exists): "),
    ):
        said = programs.run("-m", "examples.resnet_pipeline.micro_batches", *small, *flags, code=2).stderr
        assert said.startswith(f"error: {words}")
    change = ("examples/resnet_pipeline/two_devices.py", "for split in splits:", "for split in list(splits)[::-1]:")
    broken = mutated(tmp_path / "broken", change)
    done = programs.run("-m", "examples.resnet_pipeline.micro_batches", *small, cwd=broken, code=1)
    assert "wrong gradient" in done.stderr


# ------------------------------------------------------------------------------------------------- the mutations


MUTATIONS = {
    "wrong micro-batch order": (PIPELINE, "self.labels[op.micro]", "self.labels[-1 - op.micro]"),
    "lost gradient": (
        PIPELINE, "y.backward(gradient)", "(op.micro != 1 or op.stage) and y.backward(gradient)"),
    "stale activation": (PIPELINE, "        return message.tensor",
                         "        stale, self.stale = getattr(self, 'stale', message.tensor), message.tensor\n"
                         "        return stale if op.kind == 'F' else message.tensor"),
}  # fmt: skip


SPLIT_MUTATIONS = {
    "weights forgotten": (PIPELINE, "            backward_of_weights(halves)",
                          "            op.micro != 1 and backward_of_weights(halves)"),
    "weights twice": (PIPELINE, "            backward_of_weights(halves)",
                      "            backward_of_weights(halves * (1 + (op.micro == 1)))"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_schedule_is_seen(programs: Programs, tmp_path: Path, name: str) -> None:
    broken = mutated(tmp_path, MUTATIONS[name])
    done = programs.run(*JOB, "--nproc", 2, "--cases", "hand", cwd=broken, code=1, env={"PYTHONPATH": str(ROOT)})
    assert "Tensor-likes are not close" in done.stderr


@pytest.mark.parametrize("name", SPLIT_MUTATIONS)
def test_a_broken_second_half_is_seen(programs: Programs, tmp_path: Path, name: str) -> None:
    broken = mutated(tmp_path, SPLIT_MUTATIONS[name])
    done = programs.run(*JOB, "--nproc", 2, "--cases", "split", cwd=broken, code=1, env={"PYTHONPATH": str(ROOT)})
    assert "Tensor-likes are not close" in done.stderr


def test_the_sweep_names_the_fastest_split_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = list[Figure]()
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    draw_sweep(tmp_path / "sweep.png", {1: 0.5, 20: 0.2, 60: 0.4}, 120, 0.3)
    assert figures[0].axes[0].get_title("left") == "split size 20 is fastest: 1.50 times one device"


@pytest.mark.parametrize(("longest", "runs"), [(60.0, 1 + 5), (0.0, 1 + 1)])
def test_slow_blocks_are_measured_fewer_times(monkeypatch: pytest.MonkeyPatch, longest: float, runs: int) -> None:
    """Other ranks may be waiting; the first run does not count."""
    measured, seconds = [], measuring._seconds
    monkeypatch.setattr(measuring, "LONGEST", longest)
    monkeypatch.setattr(measuring, "_seconds", lambda *args: measured.append(args) or seconds(*args))
    amp = MixedPrecision(Precision(precision="fp32"), torch.device("cpu"))
    measure(build("resnet18", 10, "group"), torch.randn(2, 3, 32, 32), amp)
    assert len(measured) == runs


def test_blocks_cost_what_passes_while_they_are_measured() -> None:
    amp = MixedPrecision(Precision(precision="fp32"), torch.device("cpu"))
    began = time.perf_counter()
    costs = measure(build("resnet18", 10, "group"), torch.randn(2, 3, 32, 32), amp, repeats=1)
    assert all(second > 0 for cost in costs for second in cost.seconds)
    assert sum(sum(cost.seconds) for cost in costs) < time.perf_counter() - began
