"""The input by several loader processes: what is counted, and how it is drawn."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import imagenet_input, views
from benchmarks.charts import Lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top, noise = tmp_path_factory.mktemp("train"), np.random.default_rng(0)
    for number in range(70):
        (top / f"class{number % 2}").mkdir(exist_ok=True)
        pixels = noise.integers(0, 256, (48, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(top / f"class{number % 2}" / f"{number}.jpg")
    return top


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_in_advance_at_both_ends_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ours: bool, workers: int
) -> None:
    """70 images are two whole batches of 32: the clock sees three passes of them, whoever loads."""
    times = iter((100.0, 104.0))
    monkeypatch.setattr(imagenet_input, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    found = imagenet_input.measure_workers(folder, ours, None, "nvimgcodec", workers)
    assert found == {"images_per_second": 48.0, "images": 192, "wall_seconds": 4.0}


def test_the_chart_has_a_line_per_program() -> None:
    def summary(peer: float, ours: float) -> dict[str, Any]:
        medians = {
            "pytorch/examples imagenet": {"images_per_second": peer},
            "ours, uint8": {"images_per_second": ours, "peer_ratio": ours / peer},
        }
        return {"medians": medians}

    found = {"1": summary(100, 200), "2": summary(200, 500), "4": summary(200, 600), "8": summary(200, 500)}
    (chart,) = views.loader_processes(found)
    assert isinstance(chart, Lines)
    assert chart.title == "1 to 8 loader processes: 2 to 3 times as fast"
    assert {line.name: (line.xs, line.ys) for line in chart.lines} == {
        "pytorch/examples imagenet": ([1, 2, 4, 8], [100, 200, 200, 200]),
        "ours, uint8": ([1, 2, 4, 8], [200, 500, 600, 500]),
    }
    assert list(views.loader_processes({})) == [], "results that were made before it was measured"
