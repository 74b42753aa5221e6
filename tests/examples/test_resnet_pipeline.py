"""resnet_pipeline: schedules, cuts, replicas, another number of stages, the programs beside it."""

from collections import Counter
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from common.image_folder import ImageFolder
from common.images import ResumableSampler
from common.launch import UserError
from examples.resnet_pipeline import pipeline as pipelines
from examples.resnet_pipeline.data import without_images
from examples.resnet_pipeline.further import timeline, torch_pipelining, zero_bubble
from examples.resnet_pipeline.pipeline import (
    Action,
    Pipeline,
    gpipe,
    make_mesh,
    one_forward_one_backward,
)
from examples.resnet_pipeline.stages import build, build_stage, cut
from examples.resnet_pipeline.two_devices import ModelParallelResNet50, PipelineParallelResNet50
from tests import ranks
from tests.hooks import At
from tests.reference import resnet_pipeline as reference

SCHEDULES = [gpipe, one_forward_one_backward, zero_bubble.zero_bubble_h1]
SIZES = list(product(range(1, 6), range(1, 8)))

# --------------------------------------------------------------------------------------- schedules


def play(schedule: Any, stages: int, micro_batches: int) -> tuple[list[str], list[int]]:
    """Play a schedule with actions of equal length; return a line and the columns of each stage."""
    waiting = [schedule(stage, stages, micro_batches) for stage in range(stages)]
    done: dict[tuple[str, int, int], int] = {}  # column in which an action ended
    clocks, lines = [0] * stages, [[] for _ in range(stages)]
    while any(waiting):
        before = len(done)
        for stage, actions in enumerate(waiting):
            while actions:
                kind, micro = actions[0]
                source = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(kind, stage)
                needed = (kind if kind != "W" else "I", micro, source)
                if 0 <= source < stages and needed not in done:
                    break
                start = max(clocks[stage], done.get(needed, 0))
                lines[stage] += [". "] * (start - clocks[stage]) + [f"{kind}{micro}"]
                clocks[stage] = done[kind, micro, stage] = start + 1
                actions.pop(0)
        assert len(done) > before, "the stages wait for each other"
    end = max(clocks)
    rows = [" ".join(line + [". "] * (end - len(line))).rstrip() for line in lines]
    return rows, clocks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_micro_batch_goes_forward_then_backward(schedule: Any) -> None:
    for stages, count in SIZES:
        for stage in range(stages):
            actions = schedule(stage, stages, count)
            kinds = "FIW" if schedule is zero_bubble.zero_bubble_h1 else "FB"
            assert Counter(actions) == Counter(Action(*a) for a in product(kinds, range(count)))
            for kind in kinds:  # gradients add up in the order of the micro-batches
                assert [m for k, m in actions if k == kind] == list(range(count))
            for micro, (early, late) in product(range(count), pairwise(kinds)):
                assert actions.index(Action(early, micro)) < actions.index(Action(late, micro))
            kept = [
                sum((k == "F") - (k == kinds[-1]) for k, _ in actions[: end + 1])
                for end in range(len(actions))
            ]
            bound = {gpipe: count, one_forward_one_backward: stages - stage}.get(schedule, stages)
            assert max(kept) <= min(bound, count)


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
def test_the_bubble_is_that_of_the_formula(schedule: Any) -> None:
    for stages, count in SIZES:
        _, clocks = play(schedule, stages, count)
        assert max(clocks) == 2 * (count + stages - 1)


def test_the_schedules_are_those_of_the_pages() -> None:
    for module, schedule in zip((pipelines, pipelines, zero_bubble), SCHEDULES, strict=True):
        for stage, row in enumerate(play(schedule, 3, 4)[0]):
            assert f"stage {stage}   {row}\n" in str(module.__doc__)


# ------------------------------------------------------------------------------------ stages, cuts


@pytest.mark.parametrize(
    ("stages", "cuts", "lengths"),
    [
        (1, (), [14]),
        (2, (), [8, 6]),
        (3, (), [6, 3, 5]),
        (8, (), [5, *([1] * 6), 3]),
        (2, ("layer1.0",), [4, 10]),
        (3, ("layer2.1", "avgpool"), [7, 5, 2]),
    ],
)
def test_stages_are_consecutive_blocks(
    stages: int, cuts: tuple[str, ...], lengths: list[int]
) -> None:
    model = build("resnet18", 10, "group")
    names = cut(model, stages, cuts)
    assert [len(stage) for stage in names] == lengths
    x = torch.randn(2, 3, 32, 32)
    expected, keys = model.eval()(x), list[str]()
    for index in range(stages):
        torch.manual_seed(0)
        stage = build_stage("resnet18", 10, "group", stages, index, cuts).eval()
        keys += stage.state_dict()
        stage.load_state_dict(
            {k: v for k, v in model.state_dict().items() if k in stage.state_dict()}
        )
        x = stage(x)
    torch.testing.assert_close(x, expected)
    assert sorted(keys) == sorted(model.state_dict())


@pytest.mark.parametrize(
    ("stages", "cuts"),
    [
        (9, ()),
        (2, ("layer9.0",)),
        (2, ("conv1",)),
        (3, ("layer2.0",)),
        (1, ("layer2.0",)),
        (3, ("layer3.0", "layer2.0")),
        (3, ("layer2.0", "layer2.0")),
    ],
)
def test_impossible_cuts_are_mistakes_of_the_user(stages: int, cuts: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="--cuts" if cuts else "cannot split 8 residual blocks"):
        cut(build("resnet18", 10, "group"), stages, cuts)


def run(folder: Path, count: int, *flags: str, **options: Any) -> ranks.Training:
    return ranks.run("resnet_pipeline", count, flags, out=folder, **options)


@pytest.mark.parametrize(
    "flags", [("--stages", "3"), ("--stages", "1", "--batch-size", "7"), ("--micro-batches", "97")]
)
def test_flags_that_do_not_fit_are_mistakes_of_the_user(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    failed = run(tmp_path / "out", 2, *flags)
    assert failed.codes == [2, 2], failed.text
    assert "Traceback" not in failed.text


# ---------------------------------------------------------------------------- against a plain loop


@pytest.fixture(scope="module")
def small(data: Path) -> list[str]:
    """Flags of a small training, without its micro-batches."""
    folder = data / "test_resnet_pipeline"
    folder.mkdir()
    reference.prepare(folder)
    return [flag.replace("{data}", str(folder)) for flag in reference.SMALL]


@pytest.mark.parametrize(
    ("count", "replicas", "flags"),
    [
        (2, 1, ["--cuts", "layer2.1", "--micro-batches", "1", "--batch-size", "11"]),
        (3, 1, ["--cuts", "layer1.0", "avgpool", "--micro-batches", "12", "--schedule", "gpipe"]),
        (2, 2, ["--stages", "1", "--micro-batches", "4"]),
        (4, 2, ["--stages", "2", "--micro-batches", "2", "--norm", "batch"]),
    ],
    ids=str,
)
def test_cuts_and_replicas_train_like_a_plain_loop(
    count: int, replicas: int, flags: list[str], small: list[str], tmp_path: Path
) -> None:
    flags = [*small, "--epochs", "2", *flags]
    expected = ranks.call(reference.train, flags, replicas, folder=tmp_path / "plain")
    found = run(tmp_path / "out", count, *flags).done()
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert found.result["metrics"] == pytest.approx(expected.metrics, rel=1e-3)
    assert [int(row["prediction"]) for row in found.rows()] == expected.predictions
    state = found.checkpoint()["parts"]["model"]
    assert f" = {replicas} replica" in found.text
    assert state.keys() == expected.state.keys()
    for name, value in expected.state.items():  # AdamW turns rounding of tiny gradients into steps
        assert (state[name].double() - value.double()).abs().mean() < 1e-4, name


def test_a_run_continues_with_another_number_of_stages(small: list[str], tmp_path: Path) -> None:
    """BatchNorm's statistics and AdamW's moments included; the stages do not change a bit."""
    words = "--epochs 3 --micro-batches 3 --norm batch --checkpoint-every 1"
    flags = [*small, *words.split()]
    whole = run(tmp_path / "whole", 1, *flags).done()
    flags += ["--resume", "auto"]
    for count, step in ((2, 3), (3, 5)):
        killed = run(tmp_path / "cut", count, *flags, fault=At(count - 1, step, SIGKILL))
        assert sorted(killed.codes) == [-SIGKILL, *[75] * (count - 1)], killed.text
    resumed = run(tmp_path / "cut", 1, *flags).done()
    assert resumed.result["parameter_hash"] == whole.result["parameter_hash"]
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-6)
    model = torchvision.models.resnet18(num_classes=3)  # torchvision's own model loads the weights
    model.load_state_dict(load_file(tmp_path / "cut" / "best.safetensors"))


# ------------------------------------------------------------------------------------ one pipeline


def watch(schedule: Any) -> tuple[list[int], bool, set[timedelta]]:
    """Return how many micro-batches a stage keeps after each action, whether any are left, and
    the time limits of its groups."""
    mesh, kept = make_mesh("cpu", torch.distributed.get_world_size(), 50.0), list[int]()
    stage = build_stage("resnet18", 10, "batch", mesh.size(1), mesh.get_local_rank("pp"))
    pipeline = Pipeline(stage, mesh, schedule, 5, 50.0)
    execute = pipeline.execute

    def watched(action: Action) -> None:
        execute(action)
        sending = Counter(kind for kind, _ in pipeline.sending)
        assert sending["B"] <= 2
        kept.append(max(len(pipeline.kept), sending["F"]))

    pipeline.execute = watched  # type: ignore[method-assign]
    images, labels = torch.randn(15, 3, 32, 32), torch.arange(15) % 10
    pipeline.step(images, labels)
    left = bool(pipeline.kept or pipeline.sending)
    pipeline.eval()
    before = [buffer.clone() for buffer in stage.buffers()]
    one, four, all_of_them = (pipeline(images[:count]) for count in (1, 4, 15))
    assert all(torch.equal(*pair) for pair in zip(before, stage.buffers(), strict=True))
    torch.testing.assert_close(torch.cat([one, four[1:]]), all_of_them[:4], rtol=1e-3, atol=1e-4)
    groups = [mesh.get_group("dp"), mesh.get_group("pp"), pipeline.gradients]
    limits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    return kept, left, limits


@pytest.mark.parametrize(
    ("schedule", "bounds"), [(gpipe, [5, 5, 5]), (one_forward_one_backward, [3, 2, 1])]
)
def test_a_stage_keeps_few_micro_batches(schedule: Any, bounds: list[int], tmp_path: Path) -> None:
    """Evaluation takes any number of samples, and no rank waits for longer than the timeout."""
    found = ranks.call(watch, schedule, folder=tmp_path / "log", ranks=3)
    for (kept, left, limits), bound in zip(found, bounds, strict=True):
        assert max(kept) == bound
        assert not left
        assert limits == {timedelta(seconds=50)}


def half_precision() -> tuple[float, dict[str, float]]:
    """Return the loss of this stage, and a sum of each gradient, of a step in bfloat16."""
    mesh = make_mesh("cpu", torch.distributed.get_world_size(), 50.0)
    torch.manual_seed(0)
    stage = build_stage("resnet18", 10, "group", mesh.size(1), mesh.get_local_rank("pp"))
    torch.manual_seed(1)
    images, labels = torch.randn(7, 3, 32, 32), torch.arange(7)
    with torch.autocast("cpu", torch.bfloat16):
        loss = Pipeline(stage, mesh, gpipe, 3, 50.0).step(images, labels)
    sums = {name: p.grad.double().sum().item() for name, p in stage.named_parameters()}
    return loss.item(), sums


def test_stages_exchange_bfloat16(tmp_path: Path) -> None:
    [(loss, gradients)] = ranks.call(half_precision, folder=tmp_path / "one", ranks=1)
    first, second = ranks.call(half_precision, folder=tmp_path / "two", ranks=2)
    assert (first[0], second[0]) == (0, loss)
    assert first[1] | second[1] == gradients


def test_later_stages_read_no_images(small: list[str]) -> None:
    folder = ImageFolder(Path(small[1]) / "train", 32)
    sampler = ResumableSampler(folder, 2, 1, seed=3, drop_last=True)
    sampler.set_epoch(4)
    expected = [folder.targets[index] for _, index in sampler]
    folder.samples = [("missing", label) for _, label in folder.samples]
    loader = without_images(DataLoader(folder, 4, sampler=sampler, drop_last=True))
    assert [label for _, labels in loader for label in labels.tolist()] == expected[:12]
    assert len(loader) == 3


# -------------------------------------------------------------------------- the programs beside it


def test_two_devices_have_the_same_gradients() -> None:
    torch.manual_seed(0)
    naive = ModelParallelResNet50(("cpu", "cpu"))
    pipelined = PipelineParallelResNet50(("cpu", "cpu"), 4)
    pipelined.load_state_dict(naive.state_dict())
    images, labels = torch.randn(10, 3, 32, 32), torch.arange(10)
    for model in (naive, pipelined):
        F.cross_entropy(model(images), labels).backward()
    for one, other in zip(naive.parameters(), pipelined.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5)


def test_zero_bubble_trains_the_same_parameters(tmp_path: Path) -> None:
    args = zero_bubble.Args("resnet18", batch_size=11, micro_batches=5, image_size=32)
    equal = ranks.call(zero_bubble.compare, args, torch.device("cpu"), folder=tmp_path, ranks=3)
    assert equal == [True] * 3


def unsplit(args: torch_pipelining.Args) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = build(args.arch, 10, "group")
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), list[float]()
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    for _ in range(args.steps):
        loss = F.cross_entropy(model(images), torch.arange(args.batch_size) % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("schedule", torch_pipelining.SCHEDULES)
def test_torch_trains_like_the_unsplit_model(schedule: Any, tmp_path: Path) -> None:
    """Its loss and its gradients are divided by the global batch."""
    args = torch_pipelining.Args(schedule, "resnet18", 8, 4, 32, 3)
    expected = ranks.call(unsplit, args, folder=tmp_path / "plain")
    found = ranks.call(
        torch_pipelining.train, args, torch.device("cpu"), folder=tmp_path / "log", ranks=2
    )
    assert found == [pytest.approx(expected, rel=1e-4)] * 2


def test_the_timeline_has_every_action_once(tmp_path: Path) -> None:
    args, path = zero_bubble.Args("resnet18", 6, 3, 32), tmp_path / "timeline.png"
    charts, _ = ranks.call(
        timeline.main, args, torch.device("cpu"), path, folder=tmp_path / "log", ranks=2
    )
    for events, kinds in zip(charts.values(), ("FB", "FB", "FIW"), strict=True):
        assert Counter(event[:3] for event in events) == Counter(product(range(2), kinds, range(3)))
        for stage in range(2):
            own = sorted(event[3:] for event in events if event.stage == stage)
            assert all(end <= start for (_, end), (start, _) in pairwise(own))
        assert 0 < timeline.bubble(events) < 1
    assert path.read_bytes().startswith(b"\x89PNG")
