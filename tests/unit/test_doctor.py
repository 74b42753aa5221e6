"""tools.doctor: a healthy machine is found healthy; each fault is named, with a remedy."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tools import doctor


def wrong(findings: Iterator[doctor.Finding]) -> dict[str, str]:
    """Return the level of what is not fine, by its text up to ": "."""
    found = [finding for finding in findings if finding.level != "ok"]
    assert all(finding.remedy for finding in found)
    return {finding.text.partition(": ")[0]: finding.level for finding in found}


def test_a_machine_with_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 8.5e9)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=1e9))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (-1, -1))
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/" + 74 * "x")
    assert wrong(doctor.check_machine(8)) == {}
    assert wrong(doctor.check_machine(9)) == {"memory": "warning"}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=64e6))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1023, 2048))
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/" + 75 * "x")
    levels = {str(doctor.SHM): "warning", "open files": "warning", "temporary files": "error"}
    assert wrong(doctor.check_machine(1)) == levels


def test_tmpdir(tmp_path: Path) -> None:
    """The limit is that of multiprocessing's sockets."""
    for length, fits in ((doctor.TMPDIR_LIMIT, True), (doctor.TMPDIR_LIMIT + 1, False)):
        folder = tmp_path / ("x" * (length - len(str(tmp_path)) - 1)) / "pymp-12345678"
        folder.mkdir(parents=True)
        with nullcontext() if fits else pytest.raises(OSError, match="too long"):
            Listener(str(folder / "listener-12345678"), "AF_UNIX").close()


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"meminfo": "MemAvailable:   4000 kB\n", "memory.max": "3000000\n"}
    texts["memory.current"] = "1000000\n"
    monkeypatch.setattr(Path, "read_text", lambda self: texts[self.name])
    assert doctor.free_memory() == 2_000_000
    texts["memory.max"] = "max\n"
    assert doctor.free_memory() == 4_096_000


def test_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ranks.free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert doctor.check_master("127.0.0.1", port).text.endswith("accepts connections")
    assert "this machine" in doctor.check_master("127.0.0.1", port).text
    assert doctor.check_master("host.invalid", port).level == "error"

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    finding = doctor.check_master("192.0.2.1", 29500)  # not an address of this machine
    assert (finding.level, "start node 0 first" in finding.remedy) == ("error", True)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(_: int, device: str) -> torch.Tensor:
        if device == "cuda:2":
            raise RuntimeError("CUDA error: no kernel image is available\nmore lines")
        return torch.zeros(1)

    free = [80e9, 60e9, 80e9]
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (free[number], 80e9))
    one, two = "cuda:1 GPU 1", "cuda:2 GPU 2"
    assert wrong(doctor.check_devices("auto", 0, 1)) == {one: "warning", two: "error"}
    each = [wrong(doctor.check_devices("auto", rank, 3)) for rank in range(3)]
    assert each == [{}, {one: "warning"}, {two: "error"}]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert wrong(doctor.check_devices("cuda", 0, 1)) == {"torch found no CUDA device": "error"}


def job(fault: str, folder: Path) -> dict[str, str]:
    """Check a job of which rank 1 has a fault."""
    out, patch = folder / "out", pytest.MonkeyPatch()
    if dist.get_rank() == 1:
        if fault == "version":
            patch.setattr(torch, "__version__", "2.11.0")
        if fault == "clock":
            now = time.time
            patch.setattr(time, "time", lambda: now() + 3)
        if fault == "folder":
            out = folder / "other"
        if fault == "sum":
            reduce = dist.all_reduce
            patch.setattr(dist, "all_reduce", lambda values: reduce(values.mul_(2)))
    return wrong(doctor.check_job(torch.device("cpu"), out))


@pytest.mark.parametrize(
    ("fault", "text", "level", "on"),
    [
        ("none", "", "", []),
        ("version", "differs from rank 0", "error", [1]),
        ("clock", "clocks", "warning", [0, 1]),
        ("folder", "is not shared with rank 0", "error", [1]),
        ("sum", "all_reduce of 2 rank(s) on cpu", "error", [0, 1]),
    ],
)
def test_a_job_with_a_fault(
    tmp_path: Path, fault: str, text: str, level: str, on: list[int]
) -> None:
    found = ranks.call(job, fault, tmp_path, folder=tmp_path / "log", ranks=2)
    for rank, findings in enumerate(found):
        assert [text in name for name in findings] == [True] * (rank in on)
        assert set(findings.values()) <= {level}
    assert not list(tmp_path.glob("out/.doctor*"))


def test_equal_findings_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    machine, rank = doctor.Finding("ok", "machine"), doctor.Finding("ok", "rank")
    fault = doctor.Finding("error", "fault", "remedy")
    doctor.report([[machine, rank], [rank, fault], [machine, rank], [rank]], ranks_per_node=2)
    said = "ok      machine\nok      rank\nerror   fault (rank 1); remedy\n"
    assert capsys.readouterr().out == said


def program(rank: int, local_rank: int, port: str, out: Path) -> None:
    """Run one of two ranks, on one machine or, with local rank 0, on two."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(local_rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(1 + local_rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = port
    doctor.main_worker(local_rank, doctor.Args(out, "127.0.0.1", int(port), "cpu", timeout=5.0))


def test_rank_0_reports(tmp_path: Path) -> None:
    job = (str(ranks.free_port()), tmp_path)
    codes, (report, silence) = ranks._forked([(program, r, r, *job) for r in (0, 1)], tmp_path)
    assert codes == [0, 0], report + silence
    assert "all_reduce of 2 rank(s)" in report
    assert "error" not in report
    assert silence == ""


def test_an_error_ends_all_ranks_with_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = (str(ranks.free_port()), tmp_path / "file" / "out")
    codes, texts = ranks._forked([(program, r, 0, *job) for r in (0, 1)], tmp_path)
    assert codes == [2, 2]
    assert "".join(texts).count("Not a directory; use another folder") == 1
    assert "".join(texts).count("error: a run would fail") == 1


def test_an_error_of_one_rank_ends_all_ranks_with_2(tmp_path: Path) -> None:
    port = str(ranks.free_port())
    jobs = [(program, rank, 0, port, tmp_path / f"out{rank}") for rank in (0, 1)]
    codes, texts = ranks._forked(jobs, tmp_path)
    assert codes == [2, 2]
    assert "out1 is not shared with rank 0 (rank 1); mount the same folder" in texts[0]


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_machine_reports_if_the_ranks_cannot_connect(local_rank: int, tmp_path: Path) -> None:
    job = (program, 1, local_rank, str(ranks.free_port()), tmp_path)
    codes, (text,) = ranks._forked([job], tmp_path)
    assert codes == [2]
    assert ("memory: " in text) == (local_rank == 0)
    assert text.count("error: the ranks cannot connect: node 0 did not accept connections") == 1
