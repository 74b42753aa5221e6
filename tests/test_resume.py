"""A run that is killed and resumed has the bits of an undisturbed run."""

import functools
import re
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import ranks
from tests.hooks import At
from tests.ranks import NO_CURVES
from tests.reference import Case, cases

Fate = tuple[int, float, int]  # rank, part of the whole run, signal
FATES: list[tuple[int, list[Fate]]] = [
    (2, [(1, 0.3, SIGKILL), (0, 0.9, SIGKILL)]),  # the second time in the last epoch
    (3, [(2, 0.4, SIGTERM), (1, 0.9, SIGKILL)]),  # with 3 ranks, DDP's buckets matter
    (1, [(0, 1.0, SIGTERM)]),  # in the last step: it stops after the evaluation
]


def rows() -> list[tuple[Case, int, list[Fate]]]:
    """Return the first case of each example with each fate, on at most as many ranks."""
    firsts = [case for case in cases() if case.number == 0]
    return [
        (case, max(n for n in case.ranks(parity=False) if n <= world_size), fate)
        for case in firsts
        for world_size, fate in FATES
    ]


def epoch_lines(*runs: ranks.Training) -> dict[str, str]:
    """Return the line of each epoch, without its speed."""
    text = "\n".join(run.text for run in runs)
    found: Any = re.findall(r"^(epoch \d+/\d+) (.*?)  [\d,]+ samples/s", text, re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize(
    ("case", "world_size", "fate"),
    rows(),
    ids=[f"{row[0]}-{row[1]}-{i}" for i, row in enumerate(rows())],
)
def test_resumed_run_has_the_same_bits(
    case: Case,
    world_size: int,
    fate: list[Fate],
    data: Path,
    tmp_path: Path,
) -> None:
    flags = [*case.flags(data / str(case)), "--checkpoint-every", "2"]
    run = functools.partial(ranks.run, case.example, world_size, mutate=[NO_CURVES])
    whole = run(flags, out=tmp_path / "whole").done()

    flags += ["--resume", "auto"]
    runs, steps = list[ranks.Training](), whole.result["steps"]
    for rank, part, signal in fate:
        first = 4 if signal == SIGKILL else 2  # after a checkpoint; SIGTERM makes its own
        step = max(first, 2 * round(part * steps / 2))  # even: the step before is in none
        fault = At(rank % world_size, min(steps, step), signal)
        cut = run(flags, out=tmp_path / "cut", fault=fault)
        others = 75 if signal == SIGKILL else 128 + signal
        expected = [others] * world_size
        if signal == SIGKILL:
            expected[fault.rank] = -SIGKILL
        assert cut.codes == expected, cut.text
        runs.append(cut)
        assert list((cut.out / "checkpoints").glob("step-*.pt")), cut.text
    resumed = run(flags, out=tmp_path / "cut").done()

    assert "resumed from" in resumed.text
    assert resumed.result["parameter_hash"] == whole.result["parameter_hash"]
    assert resumed.result["metrics"] == whole.result["metrics"]
    assert resumed.result["best"] == whole.result["best"]
    assert resumed.points() == whole.points()
    assert epoch_lines(*runs, resumed) == epoch_lines(whole)
    best, weights = (load_file(run.out / "best.safetensors") for run in (resumed, whole))
    torch.testing.assert_close(best, weights, rtol=0, atol=0)
    if (whole.out / "predictions.csv").exists():
        assert resumed.rows() == whole.rows()
