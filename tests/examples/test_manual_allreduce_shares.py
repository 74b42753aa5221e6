"""manual_allreduce_sgd with unequal shares: the training of one process, however samples are divided."""

import re
from pathlib import Path

import pytest
import torch

from common.data.idx import idx_folder
from examples.manual_allreduce_sgd.shares import proportional
from tests.conftest import Programs
from tests.examples.manual_allreduce_shares_jobs import UNEVEN, WAYS
from tests.examples.test_manual_allreduce_sgd import parameters, plain_loop
from tests.runs import NO_GPU, losses, result

TRAIN = ("-m", "examples.manual_allreduce_sgd")
JOBS = ("-m", "tests.examples.manual_allreduce_shares_jobs")


@pytest.mark.parametrize("nproc", [2, 3])
def test_the_training_is_that_of_one_process(programs: Programs, tmp_path: Path, small: Path, nproc: int) -> None:
    done = programs.run(*JOBS, "trainings", "--nproc", nproc, "--dataset", small, "--folder", tmp_path)
    model, expected = plain_loop(idx_folder(small))
    for way in (*WAYS, "divides", "auto"):
        # The result is written only if every epoch has each sample once, and all ranks the same parameters.
        assert result(tmp_path / way)["steps"] == 27
        torch.testing.assert_close(losses(tmp_path / way), expected, rtol=2e-5, atol=1e-6)
        for name, value in parameters(tmp_path / way).items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert result(tmp_path / "divides")["shares"] == [int(share) for share in UNEVEN[nproc][0].split(",")]
    auto = result(tmp_path / "auto")["shares"]
    assert sum(auto) == 24
    assert f"shares of 24, as measured: {','.join(map(str, auto))} " in done.stdout
    assert f"batch 24 = {nproc} shares ({UNEVEN[nproc][0]})\n" in done.stdout
    apart = max(abs(a - b) for a, b in zip(losses(tmp_path / "unweighted"), expected, strict=True))
    assert apart > 1e-2, "a mean of means is another training"


def test_shares_follow_from_what_was_measured(programs: Programs, tmp_path: Path, small: Path) -> None:
    done = programs.run(*JOBS, "measured", "--nproc", 2, "--dataset", small, "--folder", tmp_path)
    (found,) = re.findall(r"^\[(\d+), (\d+)\]$", done.stdout, re.MULTILINE)
    fast, slow = map(int, found)
    assert fast + slow == 120
    assert (12 + fast) / (3 * (12 + slow)) == pytest.approx(1, abs=0.1), "both compute equally long"
    assert fast > 90, "three times as many would not be enough: a part of a step is the same for all"
    before, after = (result(tmp_path / name) for name in ("auto", "auto-resumed"))
    assert re.findall(r"resumed from .* at step (\d+)", done.stdout) == ["12"]
    assert before["shares"] == after["shares"]
    assert before["parameter_hash"] == after["parameter_hash"]
    assert losses(tmp_path / "auto") == losses(tmp_path / "auto-resumed")
    assert len(re.findall("as measured: ", done.stdout)) == 2, "the resumed run has the shares of the one before"


def test_every_rank_has_a_sample() -> None:
    assert proportional(24, [1.0, 1.0, 1.0]) == [8, 8, 8]
    assert proportional(24, [1e9, 1.0, 1e-9]) == [22, 1, 1]
    assert proportional(10, [1.0, 1.0, 1.0]) == [4, 3, 3]
    assert proportional(3, [5.0, 1.0, 1.0]) == [1, 1, 1]
    assert proportional(4, [4.0, 4.0, 1.0, 1.0]) == [1, 1, 1, 1]
    assert proportional(16, [10.0] * 4 + [1.0] * 4) == [3, 3, 3, 3, 1, 1, 1, 1]
    for ranks in range(2, 40):
        for slow in range(ranks):
            found = proportional(ranks + 3, [10.0] * (ranks - slow) + [1.0] * slow)
            assert sum(found) == ranks + 3
            assert min(found) >= 1


WORDS = "give equal, auto, or a whole number from 1 for each rank: 3,1"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shares", "3,0"], f"--shares 3,0: {WORDS}"),
        (["--shares", "3,-1"], f"--shares 3,-1: {WORDS}"),
        (["--shares", "3,,1"], f"--shares 3,,1: {WORDS}"),
        (["--shares", "much"], f"--shares much: {WORDS}"),
        (["--shares", "3,1", "-a", "diloco"], "--shares 3,1 does not go with diloco, whose ranks step by their own .*"),
        (["--shares", "3,1,1", "--nproc", 2], r"--shares 3,1,1: 3 for 2 rank\(s\); give one for each"),
        (
            ["--shares", "1,99", "-b", 24, "--nproc", 2],
            r"--shares 1,99: rank 0 would get no sample of --batch-size 24 \(global\); use 100 or more",
        ),
        (
            ["--shares", "auto", "-b", 1, "--nproc", 2],
            r"--shares auto: rank 0 would get no sample of --batch-size 1 \(global\); use 2 or more",
        ),
    ],
)
def test_bad_input_is_one_line(programs: Programs, tmp_path: Path, flags: list[object], words: str) -> None:
    done = programs.run(*TRAIN, *flags, "--out", tmp_path, code=2)
    assert re.fullmatch(rf"error: {words}\n", done.stderr.removeprefix(NO_GPU)), done.stderr
