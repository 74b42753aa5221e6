"""Any number of CUDA devices: no documented command is refused, whether there are 0, 1, 2 or 8."""

import functools
import importlib
import importlib.util
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from common.launch import device, messages, place
from common.launch.args import parse
from common.launch.errors import UserError
from common.launch.flags import Launch
from common.launch.resolve import resolve
from examples.manual_allreduce_sgd import allreduce
from examples.mnist_dataparallel.args import device_names
from examples.mnist_dataparallel.devices import choose_devices, with_cpu_named
from examples.resnet_pipeline import toy
from tests.conftest import ROOT
from tests.docs.markdown import PAGES, shell_blocks
from tests.docs.test_commands import expanded

LETTERS = {"N": "4", "M": "2", "R": "0", "P": "2", "D": "2", "HOST0": "127.0.0.1"}  # of the pages' tables
NAMED = re.compile(r"--devices ([^-]+)|CUDA_VISIBLE_DEVICES=(\S+)|(--dist-backend nccl|--device cuda|--gpu \d)")
PLACEHOLDERS = re.compile(r"examples\.(NAME|my_\w+)")  # the reader puts a name there
OLD, NEW = (2, 28, 9), (2, 30, 7)


class Command(NamedTuple):
    """A command that a page shows."""

    text: str
    launcher: tuple[str, ...]
    module: str
    flags: tuple[str, ...]


@functools.cache
def documented() -> tuple[Command, ...]:
    makefile = (ROOT / "Makefile").read_text().replace("$(OUT)", "runs/demo")
    found = [f"python -m {demo}" for demo in re.findall(r"python -m (examples.mnist_ddp_spawn.*)", makefile)]
    assert found, "make demo"
    for page in PAGES:
        text = page.read_text()
        for block in shell_blocks(text):
            found += expanded(block.commands)
        found += re.findall(r"`((?:srun |torchrun |python )[^`]*-m [^`]+)`", text)
    return tuple(dict.fromkeys(filter(None, map(command, found))))


def command(text: str) -> Command | None:
    """The part of a command line that is about ranks and devices; None where it starts no program of this kind."""
    text = re.sub(r"\s*([|&;>]|\d>).*", "", text)
    text = re.sub(r" --config \S+", "", text)  # a file that an earlier command has written
    started = re.search(r"(python|torchrun)\b.* -m ((examples|common\.doctor)[\w.]*)", text)
    if not started or PLACEHOLDERS.fullmatch(started[2]) or re.search(r"\.\.\.|\$", text):
        return None
    module = started[2]
    words = [LETTERS.get(word, word.replace("HOST0", "127.0.0.1")) for word in shlex.split(text)]
    position = words.index(module)
    return Command(text, tuple(words[: position - 1]), module, tuple(words[position + 1 :]))


@functools.cache  # the flags do not depend on the machine: read once for all numbers of devices
def arguments(given: Command) -> Any:
    """The command's flags, read by its program's own class of flags; None where it has no ranks."""
    spec = importlib.util.find_spec(given.module)
    assert spec is not None, given.text
    name = f"{given.module}.__main__" if spec.submodule_search_locations else given.module
    module = importlib.import_module(name)
    started = re.search(r"\bstart\((\w+), ", Path(str(module.__file__)).read_text())
    return parse(getattr(module, started[1]), list(given.flags)) if started else None


def ranks(given: Command, args: Any, devices: int) -> Iterator[place.Place]:
    """The places of all ranks of the node that the command starts."""
    words = dict(zip(given.launcher, given.launcher[1:], strict=False))
    if "torchrun" in given.launcher:
        count, nodes = int(words.get("--nproc-per-node", 1)), int(words.get("--nnodes", 1))
        env = {"WORLD_SIZE": str(count * nodes), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "10.0.0.1"}
        for rank in range(count):
            yield resolve(args.launch, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, lambda: devices)
    elif "srun" in given.launcher:
        env = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"}
        for rank in range(4):
            yield resolve(args.launch, env | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}, lambda: devices)
    else:
        node = resolve(args.launch, {}, lambda: devices)
        for local_rank in range(node.local_world_size):
            yield node.worker(local_rank)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that there are so many CUDA devices, and this version of nccl."""

    def pretend(devices: int, version: tuple[int, ...]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(device.nccl, "version", lambda: version)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"):
            monkeypatch.setenv(name, "0")  # so that it is gone again after the test
            monkeypatch.delenv(name)

    return pretend


def test_the_commands_are_found() -> None:
    modules = {given.module for given in documented()}
    assert {f"examples.{path.parent.name}" for path in ROOT.glob("examples/*/__main__.py")} <= modules
    assert len(documented()) > 80


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("devices", [0, 1, 2, 8])
def test_no_documented_command_is_refused(
    machine: Any, monkeypatch: pytest.MonkeyPatch, devices: int, version: tuple[int, ...]
) -> None:
    machine(devices, version)
    refused = {}
    for given in documented():
        if devices < least(given):
            continue
        try:
            decide(given, devices, monkeypatch)
        except UserError as error:
            refused[given.text] = str(error)
    assert refused == {}


def ranks_of_jobs(commands: Iterable[Command]) -> dict[str, tuple[list[int], int]]:
    """Of each job of several nodes that is written down node by node: all its ranks, and the size of its world."""
    jobs: dict[str, tuple[list[int], int]] = {}
    for given in commands:
        # one line for all nodes: a letter, or a rendezvous that numbers them
        if not re.search(r"--(node-)?rank \d", given.text):
            continue
        args = arguments(given)
        assert args is not None, given.text
        if "torchrun" in given.launcher:
            words = dict(zip(given.launcher, given.launcher[1:], strict=False))
            node, count = int(words["--node-rank"]), int(words["--nproc-per-node"])
            first, size = node * count, count * int(words["--nnodes"])
        else:
            here = resolve(args.launch, {}, lambda: 4)
            first, count, size = here.rank, here.local_world_size, here.world_size
        job = re.sub(r" --(node-)?rank \d+| --out \S+", "", given.text)
        ranks, _ = jobs.setdefault(job, ([], size))
        ranks += range(first, first + count)
    return jobs


def test_every_rank_of_a_job_of_several_nodes_is_started() -> None:
    """Once, also by commands that cannot be run here: a job that lacks a node waits for it."""
    jobs = ranks_of_jobs(documented())
    assert sum(size > 1 for _, size in jobs.values()) >= 5
    assert {job: ranks for job, (ranks, size) in jobs.items() if sorted(ranks) != list(range(size))} == {}


@pytest.mark.parametrize("lines", [(0,), (0, 0), (1, 2)])
def test_a_missing_or_repeated_node_is_seen(lines: tuple[int, ...]) -> None:
    by_hand = "python -m examples.mnist_ddp_spawn --nproc 4 --world-size 2 --rank {} --dist-url tcp://HOST0:29500"
    torchrun = "torchrun --nnodes 2 --nproc-per-node 4 --node-rank {} --master-addr HOST0 -m examples.bert_dp"
    for text in (by_hand, torchrun):
        if text is by_hand and 2 in lines:
            continue  # refused by itself
        commands = list(filter(None, (command(text.format(number)) for number in lines)))
        ((ranks, size),) = ranks_of_jobs(commands).values()
        assert sorted(ranks) != list(range(size)) == list(range(8))


def least(given: Command) -> int:
    """The devices that a command needs because it names them."""
    return max(
        (
            1 + max(map(int, re.findall(r"\d", "".join(found))), default=0)
            for found in NAMED.findall(given.text)
            if "cpu" not in found[0]
        ),
        default=0,
    )


def decide(given: Command, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(given)
    if args is None:
        return
    for here in ranks(given, args, devices):
        if given.module == "examples.mnist_dataparallel":
            here = with_cpu_named(here, device_names(args.devices, args.launch))
        monkeypatch.setattr(place, "_current", here)
        chosen, backend = device.choose_device(here.flags, here.local_rank)
        assert backend == ("gloo" if chosen.type == "cpu" else backend)
        if chosen.type == "cuda" and args.launch.gpu is None:
            assert chosen.index == here.local_rank % devices
        if given.module == "examples.mnist_dataparallel":
            choose_devices(device_names(args.devices, args.launch), chosen.type, devices, here)


@pytest.mark.parametrize("devices", [0, 2])
@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*/__main__.py")), ids=lambda path: path.parent.name)
def test_ranks_are_bound_to_their_device_unless_they_send_single_messages(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: Path, devices: int
) -> None:
    """With nccl, single messages of a bound group share one stream: a ring of them could wait for itself."""
    name = path.parent.name
    machine(devices, NEW)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # this and the next are changed by `export`
    monkeypatch.setattr(place, "_current", None)
    train = importlib.import_module(f"examples.{name}.train")
    args = parse(importlib.import_module(f"examples.{name}.args").Args, ["--out", str(tmp_path)])
    here = resolve(args.launch, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                                 "MASTER_ADDR": "127.0.0.1"}, lambda: devices)  # fmt: skip
    given: dict[str, Any] = {}

    def init_process_group(backend: str, **words: Any) -> None:
        given.update(words, backend=backend)
        raise KeyboardInterrupt

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(KeyboardInterrupt):
        train.main_worker.__wrapped__(1, here, args)
    single = name in {"manual_allreduce_sgd", "resnet_pipeline"}
    assert given["backend"] == ("cpu:gloo,cuda:nccl" if devices else "gloo")
    assert given.get("device_id") == (torch.device("cuda", 1) if devices and not single else None)


@pytest.mark.parametrize(("devices", "chosen"), [(0, "cpu cpu"), (1, "cuda:0 cuda:0"), (8, "cuda:0 cuda:1")])
def test_two_halves_of_a_model_take_what_is_there(
    machine: Any, monkeypatch: pytest.MonkeyPatch, devices: int, chosen: str
) -> None:
    machine(devices, NEW)
    monkeypatch.setattr(torch, "empty", lambda _, device: SimpleNamespace(device=device))
    assert " ".join(map(str, toy.two_devices(None))) == chosen


@pytest.mark.parametrize(
    ("ranks", "devices", "version", "flag", "found"),
    [
        (2, 2, OLD, "auto", "nccl"),
        (2, 1, OLD, "auto", "gloo"),
        (2, 1, OLD, "gloo", "gloo"),
        (2, 1, NEW, "auto", "nccl, shared"),
        (2, 1, NEW, "gloo", "gloo"),
        (8, 2, NEW, "nccl", "nccl, shared"),
    ],
)
def test_the_backend_of_ranks_that_share_devices(
    machine: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, devices: int, version: Any, flag: Any, found: str
) -> None:
    machine(devices, version)
    here = resolve(Launch(nproc=ranks, dist_backend=flag), {}, lambda: devices)
    monkeypatch.setattr(place, "_current", here)
    assert device.ranks_share_devices() == (ranks > devices)
    _, backend = device.choose_device(here.flags, ranks - 1)
    assert ("nccl" in backend) == found.startswith("nccl")
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in os.environ) == found.endswith("shared")


def test_ranks_that_are_sent_to_one_device_share_it(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun and `--gpu`, although there are devices enough."""
    machine(8, OLD)
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    here = resolve(Launch(gpu=3), env | {"RANK": "1", "LOCAL_RANK": "1"}, lambda: 8)
    monkeypatch.setattr(place, "_current", here)
    assert device.choose_device(here.flags, 1) == (torch.device("cuda:3"), "gloo")
    assert device.ranks_share_devices()
    assert device.used_devices() == 1
    alone = resolve(Launch(gpu=3), {}, lambda: 8)
    monkeypatch.setattr(place, "_current", alone)
    assert device.choose_device(alone.flags, 0) == (torch.device("cuda:3"), "cpu:gloo,cuda:nccl")


def test_an_old_nccl_asked_for_by_name_is_refused(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1, OLD)
    here = resolve(Launch(nproc=2, dist_backend="nccl"), {}, lambda: 1)
    monkeypatch.setattr(place, "_current", here)
    with pytest.raises(UserError, match=r"2 processes share 1 CUDA .* \(2.28.9\) cannot do that before 2.30; leave"):
        device.choose_device(here.flags, 0)


def test_a_task_of_slurm_with_a_device_of_its_own_shares_none(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1, OLD)
    env = {
        "SLURM_NTASKS": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_PROCID": "3",
    }
    monkeypatch.setattr(place, "_current", resolve(Launch(), env | {"SLURM_LOCALID": "3"}, lambda: 1))
    assert not device.ranks_share_devices()
    assert device.choose_device(Launch(), 3) == (torch.device("cuda:0"), "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_messages_of_cuda_tensors_pass_through_the_host_under_gloo(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    assert messages.message_device(torch.device("cuda:1")) == torch.device("cpu" if backend == "gloo" else "cuda:1")


def test_what_was_summed_elsewhere_is_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device under gloo; here another dtype makes the copy."""
    seen = []

    def summed(flat: torch.Tensor) -> int:
        seen.append(flat.data_ptr())
        flat += 1
        return flat.nbytes

    monkeypatch.setattr(allreduce, "message_device", lambda _: torch.float64)  # `to` makes a copy
    tensor = torch.zeros(2, 3)
    assert allreduce.all_reduce(tensor, summed) == 48
    assert tensor.tolist() == [[1.0] * 3] * 2
    assert seen != [tensor.data_ptr()]
