"""Traces of steps: what is counted as computing, communication and loading."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tools.profile import breakdown, main


def event(name: str, start: float, end: float, cat: str = "cpu_op") -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": end - start, "cat": cat}


HOST = [
    event("ProfilerStep#11", 0, 1000, "user_annotation"),
    event("ProfilerStep#12", 1000, 2000, "user_annotation"),
    event("enumerate(DataLoader)#_SingleProcessDataLoaderIter", 0, 300, "user_annotation"),
    event("aten::stack", 100, 200),  # a part of loading
    event("aten::mm", 400, 800),
    event("aten::t", 500, 600),
]


@pytest.mark.parametrize(
    ("events", "line"),
    [
        (
            [event("gloo:all_reduce", 700, 1000, "user_annotation")],
            "1.0 ms per step: loading data 15%, CPU operators 20%, gloo 10%, other 55%",
        ),
        (
            [
                event("gemm", 600, 1200, "kernel"),
                event("ProfilerStep#11", 0, 2000, "gpu_user_annotation"),
                event("nccl:all_reduce", 300, 500),
                event("ncclDevKernel_AllReduce", 1000, 1400, "kernel"),
            ],
            "1.0 ms per step: GPU kernels 30%, NCCL 10%, loading data 15%, CPU operators 10%, "
            "other 35%",
        ),
    ],
)
def test_breakdown(events: list[Any], line: str) -> None:
    assert breakdown([*HOST, *events]) == line


def test_each_rank_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--epochs", "2", "--profile", "3"]
    run = ranks.run("mnist_ddp_spawn", 2, flags, out=tmp_path / "out").done()
    for rank in range(2):
        (path,) = run.out.glob(f"profile/rank-{rank}.*.json.gz")
        trace = json.loads(gzip.decompress(path.read_bytes()))
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert names.count("gloo:all_reduce") >= 3
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
    (run.out / "profile/rank-0.1.pt.trace.json.gz").touch()  # an earlier trace is not read
    main(run.out)
    lines = capsys.readouterr().out.splitlines()
    parts = "N ms per step: loading data N%, CPU operators N%, gloo N%, other N%"
    assert [re.sub(r" [\d.]+", " N", line) for line in lines] == [
        f"rank-0: {parts}",
        f"rank-1: {parts}",
    ]
