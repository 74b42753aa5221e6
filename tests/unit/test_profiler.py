"""Traces of steps: what is counted as computing, communication and loading."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace as Object
from typing import Any

import pytest

from common.profiler import breakdown
from tests import ranks


def event(name: str, start: float, end: float, device: str = "CPU") -> Any:
    return Object(
        name=name, time_range=Object(start=start, end=end), device_type=f"DeviceType.{device}"
    )


HOST = [
    event("ProfilerStep*", 0, 1000),
    event("ProfilerStep*", 1000, 2000),
    event("enumerate(DataLoader)#_SingleProcessDataLoaderIter", 0, 300),
    event("aten::stack", 100, 200),  # a part of loading
]


@pytest.mark.parametrize(
    ("events", "cuda", "line"),
    [
        (
            [
                event("aten::mm", 400, 800),
                event("aten::t", 500, 600),
                event("gloo:all_reduce", 700, 1000),
            ],
            False,
            "1.0 ms per step: computing 20%, communication 10%, loading data 15%, other 55%",
        ),
        (
            [
                event("aten::mm", 400, 500),
                event("gemm", 600, 1200, "CUDA"),
                event("ProfilerStep*", 0, 2000, "CUDA"),
                event("nccl:all_reduce", 300, 500),
                event("ncclDevKernel_AllReduce", 1000, 1400, "CUDA"),
            ],
            True,
            "1.0 ms per step: computing 30%, communication 10%, loading data 15%, other 45%",
        ),
    ],
)
def test_breakdown(events: list[Any], cuda: bool, line: str) -> None:
    assert breakdown([*HOST, *events], cuda) == line


def test_each_rank_writes_a_trace(tmp_path: Path) -> None:
    flags = ["--epochs", "2", "--profile", "3"]
    run = ranks.run("mnist_ddp_spawn", 2, flags, out=tmp_path / "out").done()
    assert re.findall(r"^(rank \d): [\d.]+ ms per step: computing", run.text, re.MULTILINE) == [
        "rank 0",
        "rank 1",
    ]
    for rank in range(2):
        trace = gzip.decompress((run.out / f"profile/rank-{rank}.json.gz").read_bytes())
        names = [event.get("name", "") for event in json.loads(trace)["traceEvents"]]
        assert names.count("gloo:all_reduce") >= 3
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
