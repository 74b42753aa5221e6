"""Device, backend and threads of a rank; a rendezvous after torchrun's restart."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import rank
from common.launch import NodeArgs, Place, RunArgs, UserError
from common.rank import choose_device, local_batch_size

NCCL = "cpu:gloo,cuda:nccl"
ALONE, TWO_BY_TWO = Place(1, 1, 2, 2, "file://x"), Place(3, 1, 4, 2, "tcp://x:1")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(os, "environ", variables := dict[str, Any]())
    monkeypatch.setattr(torch, "set_num_threads", lambda n: variables.update(threads=n))
    monkeypatch.setattr(rank, "cpu_count", lambda: 9)
    return variables


@pytest.mark.parametrize(
    ("devices", "args", "here", "env", "expected"),
    [
        (0, RunArgs(), ALONE, {}, ("cpu", "gloo")),
        (2, RunArgs(), ALONE, {}, ("cuda:1", NCCL)),
        (2, RunArgs(device="cpu"), ALONE, {}, ("cpu", "gloo")),
        (1, RunArgs(), ALONE, {}, ("cuda:0", "gloo")),  # NCCL refuses a shared device
        (1, RunArgs(), ALONE, {"SLURM_STEP_NUM_TASKS": "2"}, ("cuda:0", NCCL)),  # one for each
        (1, RunArgs(), ALONE, {"SLURM_PROCID": "0"}, ("cuda:0", "gloo")),  # in a batch script
        (2, RunArgs(), TWO_BY_TWO, {}, ("cuda:1", NCCL)),
        (8, RunArgs(), TWO_BY_TWO, {}, ("cuda:1", NCCL)),
        (0, RunArgs(), Place(1, 1, 4, 2, "tcp://x:1"), {}, ("cpu", "gloo")),
        (2, NodeArgs(dist_backend="gloo"), ALONE, {}, ("cuda:1", "gloo")),
        (1, NodeArgs(dist_backend="nccl"), ALONE, {}, ("cuda:0", NCCL)),
        (0, NodeArgs(dist_backend="gloo"), ALONE, {}, ("cpu", "gloo")),
        (0, RunArgs(device="cuda"), ALONE, {}, "--device cuda"),
        (0, NodeArgs(dist_backend="nccl"), ALONE, {}, "--dist-backend nccl"),
        (2, NodeArgs(dist_backend="nccl", device="cpu"), ALONE, {}, "--dist-backend nccl"),
    ],
)
def test_device_and_backend(
    devices: int,
    args: RunArgs,
    here: Place,
    env: dict[str, str],
    expected: Any,
    environment: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    environment.update(env)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            choose_device(args, here)
        return
    device, backend = choose_device(args, here)
    assert (str(device), backend) == expected
    assert chosen == [device] * (device.type == "cuda")
    # Ranks of one machine listen on no address that others could reach.
    assert ("GLOO_SOCKET_IFNAME" in environment) == (here is ALONE)


@pytest.mark.parametrize(
    ("env", "here", "threads"),
    [
        ({}, ALONE, 4),
        ({}, TWO_BY_TWO, 4),
        ({}, Place(0, 0, 16, 16, ""), 1),
        ({"OMP_NUM_THREADS": "3"}, ALONE, 3),
        ({"OMP_NUM_THREADS": "1"}, ALONE, 1),
        # torchrun sets 1 if the user does not; the bits of a training depend on the number.
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, ALONE, 4),
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, ALONE, 2),
    ],
)
def test_threads(env: dict[str, str], here: Place, threads: int, environment: Any) -> None:
    environment.update(env)
    choose_device(RunArgs(device="cpu"), here)
    assert environment["threads"] == threads


def test_a_slow_loader_is_no_lost_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    text, code = rank._explain(RuntimeError("DataLoader timed out after 5.0 seconds"), tmp_path)
    assert (code, text.split("; ")[0]) == (75, "error: rank 3: the data loader does not respond")


def test_batches_are_divided_equally() -> None:
    assert local_batch_size(120, 3) == 40
    with pytest.raises(UserError, match="--batch-size 100 is not divisible by 3 ranks; use 102"):
        local_batch_size(100, 3)


def test_elastic_job_changes_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps its store, with the IDs of the attempt that had 4 ranks."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    store = dist.HashStore()
    for key in range(4):
        store.set(f"participant/{key}", f"{key}/4")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(rank._join, store, Place(0, 0, 2, 2, ""), 9.0)
        store.wait(["participants"])  # rank 0 has published rank 1's old ID
        second = rank._join(store, Place(1, 1, 2, 2, ""), 9.0)
    first.result().set("key", "value")
    assert second.get("key") == b"value"
