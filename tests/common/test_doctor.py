"""The preflight: healthy machines are found healthy, and what is wrong is named with a remedy."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.doctor import findings, job, machine, preflight
from common.doctor.args import Args
from common.doctor.findings import Finding, Findings, Here
from common.launch.flags import Launch
from common.launch.place import Place
from tests.conftest import ROOT, Programs
from tests.runs import mutated

DOCTOR = ("-m", "common.doctor", "--json", "--device", "cpu")


def report(text: str) -> dict[str, Any]:
    return json.loads(text[text.index("{") :])


def wrong(text: str) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in report(text)["findings"] if finding["state"] == "error"}


def test_two_processes_are_examined_together(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(*DOCTOR, "--nproc", 2, "--out", tmp_path / "out", "--data", ROOT)
    found = report(done.stdout)
    assert (found["world_size"], found["nodes"], found["launcher"], found["errors"]) == (2, 1, "spawn", 0)
    states = {finding["check"]: finding for finding in found["findings"]}
    assert set(job.TOGETHER) - {"same versions"} <= set(states)  # that one speaks only when something is wrong
    assert {"versions", "device", "backends", "cores", "interfaces", "open files", "user", "data"} <= set(states)
    assert "all_reduce of 2 process(es) is right" in states["round trip"]["found"]
    assert states["versions"]["ranks"] == [0, 1]
    assert f"torch {torch.__version__.partition('+')[0]}" in states["versions"]["found"]
    assert list((tmp_path / "out").iterdir()) == []
    assert all(finding["remedy"] for finding in found["findings"] if finding["state"] != "ok")


def test_one_process_says_it_in_lines(programs: Programs, tmp_path: Path) -> None:
    done = programs.run("-m", "common.doctor", "--device", "cpu", "--out", tmp_path)
    assert "ok      round trip: gloo: all_reduce of 1 process(es) is right" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("0 error(s), ")


def test_what_would_fail_is_named(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {"NCCL_SOCKET_IFNAME": "none0"}
    words = ("--out", tmp_path / "file" / "out", "--data", tmp_path / "nowhere")
    found = wrong(programs.run(*DOCTOR, *words, code=1, env=env).stdout)
    assert found["output"]["found"] == f"{tmp_path}/file/out: Not a directory"
    assert found["data"]["found"] == f"{tmp_path}/nowhere: No such file or directory"
    assert found["interfaces"]["found"] == "NCCL_SOCKET_IFNAME=none0: no such interface"
    assert len(found) == 3
    assert all(finding["remedy"] for finding in found.values())

    found = wrong(programs.run(*DOCTOR, "--out", tmp_path, code=1, env={"GLOO_SOCKET_IFNAME": "none0"}).stdout)
    assert "interfaces" in found
    assert "process group" in found  # gloo needs it, so no more can be said


def test_what_a_node_knows_is_said_once_though_the_ranks_do_not_meet(
    programs: Programs, tmp_path: Path, free_port: int
) -> None:
    env = {"GLOO_SOCKET_IFNAME": "none0"}
    said = programs.run(*DOCTOR, "--nproc", 2, "--out", tmp_path, code=1, env=env).stdout
    assert {tuple(finding["ranks"]) for finding in json.loads(said)["findings"]} == {(0,)}, "one document"
    words = ("--world-size", 2, "--rank", 1, "--dist-url", f"tcp://127.0.0.1:{free_port}", "--timeout", 1)
    findings = json.loads(programs.run(*DOCTOR, *words, code=1).stdout)["findings"]
    assert {tuple(finding["ranks"]) for finding in findings} == {(1,)}
    by_check = {finding["check"]: finding["found"] for finding in findings}
    assert "user" in by_check, "what does not need the others"
    assert by_check["process group"].startswith("the first node, 127.0.0.1:")


def test_under_torchrun_no_rank_ends_before_its_node_has_spoken(programs: Programs, tmp_path: Path) -> None:
    """torchrun ends all as soon as one has ended."""
    late = '        remedy = "see the findings above'
    change = ("common/doctor/preflight.py", late, f"        __import__('time').sleep(2)\n{late}")
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *DOCTOR, "--out", tmp_path / "out")
    env = {"GLOO_SOCKET_IFNAME": "none0"}
    said = programs.run(*words, code=1, env=env, cwd=mutated(tmp_path / "project", change)).stdout
    assert {tuple(finding["ranks"]) for finding in json.loads(said)["findings"]} == {(0,)}


def test_nodes_that_do_not_share_a_folder_are_named(programs: Programs, tmp_path: Path, free_port: int) -> None:
    words = ("--nproc", 1, "--world-size", 2, "--dist-url", f"tcp://127.0.0.1:{free_port}")
    pair = [programs.start(*DOCTOR, *words, "--rank", rank, "--out", tmp_path / str(rank)) for rank in (0, 1)]
    first, second = (programs.finish(process, code=1) for process in pair)
    assert wrong(first.stdout)["output"]["found"] == f"{tmp_path}/1 is another folder than that of the main process"
    assert wrong(first.stdout)["output"]["ranks"] == [1]
    assert "findings" not in second.stdout


def test_a_sum_that_is_wrong_is_seen(programs: Programs, tmp_path: Path) -> None:
    broken = mutated(tmp_path / "broken", ("common/doctor/job.py", "dist.all_reduce(numbers)", "dist.barrier()"))
    done = programs.run(*DOCTOR, "--nproc", 2, "--out", tmp_path, code=1, cwd=broken)
    assert wrong(done.stdout)["round trip"]["found"] == "gloo: wrong sum of 1 numbers"


def here(num_nodes: int = 1, local_world_size: int = 1, data: Path | None = None) -> Here:
    """A process of a job of one process, or of another one."""
    world_size = num_nodes * local_world_size
    place = Place("plain", num_nodes, 0, local_world_size, world_size, 0, 0, "", 0, Launch())
    return Here(Args(data=data), place, torch.device("cpu"), "gloo")


def states(findings: Iterable[Finding]) -> list[str]:
    return [finding.state for finding in findings]


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "SHARED", tmp_path / "nowhere")
    assert states(machine.shared_memory(here())) == ["error"]
    monkeypatch.setattr(machine, "SHARED", tmp_path)
    for total, state in ((64_000_000, "warning"), (1_000_000_000, "ok")):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, total=total: SimpleNamespace(total=total))
        assert states(machine.shared_memory(here())) == [state]


def test_a_host_name_that_others_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolves(address: str) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (address, 0))])

    resolves("127.0.1.1")
    assert states(machine.host_name(here())) == ["ok"]
    assert states(machine.host_name(here(num_nodes=2))) == ["error"]
    resolves("10.0.0.7")
    assert states(machine.host_name(here(num_nodes=2))) == ["ok"]

    def fails(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert states(machine.host_name(here())) == ["warning"]
    assert states(machine.host_name(here(num_nodes=2))) == ["error"]


def test_interfaces_are_shown_with_their_addresses() -> None:
    assert machine.address_of("lo") == "127.0.0.1"
    assert machine.address_of("none0") == ""
    assert "lo 127.0.0.1" in next(iter(machine.interfaces(here()))).found


def test_limits_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert states(machine.limits(here()))[0] == "warning"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert set(states(machine.limits(here()))) == {"ok"}
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setattr(machine, "DEFAULT_PORT", taken.getsockname()[1])
        assert states(machine.ports(here())) == ["ok", "warning"]
    assert states(machine.ports(here())) == ["ok"]

    def forbidden(*_: object) -> socket.socket:
        raise PermissionError("as planned")

    monkeypatch.setattr(socket, "create_server", forbidden)
    with pytest.raises(PermissionError, match="as planned"):  # which `preflight` reports
        states(machine.ports(here()))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("apart", "state", "found"), [(0, "ok", "within 2 s"), (2, "ok", "within 2 s"), (3, "warning", "3 s apart")]
)
def test_clocks_that_differ_are_named(monkeypatch: pytest.MonkeyPatch, apart: int, state: str, found: str) -> None:
    monkeypatch.setattr(job, "gather_objects", lambda _: [1_800_000_000 + apart, 1_800_000_000])
    (finding,) = job.clocks(here())
    assert (finding.state, finding.found) == (state, found)


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.delenv("USER", raising=False)
    assert states(machine.user(here())) == ["warning"]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "trainer")
    assert states(machine.user(here())) == ["ok"]


def test_crowded_cores_and_an_empty_folder(tmp_path: Path) -> None:
    assert states(machine.processors(here())) == ["ok"]
    assert states(machine.processors(here(local_world_size=10_000))) == ["warning"]
    assert states(machine.data(here(data=tmp_path))) == ["error"]
    assert states(machine.data(here())) == []


def test_memory_is_that_of_the_machine_and_of_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_left", lambda: None)
    assert states(machine.memory(here(local_world_size=10_000))) == ["warning"]
    assert states(machine.memory(here())) == ["ok"]
    monkeypatch.setattr(machine, "memory_left", lambda: 999_999_999)
    assert states(machine.memory(here())) == ["warning"]


def test_a_package_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "PACKAGES", ("torch", "of_nobody"))
    assert findings.packages() == f"torch {version('torch')}, of_nobody is not installed"


def test_a_check_that_cannot_be_made_does_not_end_the_others() -> None:
    def broken(here: Here) -> Findings:
        raise OSError(5, "Input/output error")

    finding, _ = preflight.examine({"anything": broken, "backends": machine.backends}, here())
    assert (finding.check, finding.state) == ("anything", "error")
    assert "Input/output error" in finding.found


def test_a_reader_may_leave(programs: Programs) -> None:
    """`| head` that has seen enough: here one that reads nothing."""
    command = f"{sys.executable} -m common.doctor --json --device cpu | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
