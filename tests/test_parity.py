"""Any number of ranks trains the model that a plain loop in one process trains."""

import functools
from pathlib import Path

import pytest
import torch
from pytest import approx

from tests import ranks
from tests.ranks import NO_CURVES
from tests.reference import Case, Reference, cases


def rows() -> list[tuple[Case, int]]:
    """Return each case with the numbers of ranks to compare, two nodes only once per example."""
    return [(case, n) for case in cases() for n in case.ranks() if n < 4 or case.number == 0]


@functools.cache
def plain(case: Case, data: Path) -> Reference:
    """Run the plain loop once per case, with the ranks' libraries and one thread."""
    return ranks.call(case.train, data / str(case), folder=data / f"{case}.log")


@pytest.mark.parametrize(("case", "world_size"), rows(), ids=str)
def test_ranks_train_like_a_plain_loop(
    case: Case, world_size: int, data: Path, tmp_path: Path
) -> None:
    expected = plain(case, data)
    flags = case.flags(data / str(case))
    nodes = 2 if world_size == 4 else 1
    out = tmp_path / "out"
    run = ranks.run(
        case.example, world_size, flags, out=out, nodes=nodes, mutate=[NO_CURVES]
    ).done()

    assert run.losses[:10] == approx(expected.losses[:10], rel=1e-5)
    assert run.losses == approx(expected.losses, rel=100 * case.tolerance)
    assert run.result["metrics"] | expected.metrics == approx(run.result["metrics"], rel=1e-3)
    if expected.predictions is not None:
        assert [int(row["prediction"]) for row in run.rows()] == expected.predictions
    state = run.checkpoint()["parts"]["model"]
    if expected.state:
        torch.testing.assert_close(state, dict(expected.state), rtol=0, atol=case.tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "world_size"), [row for row in rows() if row[0].number == 0 and row[1] < 3], ids=str
)
def test_gpu_trains_like_a_plain_loop(
    case: Case, world_size: int, data: Path, tmp_path: Path
) -> None:
    """Two ranks share the device if there is only one."""
    flags = case.flags(data / str(case))
    run = ranks.run(case.example, world_size, flags, out=tmp_path / "out", device="cuda").done()
    assert run.losses[:10] == approx(plain(case, data).losses[:10], rel=1e-3)
