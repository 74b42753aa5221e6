"""A table: the place in the job under each launcher."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from common.launch import place as place_module
from common.launch.errors import UserError
from common.launch.flags import Launch
from common.launch.place import Place
from common.launch.resolve import first_host, resolve

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "3",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
}
BATCH = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "3",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-0.job",
    "PET_MASTER_PORT": "29500",
}
TCP = "tcp://node0:1234"


def place(flags: Launch, env: Mapping[str, str], devices: int = 0) -> Place:
    return resolve(flags, env, lambda: devices)


@pytest.mark.parametrize(
    ("flags", "env", "expected"),
    [
        # plain: a world of one
        ({}, {}, {"launcher": "plain", "world_size": 1, "rank": 0, "num_nodes": 1, "launched": True, "loopback": True}),
        # spawn on one machine
        ({"nproc": 1}, {}, {"launcher": "spawn", "world_size": 1, "launched": False}),
        (
            {"nproc": 4},
            {},
            {"launcher": "spawn", "world_size": 4, "local_world_size": 4, "host": "127.0.0.1", "port": 0},
        ),
        ({"multiprocessing_distributed": True}, {}, {"launcher": "spawn", "world_size": 1}),
        # spawn on several nodes, as in pytorch/examples: --world-size counts nodes
        (
            {"nproc": 2, "world_size": 3, "rank": 2, "dist_url": TCP},
            {},
            {
                "world_size": 6,
                "rank": 4,
                "num_nodes": 3,
                "node_rank": 2,
                "host": "node0",
                "port": 1234,
                "loopback": False,
            },
        ),
        (
            {"world_size": 2, "rank": 1, "dist_url": "tcp://127.0.0.1:1234"},
            {},
            {"launcher": "spawn", "world_size": 2, "rank": 1, "local_world_size": 1, "loopback": True},
        ),
        (
            {"world_size": 1, "rank": 0, "dist_url": TCP, "multiprocessing_distributed": True},
            {},
            {"world_size": 1, "num_nodes": 1},
        ),
        # env:// : nodes from WORLD_SIZE and RANK when the flags are -1
        (
            {"dist_url": "env://", "nproc": 2},
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "99"},
            {"world_size": 4, "rank": 2, "node_rank": 1, "host": "node0", "port": 99},
        ),
        (
            {},
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node0"},
            {"launcher": "spawn", "world_size": 2, "rank": 1, "local_world_size": 1, "port": 29500},
        ),
        # torchrun
        (
            {},
            TORCHRUN,
            {
                "launcher": "torchrun",
                "world_size": 8,
                "rank": 5,
                "local_rank": 1,
                "num_nodes": 2,
                "node_rank": 1,
                "local_world_size": 4,
            }
            | {"host": "node0", "port": 29400, "store_hosted": True, "attempt": 3, "launched": True, "warnings": ()},
        ),
        # torchrun inside a pod: its variables count, not the PET_* that configured it
        ({}, TORCHRUN | PET, {"launcher": "torchrun", "world_size": 8, "rank": 5}),
        # the rank is read, not computed: nodes may have different numbers of processes
        ({}, TORCHRUN | {"RANK": "6", "LOCAL_WORLD_SIZE": "3"}, {"rank": 6, "world_size": 8, "local_world_size": 3}),
        # SLURM
        (
            {},
            SLURM,
            {
                "launcher": "slurm",
                "world_size": 4,
                "rank": 3,
                "local_rank": 1,
                "num_nodes": 2,
                "node_rank": 1,
                "local_world_size": 2,
            }
            | {"host": "gpu07", "port": 22345, "store_hosted": False, "launched": True},
        ),
        ({}, SLURM | {"SLURM_NNODES": "1"}, {"host": "127.0.0.1", "loopback": True}),
        ({}, SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}, {"host": "10.0.0.1", "port": 5}),
        ({}, SLURM | {"SLURM_TASKS_PER_NODE": "3,1"}, {"local_world_size": 1}),
        ({}, SLURM | {"SLURM_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "0"}, {"local_world_size": 3}),
        ({}, SLURM | {"SLURM_TASKS_PER_NODE": "1(x2),4,2(x3)", "SLURM_NODEID": "2"}, {"local_world_size": 4}),
        (
            {},
            SLURM | {"SLURM_TASKS_PER_NODE": "3,1", "SLURM_STEP_TASKS_PER_NODE": "2,2"},
            {"local_world_size": 2},
        ),
        # cyclic: task 1 is the first of the second node
        (
            {},
            SLURM | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
            {"rank": 1, "local_rank": 0, "node_rank": 1, "local_world_size": 2},
        ),
        # a step that uses a part of the allocation
        (
            {},
            SLURM
            | {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_NODELIST": "gpu[05,08]",
                "SLURM_PROCID": "1",
            },
            {"world_size": 2, "num_nodes": 2, "host": "gpu05"},
        ),
        # the steps of a job meet at ports of their own
        ({}, SLURM | {"SLURM_STEP_ID": "1"}, {"launcher": "slurm", "port": 23354}),
        ({}, SLURM | {"SLURM_STEP_ID": "9"}, {"port": 21426}),
        # a batch script, and a shell in an allocation, have a number of tasks, but srun has not started them
        (
            {},
            BATCH,
            {
                "launcher": "plain",
                "world_size": 1,
                "warnings": ("SLURM_NTASKS=4, but srun has not started this: it trains in one process",),
            },
        ),
        ({"nproc": 2}, BATCH, {"launcher": "spawn", "world_size": 2, "warnings": ()}),
        # a SLURM allocation of one task does not decide the world
        ({"nproc": 2}, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {"launcher": "spawn", "world_size": 2}),
        # a job's number alone is no task
        ({}, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "12345"}, {"launcher": "plain"}),
        # PET_* without torchrun
        (
            {},
            PET,
            {
                "launcher": "spawn",
                "world_size": 6,
                "rank": 3,
                "num_nodes": 2,
                "node_rank": 1,
                "host": "job-0.job",
                "port": 29500,
            },
        ),
        ({}, {"PET_NPROC_PER_NODE": "2"}, {"launcher": "spawn", "world_size": 2, "num_nodes": 1, "host": "127.0.0.1"}),
        ({}, {"PET_NNODES": "1:1", "PET_NPROC_PER_NODE": "cpu"}, {"world_size": 1}),
        # in a pod of several, beside its training: a job of its own, at a port that is free
        ({"world_size": 1}, PET, {"world_size": 3, "num_nodes": 1, "rank": 0, "host": "127.0.0.1", "port": 0}),
    ],
)
def test_places(flags: dict[str, Any], env: dict[str, str], expected: dict[str, Any]) -> None:
    found = place(Launch(**flags), env)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_cyclic_task_keeps_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun has given the ranks out already: they are read, not computed from the node."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(place_module, "_current", None)
    task = place(Launch(), SLURM | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"})
    task.export(task.local_rank)
    exported = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")}
    assert exported == {"RANK": "1", "LOCAL_RANK": "0", "GROUP_RANK": "1", "WORLD_SIZE": "4"}


NODE_OF_TWO = {"nproc": 2, "world_size": 2, "rank": 1, "dist_url": TCP}


@pytest.mark.parametrize(
    ("flags", "env", "interface"),
    [
        ({"nproc": 2}, {}, "lo"),
        ({}, {}, "lo"),
        ({}, TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "RANK": "1", "WORLD_SIZE": "4"}, "lo"),
        ({}, SLURM | {"SLURM_NNODES": "1"}, "lo"),
        (NODE_OF_TWO, {}, None),
        (NODE_OF_TWO | {"dist_url": "tcp://127.0.0.1:1234"}, {}, "lo"),
        ({}, TORCHRUN, None),
        ({}, SLURM, None),
    ],
)
def test_one_machine_exchanges_by_loopback(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], env: dict[str, str], interface: str | None
) -> None:
    """Whatever address its host name has: gloo would take that one's interface, which others may reach."""
    plain = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
    monkeypatch.setattr(os, "environ", plain)
    monkeypatch.setattr(place_module, "_current", None)
    monkeypatch.setattr(sys, "platform", "linux")
    found = place(Launch(**flags), env)
    found.export(found.local_rank)
    assert {os.environ.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL")} == {interface}


def test_one_process_per_device() -> None:
    assert place(Launch(multiprocessing_distributed=True), {}, devices=8).world_size == 8
    flags = Launch(multiprocessing_distributed=True, world_size=2, rank=1, dist_url=TCP)
    found = place(flags, {}, devices=4)
    assert (found.world_size, found.rank) == (8, 4)  # world size = nodes x devices, rank = node x devices + device
    assert [found.worker(device).rank for device in range(4)] == [4, 5, 6, 7]
    assert place(Launch(), {"PET_NPROC_PER_NODE": "gpu"}, devices=2).world_size == 2
    # The pod's variables say nothing of processes; and they do.
    pod = {name: value for name, value in PET.items() if name != "PET_NPROC_PER_NODE"}
    assert place(Launch(multiprocessing_distributed=True), pod, devices=8).world_size == 2 * 8
    assert place(Launch(multiprocessing_distributed=True), PET, devices=8).world_size == 2 * 3
    assert place(Launch(), pod, devices=8).world_size == 2
    for on_cpu in (Launch(device="cpu", multiprocessing_distributed=True), replace(flags, no_accel=True)):
        assert place(on_cpu, {}, devices=8).local_world_size == 1


def test_devices_are_not_counted_without_need() -> None:
    resolve(Launch(nproc=2), {}, lambda: pytest.fail("counting devices imports torch"))


@pytest.mark.parametrize("env", [TORCHRUN, SLURM])
def test_flags_that_a_launcher_overrules_warn(env: dict[str, str]) -> None:
    flags = Launch(nproc=2, world_size=3, rank=0, dist_url=TCP, multiprocessing_distributed=True)
    warned = [line.split()[0] for line in place(flags, env).warnings]
    assert warned == ["--nproc", "--multiprocessing-distributed", "--world-size", "--rank", "--dist-url"]
    assert place(Launch(), env).warnings == ()


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        ({"nproc": 0}, {}, "--nproc 0"),
        ({"world_size": 0}, {}, "--world-size 0"),
        ({"rank": -2}, {}, "--rank -2"),
        ({"timeout": 0}, {}, "--timeout 0"),
        ({"timeout": float("inf")}, {}, "--timeout inf"),
        ({"timeout": 1e10}, {}, r"--timeout 1e\+10: give a positive number of seconds, at most 1e\+09"),
        ({"timeout": float("nan")}, {}, "--timeout nan"),
        ({"gpu": -1}, {}, "--gpu -1"),
        ({"threads": -1}, {}, "--threads -1"),
        ({"dist_backend": "nccl", "device": "cpu"}, {}, "nccl"),
        ({"world_size": 2, "rank": 2, "dist_url": TCP}, {}, "0 to 1"),
        ({"world_size": 2, "dist_url": TCP}, {}, "needs --rank"),
        ({"world_size": 2, "rank": 0}, {}, "needs --dist-url"),
        ({"dist_url": "tcp://node0"}, {}, "tcp://HOST:PORT"),
        ({"world_size": 2, "rank": 0, "dist_url": "tcp://node0:0"}, {}, "a port that they all know"),
        ({}, SLURM | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS='many'"),
        ({"dist_url": "tcp://node0:99999"}, {}, "tcp://HOST:PORT"),
        ({"dist_url": "udp://node0:9"}, {}, "tcp://HOST:PORT"),
        ({}, TORCHRUN | {"RANK": "x"}, "RANK='x'"),
        ({}, TORCHRUN | {"RANK": "8"}, "ranks go from 0 to 7"),
        ({}, SLURM | {"SLURM_JOB_NODELIST": ""}, "MASTER_ADDR"),
        ({}, {"PET_NNODES": "1:2"}, "elastic"),
        ({}, {"PET_NPROC_PER_NODE": "many"}, "many"),
        ({}, {"PET_NPROC_PER_NODE": "0"}, "--nproc 0"),
        ({}, PET | {"PET_MASTER_PORT": "http"}, "PET_MASTER_PORT='http'"),
        ({}, PET | {"PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT=99999"),
        ({"nproc": 2, "dist_url": "env://"}, {"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({}, {"PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1"}, "0 to 0"),
    ],
)
def test_contradictions(flags: dict[str, Any], env: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        place(Launch(**flags), env)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-05,9],login", "gpu03"),
        ("n[1,5]-ib,x", "n1-ib"),
        ("r1-n[10]", "r1-n10"),
        ("", ""),
    ],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host
