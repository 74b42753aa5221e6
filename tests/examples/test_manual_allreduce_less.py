"""manual_allreduce_sgd with fewer bytes and fewer messages: against the exact ways, and loops in one process."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from examples.manual_allreduce_sgd import local
from examples.manual_allreduce_sgd.per_rank import own_row
from tests.conftest import Programs
from tests.examples.manual_allreduce_less_jobs import LESS
from tests.runs import NO_GPU, losses, result

TRAIN = ("-m", "examples.manual_allreduce_sgd")
JOBS = ("-m", "tests.examples.manual_allreduce_less_jobs")


def test_nothing_is_lost_and_references_are_equalled(programs: Programs) -> None:
    assert programs.run(*JOBS, "checks", "--nproc", 3).stdout == "holds\n"


def test_trainings_equal_others_where_they_must(programs: Programs, tmp_path: Path, small: Path) -> None:
    """The run of one process is the reference; each writes its result only if all ranks hold the same parameters."""
    for nproc in (1, 3):
        programs.run(*JOBS, "trainings", "--nproc", nproc, "--dataset", small, "--folder", tmp_path / str(nproc))
    alone, three = tmp_path / "1", tmp_path / "3"
    ring = losses(alone / "ring")
    assert losses(alone / "local-sgd") == ring, "plain SGD"
    torch.testing.assert_close(losses(alone / "outer steps of 1"), ring, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses(three / "meets at every step"), ring, rtol=1e-4, atol=1e-5)
    apart = losses(three / "local-sgd")
    torch.testing.assert_close(losses(three / "outer steps of 1"), apart, rtol=1e-4, atol=1e-5)
    # A product with the mean is the mean of products, so that PowerSGD does not depend on the ranks.
    torch.testing.assert_close(losses(three / "powersgd"), losses(alone / "powersgd"), rtol=1e-3, atol=1e-4)
    for way in LESS:
        different = max(abs(a - b) for a, b in zip(losses(three / way), losses(three / "ring"), strict=True))
        assert different > 1e-3, "these are other trainings"
        assert losses(three / way)[-1] < 0.5 * losses(three / way)[0]
    sent = {way: result(three / way)["bytes_sent"] for way in ("ring", *LESS, "meets at every step")}
    length = sent["ring"] / (27 * 4 * 4 / 3)  # 27 steps of 2 (W - 1) / W messages of 4 bytes
    assert sent["top-k"] == 27 * 2 * 8 * round(0.01 * length)
    assert sent["meets at every step"] == sent["ring"]
    assert sent["local-sgd"] == sent["diloco"] == 2 * 3 * sent["ring"] / 27, "at steps 8 and 9 of each epoch"
    assert 0 < sent["powersgd"] < 0.15 * sent["ring"]


def test_a_run_that_is_cut_off_and_resumed_is_bit_identical(programs: Programs, tmp_path: Path, small: Path) -> None:
    """In the middle of H steps, where the ranks' models differ, as do the errors that they remember."""
    done = programs.run(*JOBS, "resumes", "--nproc", 3, "--dataset", small, "--folder", tmp_path)
    assert re.findall(r"resumed from .* at step (\d+)", done.stdout) == ["12"] * len(LESS)
    for way in LESS:
        before, after = tmp_path / way, tmp_path / f"{way}-resumed"
        assert result(before)["parameter_hash"] == result(after)["parameter_hash"]
        assert losses(before) == losses(after)


@pytest.fixture
def world_of_one() -> object:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_diloco_equals_its_formula() -> None:
    """Nesterov's momentum of the outer steps, written out for one parameter."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = SGD(model.parameters(), 0.1)
    way = local.DiLoCo(model, optimizer, every=2, lr=0.7, momentum=0.9)
    nn.init.constant_(model.weight, 3.0)  # as by --init
    common, velocity = 3.0, 0.0
    for _ in range(4):
        inner = common
        for _ in range(2):
            optimizer.zero_grad()
            (model.weight**2).sum().backward()
            way.average()
            optimizer.step()
            way.after_step()
            inner -= 0.1 * 2 * inner
        gradient = common - inner
        velocity = 0.9 * velocity + gradient
        common -= 0.7 * (gradient + 0.9 * velocity)
        assert model.weight.item() == pytest.approx(common, rel=1e-5)


@pytest.mark.usefixtures("world_of_one")
def test_another_number_of_ranks_keeps_the_mean() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert own_row(rows).tolist() == [2.0, 4.0]
    assert own_row(rows[:1]).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-a", "flat", "--compress", "top-k"], "--compress top-k does not go with flat: use ring"),
        (["-a", "diloco", "--compress", "powersgd"], "--compress powersgd does not go with diloco: use ring"),
        (["--every", 4], "--every is for diloco and local-sgd: leave it out"),
        (["--compress", "top-k", "--share", 2], "--share 2: give a number from 0 to 1"),
        (["--compress", "top-k", "--precision", "fp16"], "--precision fp16: .* use --precision fp32 or bf16"),
        (["-a", "shared-memory", "--precision", "fp16"], "--precision fp16: .* share .* or --compress fp16, .*"),
    ],
)
def test_bad_input_is_one_line(programs: Programs, tmp_path: Path, flags: list[object], words: str) -> None:
    done = programs.run(*TRAIN, *flags, "--out", tmp_path, code=2)
    assert re.fullmatch(rf"error: {words}\n", done.stderr.removeprefix(NO_GPU)), done.stderr
